# shellcheck shell=bash
# Functions of the job script, which runs on the first node of the allocation (or, started with
# bash instead of sbatch, on this host). They need RUN_DIR, COOKBOOK, VENV, NODES, RANKS_PER_NODE.

# $$ stays the job script's own process in every subshell.
export JOB_PID=$$

say() { printf '%s cookbook: %s\n' "$(date -u +%H:%M:%S)" "$*"; }

# The run's records are kept by one small Python program, which needs only the standard library.
record() { PYTHONPATH=$COOKBOOK "$VENV/bin/python" -m launcher.attempt "$@"; }

under_slurm() { [ -n "${SLURM_JOB_ID:-}" ]; }

# Sets ATTEMPT, LOGS, HEAD_ADDR, HEAD_PORT and ONE_HOST; false where there is nothing left to do.
begin_attempt() {
  [ "${NEXT:-run}" = run ] || return 1
  if [ ! -x "$VENV/bin/python" ]; then
    say "fault: $(hostname -s) cannot see the environment $VENV: put it on a filesystem that all nodes mount"
    NEXT=failed
    return 1
  fi
  local hosts head
  if under_slurm; then
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    head=${hosts%%$'\n'*}
    # Slurm's own address of a node is one that its daemons use between the nodes. The batch node's
    # own idea of its name may be 127.0.1.1, and its host name may be unknown to the others.
    HEAD_ADDR=$(node_addresses "$head")
    ONE_HOST=no
    if [ "$NODES" = 1 ] || [ "$(node_addresses "$SLURM_JOB_NODELIST" | sort -u | wc -l)" = 1 ]; then ONE_HOST=yes; fi
  else
    hosts=$(hostname -s)
    HEAD_ADDR=127.0.0.1 ONE_HOST=yes
  fi
  HEAD_ADDR=${HEAD_ADDR:-$head}
  local answer
  # Prints the attempt's number and a free port, or why nothing is to be done.
  answer=$(record begin --hosts "${hosts//$'\n'/,}" --head "$HEAD_ADDR") || { NEXT=failed; return 1; }
  if [ "$answer" = finished ]; then NEXT=finished; return 1; fi
  read -r ATTEMPT HEAD_PORT <<<"$answer"
  LOGS=$RUN_DIR/logs/$ATTEMPT
  export ATTEMPT LOGS HEAD_ADDR HEAD_PORT ONE_HOST COOKBOOK_ATTEMPT=$ATTEMPT
  say "attempt $ATTEMPT on ${hosts//$'\n'/, }; first node $HEAD_ADDR:$HEAD_PORT; logs in $LOGS"
}

node_addresses() { scontrol --oneliner show node "$1" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p'; }

launch_nodes() {
  # What a recipe allows one attempt; srun hands the signal on to the ranks.
  local limit=()
  if [ -n "${TIMEOUT_S:-}" ]; then limit=(timeout --kill-after=60 "$TIMEOUT_S"); fi
  if under_slurm; then
    # Since 22.05 srun does not read --cpus-per-task from the job; say it.
    "${limit[@]}" srun --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 \
      ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
      --kill-on-bad-exit=1 --wait=60 --export=ALL \
      --output="$LOGS/node_%t.log" --open-mode=append \
      bash -c "$1" </dev/null
    return
  fi
  # Without Slurm the nodes are processes of this host; the first to fail takes the others along.
  local node pid pids=() rc=0
  trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM
  for ((node = 0; node < NODES; node++)); do
    NODE_RANK=$node "${limit[@]}" bash -c "$1" >>"$LOGS/node_$node.log" 2>&1 </dev/null &
    pids+=($!)
  done
  while [ -n "$(jobs -pr)" ]; do
    wait -n || kill -TERM "${pids[@]}" 2>/dev/null
  done
  for pid in "${pids[@]}"; do wait "$pid" || rc=1; done
  return $rc
}

# Waits for a process to end, however many signals are handled meanwhile; returns its status.
wait_for() {
  LAUNCHED=$1
  local rc
  while :; do
    wait "$LAUNCHED"
    rc=$?
    kill -0 "$LAUNCHED" 2>/dev/null || { unset LAUNCHED; return $rc; }
  done
}

# torchrun dies of an unhandled signal, so the ranks are told by a file: they agree at the next
# step, save a checkpoint and end.
ask_to_stop() {
  say "the time limit is near: the ranks save a checkpoint and stop"
  touch "$RUN_DIR/.stop"
}

job_state() { scontrol --oneliner show job "$SLURM_JOB_ID" | sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p'; }

# A TERM may be scancel, the time limit or preemption: Slurm's own state of the job tells which.
terminated() {
  local state=CANCELLED
  if under_slurm; then
    state=$(job_state)
  elif [ -n "${LAUNCHED:-}" ]; then
    kill -TERM "$LAUNCHED" 2>/dev/null
    wait "$LAUNCHED"
  fi
  say "terminated (${state:-no word from Slurm})"
  if [ -n "${ATTEMPT:-}" ]; then
    record end --attempt "$ATTEMPT" --exit-code 143 --job-state "${state:-UNKNOWN}" >/dev/null
  fi
  exit 143
}

# Sets NEXT: finished, failed, run (again, here and now) or requeue.
end_attempt() {
  local ended=$ATTEMPT
  ATTEMPT=
  # By a file: of signals that come while it reads a $(...) bash 5.2 loses one in a hundred, and what
  # ends srun is often what sends this script a TERM.
  record end --attempt "$ended" --exit-code "$1" --max-retries "$MAX_RETRIES" \
    --timeout-s "${TIMEOUT_S:-0}" >"$LOGS/next" && read -r NEXT <"$LOGS/next" || NEXT=failed
  # A node that was lost a moment ago is still part of the allocation until Slurm takes note.
  if [ "$NEXT" = run ] && under_slurm && ! nodes_answer; then
    say "a node of this allocation does not answer"
    NEXT=requeue
  fi
}

nodes_answer() {
  timeout 30 srun --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 true </dev/null >/dev/null 2>&1
}

finish() {
  if [ "$NEXT" = requeue ]; then
    if under_slurm; then
      say "back into the queue: the next attempt goes on from the last checkpoint"
      # This ends the script at once, so all state is written before it.
      scontrol requeue "$SLURM_JOB_ID" && exit 0
      # Slurm may have put it there itself a moment ago, for want of a node.
      [ "$(job_state)" = PENDING ] && exit 0
      record failed --cause "Slurm refused to requeue job $SLURM_JOB_ID: go on with: cookbook resume last"
    fi
    NEXT=failed
  fi
  [ "$NEXT" = finished ]
  exit
}
