# shellcheck shell=bash
# Functions of the job script, which runs on the first node of the allocation or, if it is started
# with bash instead of sbatch, on this host. They need RUN_DIR, COOKBOOK, VENV and NODES.

# $$ is the job script's own process in every subshell.
export JOB_PID=$$

say() { printf '%s cookbook: %s\n' "$(date -u +%H:%M:%S)" "$*"; }

# One small Python program keeps the run's records. It needs only the standard library, and -P keeps
# it from importing what lies in the folder from which the job was submitted.
record() { PYTHONPATH=$COOKBOOK "$VENV/bin/python" -P -m slurm.attempt "$@"; }

under_slurm() { [ -n "${SLURM_JOB_ID:-}" ]; }

# A line of the site's job_setup failed, or ended the script: the run fails, because a retry cannot fix
# that. SETUP_LINE is the line, SITE_FILE the file that it comes from.
setup_failed() {
  local rc=$?
  trap - ERR EXIT
  set +eu
  [ "$rc" != 0 ] || rc=1
  begin_attempt || finish
  end_attempt "$rc" --message "the job_setup line '$SETUP_LINE' failed with exit status $rc (see $RUN_DIR/logs/job.log): fix job_setup in $SITE_FILE for new runs, and the line in $RUN_DIR/job.sbatch to resume this one"
  finish
}

# Sets ATTEMPT, LOGS, HEAD_ADDR, HEAD_PORT and ONE_HOST; false if there is nothing left to do.
begin_attempt() {
  [ "${NEXT:-run}" = run ] || return 1
  if [ ! -x "$VENV/bin/python" ]; then
    say "fault: $(hostname -s) cannot see the virtual environment $VENV: put it on a filesystem that all nodes mount"
    NEXT=failed
    return 1
  fi
  local hosts head
  if under_slurm; then
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    head=${hosts%%$'\n'*}
    # Slurm's address of a node is the one that its daemons use between the nodes. On the node itself
    # its name may mean 127.0.1.1, and the others may not know its host name.
    HEAD_ADDR=$(node_addresses "$head")
    ONE_HOST=no
    if [ "$NODES" = 1 ] || [ "$(node_addresses "$SLURM_JOB_NODELIST" | sort -u | wc -l)" = 1 ]; then ONE_HOST=yes; fi
  else
    hosts=$(hostname -s)
    HEAD_ADDR=127.0.0.1 ONE_HOST=yes
  fi
  HEAD_ADDR=${HEAD_ADDR:-$head}
  local answer begin=(record begin --hosts "${hosts//$'\n'/,}" --head "$HEAD_ADDR")
  # Prints the attempt's number and a free port, or why there is nothing to do.
  answer=$("${begin[@]}") || { NEXT=failed; return 1; }
  if [ "${answer% *}" = busy ]; then
    local other=${answer#busy }
    if job_runs "$other"; then
      say "job $other still works on this run: to start it again, cancel that job first: cookbook cancel ${RUN_DIR##*/}"
      NEXT=failed
      return 1
    fi
    answer=$("${begin[@]}" --ended "$other") || { NEXT=failed; return 1; }
  fi
  if [ "$answer" = finished ]; then NEXT=finished; return 1; fi
  read -r ATTEMPT HEAD_PORT <<<"$answer"
  LOGS=$RUN_DIR/logs/$ATTEMPT
  export ATTEMPT LOGS HEAD_ADDR HEAD_PORT ONE_HOST COOKBOOK_ATTEMPT=$ATTEMPT
  say "attempt $ATTEMPT on ${hosts//$'\n'/, }; first node $HEAD_ADDR:$HEAD_PORT; logs in $LOGS"
}

# Whether another job is there; if Slurm does not say, it is taken to be.
job_runs() {
  local words
  case $1 in local-*) return 0 ;; esac # the record has looked for its process
  if words=$(squeue --noheader --jobs="$1" --format=%T 2>&1); then [ -n "$words" ]; else [[ $words != *"Invalid job id"* ]]; fi
}

node_addresses() { scontrol --oneliner show node "$1" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p'; }

# Runs in a process of its own, which becomes srun.
launch_nodes() {
  # The recipe's timeout of one attempt; srun passes the signal on to the ranks.
  local limit=()
  if [ -n "${TIMEOUT_S:-}" ]; then limit=(timeout --kill-after=60 "$TIMEOUT_S"); fi
  if under_slurm; then
    # Since 22.05 srun does not take --cpus-per-task from the job.
    exec "${limit[@]}" srun --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 \
      ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
      --kill-on-bad-exit=1 --wait=60 --export=ALL \
      --output="$LOGS/node_%t.log" --open-mode=append \
      bash -c "$1" </dev/null
  fi
  # Without Slurm the nodes are processes of this host; the first to fail ends the others.
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
# Meanwhile the watchdog ends it if the ranks hang, or do not stop when they are asked to; an entry
# that tells nothing of its steps has none.
wait_for() {
  LAUNCHED=$1
  local rc
  if [ -n "${HANG_TIMEOUT_S:-}" ]; then
    PYTHONPATH=$COOKBOOK "$VENV/bin/python" -P -m slurm.watchdog "$LAUNCHED" &
  fi
  while :; do
    wait "$LAUNCHED"
    rc=$?
    kill -0 "$LAUNCHED" 2>/dev/null || { unset LAUNCHED; return $rc; }
  done
}

# torchrun does not handle such a signal, so a file informs the ranks: at the next step they all save
# a checkpoint and end.
ask_to_stop() {
  say "the time limit is near: the ranks save a checkpoint and stop"
  touch "$RUN_DIR/.stop"
}

job_state() { scontrol --oneliner show job "$SLURM_JOB_ID" | sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p'; }

# A TERM may be scancel, the time limit or preemption: Slurm's state of the job says which.
terminated() {
  trap - ERR EXIT
  local state=CANCELLED
  if under_slurm; then
    state=$(job_state)
  elif [ -n "${LAUNCHED:-}" ]; then
    kill -TERM "$LAUNCHED" 2>/dev/null
    wait "$LAUNCHED"
  fi
  say "terminated (${state:-Slurm does not say why})"
  if [ -n "${ATTEMPT:-}" ]; then
    record end --attempt "$ATTEMPT" --exit-code 143 --job-state "${state:-UNKNOWN}" >/dev/null
  fi
  exit 143
}

# Takes the exit status, and more arguments of `record end`. Sets NEXT: finished, failed, run (again,
# on these nodes) or requeue.
end_attempt() {
  local ended=$ATTEMPT
  ATTEMPT=
  # Through a file: bash 5.2 loses one in a hundred signals that come while it reads a $(...), and what
  # ends srun often sends this script a TERM, too.
  record end --attempt "$ended" --exit-code "$1" --max-retries "$MAX_RETRIES" \
    --timeout-s "${TIMEOUT_S:-0}" "${@:2}" >"$LOGS/next" && read -r NEXT <"$LOGS/next" || NEXT=failed
  # A node that was lost a moment ago is part of the allocation until Slurm notices.
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
      say "back into the queue: the next attempt continues from the last checkpoint"
      # This ends the script at once, so all state has been written before.
      scontrol requeue "$SLURM_JOB_ID" && exit 0
      # Slurm may have put it there itself a moment ago, for lack of a node.
      [ "$(job_state)" = PENDING ] && exit 0
      record failed --message "Slurm refused to requeue job $SLURM_JOB_ID: continue with: cookbook resume ${RUN_DIR##*/}"
    fi
    NEXT=failed
  fi
  [ "$NEXT" = finished ]
  exit $?   # in an EXIT trap, exit alone would return the status from before it
}
