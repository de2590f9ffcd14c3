# shellcheck shell=bash
# Run by `cookbook doctor --rehearse` behind node_check.sh, in the same shell: trains each part of a
# rehearsal, one after the other, whatever comes of the others. Needs REHEARSAL, the folder of the
# parts, MODULE, the trainer's with its first argument, LIMIT_S, seconds for all, and
# RANKS_PER_NODE; and what node_check.sh needs.

# So few seconds are not enough for a part.
SHORTEST_S=20

# trains PART FOLDER STOP_AT: as a job does, on this node; asked to stop once it has logged this many
# steps (0: never).
trains() (
  local left=$((LIMIT_S - SECONDS)) folder=$REHEARSAL/$2 program
  read -ra program <<<"$MODULE"
  [ "$left" -ge "$SHORTEST_S" ] || exit 125
  export RUN_DIR=$folder LOGS=$folder/logs/0 COOKBOOK_ATTEMPT=0 FILES_WAIT_S=5
  export HEAD_ADDR=localhost HEAD_PORT ONE_HOST=yes NODES=1 RANKS_PER_NODE VENV COOKBOOK HF_HOME COOKBOOK_ROOT
  mkdir -p "$LOGS"
  rm -f "$folder/.stop" "$LOGS"/error_*.json
  HEAD_PORT=$(PYTHONPATH=$COOKBOOK "$VENV/bin/python" -S -P -c "from slurm.rendezvous import port_of; print(port_of('$SLURM_JOB_ID', 0))") || exit 1
  if [ "$3" -gt 0 ]; then
    (until [ "$(wc -l 2>/dev/null <"$folder/metrics.jsonl" || echo 0)" -ge "$3" ]; do sleep 0.2; done; touch "$folder/.stop") &
    watcher=$!
    trap 'kill $watcher 2>/dev/null' EXIT
  fi
  # shellcheck source=slurm/node.sh
  source "$COOKBOOK/slurm/node.sh"
  timeout --kill-after=10 "$left" python -P -m torch.distributed.run --nproc-per-node="$RANKS_PER_NODE" \
    --rdzv-backend=static --master-addr="$HEAD_ADDR" --master-port="$HEAD_PORT" --max-restarts=0 --no-python \
    bash "$COOKBOOK/slurm/rank.sh" python -P -m "${program[@]}" "$folder/train.yaml"
)

part() {
  local began=$SECONDS status=0
  trains "$@" >"$REHEARSAL/$1.log" 2>&1 || status=$?
  report part "$1 $2 $status $((SECONDS - began))"
  return "$status"
}

part uncompiled uncompiled 3
# What is resumed and exported: without a compiler the uncompiled part.
whole=uncompiled
if part compiled compiled 3; then whole=compiled; fi
# Some steps more than there are, so that it ends with its export.
steps=$(wc -l 2>/dev/null <"$REHEARSAL/$whole/metrics.jsonl" || echo 0)
sed -i "s/^max_steps: .*/max_steps: $((steps + 3))/" "$REHEARSAL/$whole/train.yaml"
part resumed "$whole" 0
report rehearsed yes
