#!/usr/bin/env bash
# All experiments of course.yaml with tiny models on CPUs: bash examples/large_models/run.sh
# Takes about ten minutes on two cores. Nothing is downloaded; it runs without Slurm.
# MEMORY_GIB: what a rank may allocate, as a GPU's memory would limit it.
set -euo pipefail
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
cookbook sweep "$here/course.yaml" --local --dry-run "${settings[@]}" | grep -B99 "predicted for" || true

step "measurement"
(
  # Of private memory. What a process exceeds ends it as "can't allocate memory".
  ulimit -d "$(awk -v gib="${MEMORY_GIB:-2.3}" 'BEGIN { printf "%d", gib * 1024 * 1024 }')"
  cookbook sweep "$here/course.yaml" --local "${settings[@]}"
) || true

step "table and plots"
cookbook results course --format json >"$COOKBOOK_ROOT/results.json"
python "$here/table.py" "$COOKBOOK_ROOT"
cookbook report course --output "$COOKBOOK_ROOT/report.html"
