#!/usr/bin/env bash
# All experiments of the course with tiny models on CPUs: bash examples/large_models/run.sh
# Takes about ten minutes on two cores. Nothing is downloaded; it runs without Slurm.
# MEMORY_GIB: what a rank may allocate, as a GPU's memory would limit it.
# LITGPT_VENV: a virtual environment with LitGPT, which then runs the experiments of litgpt.yaml too.
set -euo pipefail
[ $# -eq 0 ] || { echo "error: unknown argument in '$*': bash $0" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
# A root of its own: its tiny models have the names of the real ones.
export COOKBOOK_ROOT=${COOKBOOK_ROOT:-$(cd "$here/../.." && pwd -P)}/large_models
step() { printf '\n== %s\n' "$*"; }

step "models and data"
mkdir -p "$COOKBOOK_ROOT"
PYTHONPATH=$here/../.. python "$here/models.py" "$COOKBOOK_ROOT"

settings=(hub=null "dataset.source=$COOKBOOK_ROOT/instructions" dataset.split=train tokenizer.max_seq_len=128
  max_steps_per_epoch=3 log_every_n_steps=1 save_every_n_steps=1000)
step "prediction"
for study in one_gpu four_gpus; do
  cookbook sweep "$study" --local --dry-run "${settings[@]}" | grep -B99 "predicted for" || true
done

# Runs a command with limited private memory. What exceeds it ends as "can't allocate memory".
limited() (
  ulimit -d "$(awk -v gib="${MEMORY_GIB:-2.3}" 'BEGIN { printf "%d", gib * 1024 * 1024 }')"
  "$@"
)
step "measurement"
for study in one_gpu four_gpus; do
  limited cookbook sweep "$study" --local "${settings[@]}" || true
done

step "table and plots"
cookbook results one_gpu four_gpus --json >"$COOKBOOK_ROOT/results.json"
python "$here/table.py" "$COOKBOOK_ROOT"
cookbook report one_gpu four_gpus --output "$COOKBOOK_ROOT/report.html"

[ -n "${LITGPT_VENV:-}" ] || exit 0
step "LitGPT itself"
# Its checkpoints are beside its config.
lit=$COOKBOOK_ROOT/litgpt
mkdir -p "$lit"
cp "$here"/litgpt*.yaml "$lit"
"$LITGPT_VENV/bin/python" "$here/litgpt_models.py" "$COOKBOOK_ROOT" "$lit"
source="{json_path: $lit/alpaca.json, val_split_fraction: 0.1, num_workers: 0}"
COOKBOOK_VENV=$LITGPT_VENV limited cookbook sweep "$lit/litgpt.yaml" --local \
  "parameters.data={class_path: litgpt.data.JSON, init_args: $source}" parameters.train.max_steps=3 \
  parameters.train.lr_warmup_steps=1 parameters.train.max_seq_length=128 \
  +parameters.train.log_interval=1 || true
cookbook results litgpt
