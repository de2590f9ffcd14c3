#!/usr/bin/env bash
# The guide with a tiny model, on CPUs: bash examples/automodel_squad/run.sh [--local]
# Takes about five minutes on two busy cores. Nothing is downloaded. --local: without Slurm.
# AUTOMODEL_PYTHON: a Python with nemo-automodel, for its losses beside the kit's; else they are left out.
set -euo pipefail
[[ $* =~ ^(--local)?$ ]] || { echo "error: unknown argument in '$*': bash $0 [--local]" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
root=${COOKBOOK_ROOT:-$(cd "$here/../.." && pwd -P)}
how=("$@")
step() { printf '\n== %s\n' "$*"; }
run_of() { python -c 'import json, sys; print(json.load(sys.stdin)["run"])'; }
lr=3e-3 epochs=5
data=$root/datasets/squad model=$root/models/squad-tiny work=$root/squad
mkdir -p "$work"

step "data and model"
PYTHONPATH=$here/../.. python "$here/data.py" "$data" "$model"
head -n 1 "$data/train.jsonl"

# Trains on NODES x RANKS; the global batch of 64 is divided by the ranks.
trained() {
  local name=$1 nodes=$2 ranks=$3 run
  step "$name"
  # fp32, so that the layouts can be compared.
  run=$(cookbook submit "$here/kit.yaml" --nodes "$nodes" --gpus-per-node "$ranks" --name "squad-$name" \
    --json "${how[@]}" gradient_accumulation_steps=$((8 / (nodes * ranks))) dtype=fp32 hub=null \
    "checkpointer.checkpoint_dir=$model" "dataset.source=$data" dataset_val.split=validation \
    optimizer.lr="$lr" lr_scheduler.min_lr=3e-4 epochs="$epochs" \
    save_every_n_steps=10 run_val_every_n_steps=10 tokenizer.max_seq_len=512 | run_of)
  cookbook watch "$run" --plain
  ln -sfn "$root/runs/$run" "$work/run-$name"
}
trained one_gpu 1 1
trained four_gpus 1 4
trained two_nodes 2 4

if [ -n "${AUTOMODEL_PYTHON:-}" ]; then
  step "Automodel's own data, loss and schedule on the same samples"
  "$AUTOMODEL_PYTHON" "$here/parts.py" "$model" "$data" "$lr" "$epochs" | tail -n 1 >"$work/automodel.json"
fi

step "losses side by side"
python "$here/losses.py" "$work"
