#!/usr/bin/env bash
# From raw requests to a model that classifies intents: bash examples/support_intents/run.sh [--local]
# Takes about ten minutes on two cores. Nothing is downloaded. --local: without Slurm.
# SUPPORT_COUNT: number of requests to generate, 200000 by default.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
root=${COOKBOOK_ROOT:-$(cd "$here/../.." && pwd -P)}
how=("$@")
step() { printf '\n== %s\n' "$*"; }
run_of() { python -c 'import json, sys; print(json.load(sys.stdin)["run"])'; }

step "raw requests with planted faults"
raw=$root/datasets/raw/support
python "$here/generate.py" "$raw" --count "${SUPPORT_COUNT:-200000}"

step "base model: the demo's, trained to read requests, not to classify them"
base=$(cookbook submit "$here/base.yaml" --name support-base --json "${how[@]}" | run_of)
cookbook watch "$base" --plain
model=$root/runs/$base/export

step "prepare: filter, duplicates, personal data, prompt, tokens, cap, split"
cookbook prepare support "steps.6.tokens.tokenizer=$model"
cookbook data show support

step "QLoRA on the train split"
tuned=$(cookbook submit "$here/support_qlora.yaml" "checkpointer.checkpoint_dir=$model" \
  --name support-qlora --json "${how[@]}" | run_of)
cookbook watch "$tuned" --plain
cookbook results "$tuned"
python -c 'import json, math, sys; told = json.load(open(sys.argv[1])); print(
  "step", told["best_step"], "is exported: val loss", told["best_val_loss"],
  "perplexity", round(math.exp(told["best_val_loss"]), 4))' "$root/runs/$tuned/progress.json"

step "accuracy on the test split: the base, then the best checkpoint"
test=$root/datasets/prepared/support/current/data/test
python "$here/score.py" "$model" "$test"
python "$here/score.py" "$root/runs/$tuned/export" "$test"
