#!/usr/bin/env bash
# From data to a served champion, and back to data: bash examples/lifecycle/run.sh [--local]
# Takes a few minutes on two cores. Nothing is downloaded. --local: without Slurm.
set -euo pipefail
[[ $* =~ ^(--local)?$ ]] || { echo "error: unknown argument in '$*': bash $0 [--local]" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
root=${COOKBOOK_ROOT:-$(cd "$here/../.." && pwd -P)}
how=("$@")
step() { printf '\n== %s\n' "$*"; }
run_of() { python -c 'import json, sys; print(json.load(sys.stdin)["run"])'; }

step "data"
data=$root/datasets/help-desk
python "$here/data.py" "$data"
wc -l "$data"/*.jsonl

step "base model: the demo's, trained on a few of the requests"
base=$(cookbook submit demo "dataset.data_files=$data/base.jsonl" epochs=15 save_every_n_steps=1000 \
  --nodes 1 --name base --json "${how[@]}" | run_of)
cookbook watch "$base" --plain

step "QLoRA on all intents"
tuned=$(cookbook submit "$here/intent.yaml" "checkpointer.checkpoint_dir=$root/runs/$base/export" \
  "dataset.data_files=$data/train.jsonl" --name intent --json "${how[@]}" | run_of)
cookbook watch "$tuned" --plain

step "evaluation against the base"
cookbook eval "$tuned" --suite "$here/suite.yaml" --against base --watch --samples 2 \
  "tasks.likelihood.data=$data/test.jsonl" "tasks.intent.data=$data/test.jsonl" "${how[@]}"

step "registry: candidate, gates, champion"
cookbook register "$tuned" --as support-intent
cookbook promote support-intent --to champion --gates "$here/gates.yaml" --why "the first one"
cookbook registry support-intent

step "serve, query"
cookbook serve models:/support-intent@champion --time 01:00:00 "${how[@]}"
trap 'cookbook serve --stop support-intent' EXIT
cookbook query support-intent "My order has not arrived" --max-tokens 6
while read -r question; do
  cookbook query support-intent "$question" --max-tokens 6
done < <(head -n 20 "$data/test.jsonl" | python -c 'import json, sys; [print(json.loads(x)["question"]) for x in sys.stdin]')

step "monitor, and use the log as data"
cookbook serve --stats support-intent
cookbook prepare from-requests support-intent --since 7d
cookbook prepare "$root/datasets/requests-support-intent/requests-support-intent.yaml"
cookbook data show requests-support-intent
