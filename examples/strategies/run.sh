#!/usr/bin/env bash
# One task by eight methods, in one table: bash examples/strategies/run.sh [--local]
# Takes about ten minutes on two busy cores. Nothing is downloaded. --local: without Slurm.
set -euo pipefail
[[ $* =~ ^(--local)?$ ]] || { echo "error: unknown argument in '$*': bash $0 [--local]" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
root=${COOKBOOK_ROOT:-$(cd "$here/../.." && pwd -P)}
how=("$@")
step() { printf '\n== %s\n' "$*"; }
# Submits a recipe, waits, and shows its export to the sweep as models/strategies-NAME.
made() {
  local name=$1 run
  run=$(cookbook submit "${@:2}" --name "strategies-$name" --json "${how[@]}" |
    python -c 'import json, sys; print(json.load(sys.stdin)["run"])')
  cookbook watch "$run" --plain
  ln -sfn "$root/runs/$run/export" "$root/models/strategies-$name"
}

# Evaluating a prompt or a prefix needs it.
python -c 'import peft' 2>/dev/null || { echo "peft is missing: bash setup.sh --with serve" >&2; exit 1; }

step "data"
data=$root/datasets/strategies
python "$here/data.py" "$data"
wc -l "$data"/*.jsonl

step "base model: it has learnt to name the intent, the thing or the tone of a request"
made base demo "dataset.data_files=$data/base.jsonl" epochs=12 save_every_n_steps=1000 \
  --nodes 1

step "for DPO: LoRA for half of the steps; for distillation: a teacher of twice the width"
# The teacher is trained on all requests but the test's. Both runs at once.
made sft "$here/intents.yaml" epochs=3 model.adapter=lora model.lora_rank=16 model.lora_alpha=32 \
  optimizer.lr=5e-3 >"$data/sft.log" &
python "$here/wider.py" "$root/models/strategies-base" "$root/models/strategies-wide"
made teacher "$here/intents.yaml" epochs=3 "dataset.data_files=$data/large.jsonl" \
  "checkpointer.checkpoint_dir=$root/models/strategies-wide"
wait $!
cat "$data/sft.log"

step "the eight methods"
cookbook sweep strategies "${how[@]}"
cookbook watch strategies --plain
cookbook results strategies --json >"$data/results.json"

step "accuracy on the test requests"
# Two at a time: much of an evaluation is its start.
# shellcheck disable=SC2016 # the inner shell expands it
{
  for name in base sft teacher; do echo "$root/models/strategies-$name $name"; done
  python -c 'import json, sys; [print(row["run"], row["run"]) for row in json.load(open(sys.argv[1]))]' \
    "$data/results.json"
} | here=$here data=$data xargs -n 2 -P 2 bash -c \
  'cookbook eval "${@:1:$#-1}" --suite "$here/suite.yaml" --watch --json >"$data/${!#}.eval.json"' evaluated "${how[@]}"

step "table"
python "$here/table.py" "$root"
