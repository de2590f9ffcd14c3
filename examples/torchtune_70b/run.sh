#!/usr/bin/env bash
# The guide with a tiny model, on 2 nodes x 1 rank: bash examples/torchtune_70b/run.sh [--local]
# Takes three minutes on two busy cores. Nothing is downloaded. --local: without Slurm.
set -euo pipefail
[[ $* =~ ^(--local)?$ ]] || { echo "error: unknown argument in '$*': bash $0 [--local]" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
root=${COOKBOOK_ROOT:-$(cd "$here/../.." && pwd -P)}
how=("$@")
step() { printf '\n== %s\n' "$*"; }
run_of() { python -c 'import json, sys; print(json.load(sys.stdin)["run"])'; }
# What a stock config needs for a tiny model on CPUs.
tiny=(--nodes 2 --gpus-per-node 1 --time 00:15:00 device=cpu dtype=fp32 optimizer.fused=false
  tokenizer.max_seq_len=512 batch_size=16 seed=0 log_every_n_steps=10 optimizer.lr=3e-3 clip_grad_norm=1.0)

step "model: a local folder in place of the download"
model=$root/models/torchtune-tiny
(cd "$here/../.." && python -m trainer.demo "$model" --dataset configs/datasets/slurm_qa.jsonl)

step "data: own chats"
chats=$root/datasets/torchtune/chats.jsonl
python "$here/chats.py" "$chats"
head -n 1 "$chats"

step "full fine-tuning: torchtune's llama3_1/70B_full"
full=$(cookbook submit llama3_1/70B_full --model "$model" --data "$chats" --name guide-full --json \
  "${tiny[@]}" epochs=60 \
  +lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup \
  +lr_scheduler.num_warmup_steps=20 "${how[@]}" | run_of)

step "queue and logs"
[[ " ${how[*]} " == *" --local "* ]] || squeue --me
cookbook status "$full"
cookbook watch "$full" --plain
cookbook logs "$full" --node 1 | tail -n 3

step "LoRA with a trace: torchtune's llama3_1/70B_lora, from the full run's model"
lora=$(cookbook submit llama3_1/70B_lora --model "$root/runs/$full/export" --data "$chats" --profile \
  --name guide-lora --json "${tiny[@]}" optimizer.lr=3e-3 epochs=25 \
  lr_scheduler.num_warmup_steps=10 save_adapter_weights_only=false "${how[@]}" | run_of)
cookbook watch "$lora" --plain
cookbook profile "$lora"

step "results"
cookbook results "$lora"

step "the merged model answers"
python "$here/answer.py" "$root/runs/$lora/export" "What is Slurm used for?"
