#!/usr/bin/env bash
# From two sources of compared answers to a served model: bash examples/preference/run.sh [--local]
# Takes a few minutes on two cores. Nothing is downloaded. --local: without Slurm.
set -euo pipefail
[[ $* =~ ^(--local)?$ ]] || { echo "error: unknown argument in '$*': bash $0 [--local]" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
root=${COOKBOOK_ROOT:-$(cd "$here/../.." && pwd -P)}
how=("$@")
step() { printf '\n== %s\n' "$*"; }
run_of() { python -c 'import json, sys; print(json.load(sys.stdin)["run"])'; }

step "data: pairs of two sources"
raw=$root/datasets/raw/answers
python "$here/data.py" "$raw"
wc -l "$raw"/*.jsonl

step "base model: the demo's, trained on both kinds of answers"
base=$(cookbook submit demo "dataset.data_files=$raw/base.jsonl" epochs=12 save_every_n_steps=1000 \
  --nodes 1 --name answers-base --json "${how[@]}" | run_of)
cookbook watch "$base" --plain

step "prepare: two sources, without duplicates, split"
cookbook prepare "$here/pairs.yaml" --name answers
cookbook data show answers

step "DPO by LoRA on the train split"
tuned=$(cookbook submit "$here/dpo.yaml" "checkpointer.checkpoint_dir=$root/runs/$base/export" \
  --name answers-dpo --json "${how[@]}" | run_of)
cookbook watch "$tuned" --plain

step "evaluation against the base: accuracy on pairs"
cookbook eval "$tuned" --suite "$here/suite.yaml" --against base --watch \
  "tasks.pairs.data=$raw/test.jsonl" "${how[@]}"

step "registry: candidate, gates, champion"
cookbook register "$tuned" --as answers
cookbook promote answers --to champion --gates "$here/gates.yaml" --why "prefers helpful answers"
cookbook registry answers

step "serve, query"
cookbook serve models:/answers@champion --time 01:00:00 "${how[@]}"
trap 'cookbook serve --stop answers' EXIT
cookbook query answers "What does squeue do?" --max-tokens 12
