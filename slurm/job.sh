# shellcheck shell=bash
# Functions of the job script, which runs on the first node of the allocation or, if it is started
# with bash instead of sbatch, on this host. They need RUN_DIR, COOKBOOK, VENV and NODES.

# Of --no-kill, which spare nodes need: for srun it would mean that ranks outlive each other.
unset SLURM_NO_KILL

# $$ is the job script's own process in every subshell.
export JOB_PID=$$

say() { printf '%s cookbook: %s\n' "$(date -u +%H:%M:%S)" "$*"; }

# One small Python program keeps the run's records. It needs only the standard library, and -P keeps
# it from importing what lies in the folder from which the job was submitted.
record() { PYTHONPATH=$COOKBOOK "$VENV/bin/python" -P -m slurm.attempt "$@"; }

# Tells the webhook that the recipe or the site names; what cannot be told changes nothing.
notify() { # start or ended
  [ -z "${NOTIFY_WEBHOOK:-}" ] || PYTHONPATH=$COOKBOOK timeout 20 "$VENV/bin/python" -P -m slurm.notify "$1" >&2
}

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

# Sets ATTEMPT, LOGS, HOSTS, HEAD_ADDR, HEAD_PORT and ONE_HOST; false if there is nothing left to do.
begin_attempt() {
  [ "${NEXT:-run}" = run ] || return 1
  if [ ! -x "$VENV/bin/python" ]; then
    say "fault: $(hostname -s) cannot see the virtual environment $VENV: put it on a filesystem that all nodes mount"
    NEXT=failed
    return 1
  fi
  local answer
  if under_slurm; then
    choose_nodes || return 1
    pass_over_a_step
    # Slurm's address of a node is the one that its daemons use between the nodes. On the node itself
    # its name may mean 127.0.1.1, and the others may not know its host name.
    HEAD_ADDR=$(node_addresses "${HOSTS%%,*}")
    HEAD_ADDR=${HEAD_ADDR:-${HOSTS%%,*}}
    ONE_HOST=no
    if [ "$NODES" = 1 ] || [ "$(node_addresses "$HOSTS" | sort -u | wc -l)" = 1 ]; then ONE_HOST=yes; fi
  else
    HOSTS=$(hostname -s) HEAD_ADDR=127.0.0.1 ONE_HOST=yes
  fi
  local begin=(record begin --hosts "$HOSTS" --head "$HEAD_ADDR" --max-retries "$MAX_RETRIES")
  BEGINS=yes
  # Prints the attempt's number and a free port, or why there is nothing to do.
  answer=$("${begin[@]}") || not_begun $? || return 1
  if [ "${answer% *}" = busy ]; then
    local other=${answer#busy }
    if job_runs "$other"; then
      say "job $other still works on this run: to start it again, cancel that job first: cookbook cancel ${RUN_DIR##*/}"
      NEXT=failed
      return 1
    fi
    answer=$("${begin[@]}" --ended "$other") || not_begun $? || return 1
  fi
  if [ "$answer" = finished ]; then NEXT=finished; return 1; fi
  read -r ATTEMPT HEAD_PORT <<<"$answer"
  BEGINS=
  LOGS=$RUN_DIR/logs/$ATTEMPT
  STOP_ASKED=
  export ATTEMPT LOGS HEAD_ADDR HEAD_PORT ONE_HOST COOKBOOK_ATTEMPT=$ATTEMPT
  # Before anything can go wrong: a first node that is lost submits nothing.
  if [ "${REQUEUE:-yes}" = no ] && under_slurm && [ -z "${SUCCESSOR:-}" ] && ! submit_successor; then
    say "no successor is in the queue, so the run ends with this job: $ANSWER"
  fi
  say "attempt $ATTEMPT on ${HOSTS//,/, }; first node $HEAD_ADDR:$HEAD_PORT; logs in $LOGS"
  # Training does not wait for it.
  [ "$ATTEMPT" != 0 ] || notify start &
}

# The program that records the start has ended with this status. scancel's TERM may have ended it after
# it had written, and not reach this script.
not_begun() {
  [ "$1" != 143 ] || terminated
  NEXT=failed
  return 1
}

# Whether another job is there; if Slurm does not say, it is taken to be.
job_runs() {
  local words
  if words=$(squeue --noheader --jobs="$1" --format=%T 2>&1); then [ -n "$words" ]; else [[ $words != *"Invalid job id"* ]]; fi
}

# Sets HOSTS, the nodes of the allocation that the next attempt uses. False if the job goes back into
# the queue instead, without the nodes in LEFT_OUT.
choose_nodes() {
  local answer
  await_controller || return 1
  HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
  answer=$(record choose --hosts "$HOSTS" --nodes "$NODES" --silent "${SILENT:-}") || { NEXT=failed; return 1; }
  case $answer in
  use*)
    [ "$HOSTS" = "${answer#use }" ] || say "of the nodes $HOSTS these are used: ${answer#use }"
    HOSTS=${answer#use }
    return 0
    ;;
  esac
  LEFT_OUT=${answer#without }
  if enough_nodes_without "$LEFT_OUT"; then
    say "left out from now on, because attempts on it failed or it does not answer: $LEFT_OUT"
  elif [ -n "${SILENT:-}" ]; then
    LEFT_OUT=
  else
    say "attempts failed on $LEFT_OUT, and the partition has too few other nodes"
    LEFT_OUT=
    HOSTS=$(cut -d, -f"1-$NODES" <<<"$HOSTS")
    return 0
  fi
  NEXT=requeue
  return 1
}

# Whether the job's partition has enough nodes that are not down or drained, beside these and those
# that the job was denied before.
enough_nodes_without() {
  local others left_out
  left_out=$(scontrol show hostnames "$(excluded_nodes "$1")" | paste -sd,)
  others=$(timeout 30 sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" --format='%N %t' |
    awk -v left_out="${left_out:-$1}" 'BEGIN { split(left_out, names, ","); for (k in names) bad[names[k]] }
      !($1 in bad) && $2 !~ /down|drain|drng|fail|maint|unk|\*/ { print $1 }' | sort -u | wc -l)
  [ "$others" -ge "$SLURM_JOB_NUM_NODES" ]
}

# A controller that is away for minutes, for a restart or a move to another host, costs no run.
await_controller() {
  local since=$SECONDS said=''
  until timeout 20 scontrol --oneliner show job "$SLURM_JOB_ID" >/dev/null 2>&1; do
    if ((SECONDS - since > ${CONTROLLER_WAIT_S:-600})); then
      record failed --message "Slurm's controller has not answered for $((SECONDS - since)) s: once it does, continue with: cookbook resume ${RUN_DIR##*/}"
      NEXT=failed
      return 1
    fi
    [ -n "$said" ] || record waiting --message "waiting for Slurm's controller, which does not answer, up to ${CONTROLLER_WAIT_S:-600} s"
    said=yes
    sleep 2
  done
}

# Slurm sends an order to end a step again about a minute later if a lost node did not get it. By then
# the requeued job may run on that node, with step numbers that start at 0 again, and the order would end
# its ranks. So after every other requeue the first attempt is step 1 and not step 0.
pass_over_a_step() {
  [ -z "${PASSED_OVER:-}" ] && PASSED_OVER=yes || return 0
  ((${SLURM_RESTART_COUNT:-0} % 2 == 0)) || answers 1 "${HOSTS%%,*}"
}

node_addresses() { scontrol --oneliner show node "$1" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p'; }

# Runs in a process of its own, which becomes srun.
launch_nodes() {
  # The recipe's timeout of one attempt; srun passes the signal on to the ranks.
  local limit=()
  if [ -n "${TIMEOUT_S:-}" ]; then limit=(timeout --kill-after=60 "$TIMEOUT_S"); fi
  if under_slurm; then
    # The step that lost a node is never cleared up: on the other nodes it keeps what it had.
    local beside=()
    [ -z "${SILENT:-}${OLD_STEPS:-}" ] || beside=(--overlap --mem=0)
    # Since 22.05 srun does not take --cpus-per-task from the job.
    exec "${limit[@]}" srun "${beside[@]}" --job-name="attempt-$ATTEMPT" --nodes="$NODES" --nodelist="$HOSTS" --ntasks="$NODES" --ntasks-per-node=1 \
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
  # It ends at once if the sweep stops none of its runs.
  [ -z "${SWEEP_DIR:-}" ] || PYTHONPATH=$COOKBOOK "$VENV/bin/python" -P -m slurm.earlystop "$LAUNCHED" &
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
  STOP_ASKED=yes
  touch "$RUN_DIR/.stop"
}

# A field of what Slurm says about this job.
job_field() { timeout 20 scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null | sed -n "s/.* $1=\([^ ]*\).*/\1/p"; }

# A TERM may be scancel, the time limit, preemption or a lost node: the job's log says which.
terminated() {
  trap - ERR EXIT
  local state=CANCELLED
  if under_slurm; then
    state=COMPLETING
  elif [ -n "${LAUNCHED:-}" ]; then
    kill -TERM "$LAUNCHED" 2>/dev/null
    wait "$LAUNCHED"
  fi
  # Not to stdout: while the end of an attempt is recorded, that is the file "$LOGS/next".
  say "terminated" >&2
  local next=failed
  # Unless the attempt's end is recorded already. While BEGINS is set, its start may be.
  if [ -n "${BEGINS:-}" ] || { [ -n "${ATTEMPT:-}" ] && [ ! -s "$LOGS/next" ]; }; then
    # Once: a second TERM may come before this script has ended.
    local attempt=${ATTEMPT:-}
    BEGINS='' ATTEMPT=''
    next=$(record end ${attempt:+--attempt "$attempt"} --exit-code 143 --job-state "$state") || next=failed
  fi
  if [ "$next" != requeue ]; then
    drop_successor
    notify ended
  fi
  exit 143
}

# Takes the exit status, and more arguments of `record end`. Sets NEXT: finished, failed, run (again,
# on these nodes) or requeue.
end_attempt() {
  local rc
  NEXT=failed
  # Through a file: bash 5.2 loses one in a hundred signals that come while it reads a $(...), and what
  # ends srun often sends this script a TERM, too.
  record end --attempt "$ATTEMPT" --exit-code "$1" --max-retries "$MAX_RETRIES" \
    --timeout-s "${TIMEOUT_S:-0}" ${STOP_ASKED:+--stop-asked} "${@:2}" >"$LOGS/next"
  rc=$?
  # scancel's TERM may end the program that records, and not reach this script, or reach it later.
  [ $rc != 143 ] || terminated
  ATTEMPT=
  [ $rc != 0 ] || read -r NEXT <"$LOGS/next" || NEXT=failed
  # A node that was lost a moment ago is part of the allocation until Slurm notices.
  if [ "$NEXT" = run ] && under_slurm && await_controller; then
    find_silent_nodes
    [ -n "${SILENT:-}" ] || await_old_step
  fi
}

# Waits until Slurm has cleared up the step of the attempt that has ended. After a controller was
# restarted it may go on listing a step that has ended, with its CPUs. Then the next attempt starts
# beside it, after the nodes have ended any rank that is left. Sets OLD_STEPS, the ids of such steps.
await_old_step() {
  local since=$SECONDS old
  while old=$(listed_steps | grep -vxF -e "${OLD_STEPS:--}"); do
    if ((SECONDS - since >= 45)); then
      say "Slurm still lists step ${old//$'\n'/, }, whose ranks have ended: the next attempt starts beside it"
      OLD_STEPS=${OLD_STEPS:+$OLD_STEPS$'\n'}$old
      return
    fi
    ((SECONDS - since < 30)) || touch "$LOGS/.end_ranks"
    sleep 1
  done
}

# The steps of this job that ran attempts, without those of somebody who looks at it.
listed_steps() {
  timeout 30 squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format='%j %i' 2>/dev/null | sed -n 's/^attempt-[0-9]* //p'
}

answers() { # number nodes; beside a step that Slurm is still clearing up, whose memory --overlap does not share
  timeout 30 srun --overlap --mem=0 --nodes="$1" --nodelist="$2" --ntasks="$1" --ntasks-per-node=1 true </dev/null >/dev/null 2>&1
}

# Adds the nodes of this attempt that do not answer to SILENT. If none answers it is Slurm that does
# not start steps, as for a moment after its controller has come back: that is waited for.
find_silent_nodes() {
  local node silent since=$SECONDS
  until answers "$NODES" "$HOSTS"; do
    silent=
    for node in ${HOSTS//,/ }; do
      answers 1 "$node" || silent=${silent:+$silent,}$node
    done
    if [ -n "$silent" ] && { [ "$silent" != "$HOSTS" ] || ((SECONDS - since > 60)); }; then
      say "these nodes of the allocation do not answer: $silent"
      SILENT=${SILENT:+$SILENT,}$silent
      return
    fi
    sleep 2
  done
}

# Puts a job into the queue that takes this one's place, and runs if this one does not end well. False
# if Slurm takes none; its words are then in ANSWER.
submit_successor() {
  local without options=(--parsable "--dependency=afternotok:$SLURM_JOB_ID" --kill-on-invalid-dep=yes)
  without=$(excluded_nodes "${LEFT_OUT:-}")
  [ -z "$without" ] || options+=("--exclude=$without")
  # A job that is not of the array: sbatch would hand these on.
  ANSWER=$(env -u SLURM_ARRAY_JOB_ID -u SLURM_ARRAY_TASK_ID -u SLURM_ARRAY_TASK_COUNT -u SLURM_ARRAY_TASK_MAX \
    -u SLURM_ARRAY_TASK_MIN -u SLURM_ARRAY_TASK_STEP timeout 60 sbatch "${options[@]}" "$RUN_DIR/job.sbatch" 2>&1) || return
  SUCCESSOR=${ANSWER##*$'\n'} SUCCESSOR=${SUCCESSOR%%;*}
  record succeed --job "$SUCCESSOR"
}

# The run has ended: no job takes this one's place.
drop_successor() {
  [ -z "${SUCCESSOR:-}" ] || scancel "$SUCCESSOR" 2>/dev/null
}

# The nodes that this job must not get, and more of them.
excluded_nodes() {
  local before
  before=$(job_field ExcNodeList)
  [ "$before" != "(null)" ] || before=
  printf '%s' "$before${1:+${before:+,}$1}"
}

# The job that takes this one's place runs once this one has ended, and not well.
succeed() {
  say "job $SUCCESSOR takes the place of this one: it continues from the last checkpoint"
  [ -z "${LEFT_OUT:-}" ] || exclude "$SUCCESSOR" "$LEFT_OUT"
  exit 75
}

# Puts the job back into the queue, which ends this script: all state has been written before. A
# controller that is away, or a job that Slurm is still clearing up, is waited for.
requeue() {
  local since=$SECONDS answer='' said=''
  [ -z "${SUCCESSOR:-}" ] || succeed
  while ((SECONDS - since <= ${CONTROLLER_WAIT_S:-600})); do
    # Slurm may have put it there itself a moment ago, for lack of a node.
    if [ "$(job_field JobState)" = PENDING ] || (($(job_field Restarts) + 0 > ${SLURM_RESTART_COUNT:-0})); then exit 0; fi
    # Slurm takes the list of excluded nodes only once the job is in the queue, and there this
    # script has KillWait seconds left.
    trap '' TERM
    if answer=$(timeout 60 scontrol requeue "$SLURM_JOB_ID" 2>&1); then
      [ -z "${LEFT_OUT:-}" ] || exclude "$SLURM_JOB_ID" "$LEFT_OUT"
      exit 0
    fi
    trap terminated TERM
    case $answer in *"Invalid job id"* | *denied* | *disabled*) break ;; esac
    # Without an answer it may have been Slurm's TERM that ended the question.
    [ -n "$said" ] || [ -z "$answer" ] || record waiting --message "waiting to go back into the queue, up to ${CONTROLLER_WAIT_S:-600} s: $answer"
    said=$answer
    sleep 2
  done
  if submit_successor; then succeed; fi
  record failed --message "Slurm refused to requeue job $SLURM_JOB_ID ($answer), and to take another ($ANSWER): continue with: cookbook resume ${RUN_DIR##*/}"
}

# A job in the queue does not get these nodes: the one that takes this one's place, or this one itself.
exclude() {
  local tries
  for tries in 1 2 3; do
    scontrol update "JobId=$1" "ExcNodeList=$(excluded_nodes "$2")" && return
    sleep "0.$tries"
  done
  say "Slurm did not exclude $2: the next attempt may use it again"
}

finish() {
  if [ "$NEXT" = requeue ]; then
    if under_slurm; then
      say "back into the queue: the next attempt continues from the last checkpoint"
      requeue
    fi
    NEXT=failed
  fi
  drop_successor
  notify ended
  [ "$NEXT" = finished ]
  exit $?   # in an EXIT trap, exit alone would return the status from before it
}
