# shellcheck shell=bash
# Functions of the job script. It runs on the first node of the allocation or, if it is started with
# bash instead of sbatch, on this host. They need RUN_DIR, COOKBOOK, VENV and NODES.

# Set by --no-kill, which spare nodes need. With it, srun would let ranks continue after others die.
unset SLURM_NO_KILL

# Options of the srun of each attempt, from the environment's record.
STEP_OPTIONS=()

# Options with which its tasks are in the order of HOSTS: place_by_topology.
PLACED=()

# $$ is the process id of the job script in every subshell.
export JOB_PID=$$

say() { printf '%s cookbook: %s\n' "$(date -u +%H:%M:%S)" "$*"; }

source "$COOKBOOK/slurm/record.sh" || return

# Notifies the webhook of the recipe or the site. A failed notification does not affect the run.
notify() { # start or ended
  [ -z "${NOTIFY_WEBHOOK:-}" ] || PYTHONPATH=$COOKBOOK timeout --kill-after=5 20 "$VENV/bin/python" -P -m slurm.notify "$1" >&2
}

under_slurm() { [ -n "${SLURM_JOB_ID:-}" ]; }

# A line of the site's job_setup failed or ended the script. The run fails, because a retry cannot fix
# this. SETUP_LINE is the line, SETUP_PLACE the site's file and the number of the line in it.
setup_failed() {
  local rc=$?
  trap - ERR EXIT
  set +eu
  [ "$rc" != 0 ] || rc=1
  SETUP_FAILED=yes
  begin_attempt || finish
  end_attempt "$rc" --message "$SETUP_PLACE: the ${SETUP_KEY:-job_setup} line '$SETUP_LINE' failed with exit status $rc (see $RUN_DIR/logs/job.log): fix it there, then: ${AGAIN:-cookbook resume ${RUN_DIR##*/}}"
  finish
}

# all: each node and rank has its log. failing: those of the first node, and of nodes that failed.
if [ -z "${KEEP_LOGS:-}" ]; then KEEP_LOGS=all && ((NODES <= 16)) || KEEP_LOGS=failing; fi
under_slurm || KEEP_LOGS=all
export KEEP_LOGS

# Sets ATTEMPT, LOGS, HOSTS, HEAD_ADDR, HEAD_PORT and ONE_HOST. Returns false if nothing is left to do.
begin_attempt() {
  [ "${NEXT:-run}" = run ] || return 1
  if under_slurm; then
    choose_nodes || return 1
    # The first nodes train, the last ones generate answers.
    if [ -n "${ROLLOUT_NODES:-}" ]; then
      ROLLOUT_HOSTS=$(cut -d, -f"$((NODES + 1))-" <<<"$HOSTS")
      HOSTS=$(cut -d, -f"1-$NODES" <<<"$HOSTS")
    fi
    pass_over_a_step
    # Slurm's daemons use this address between the nodes. On the node itself its name may resolve to
    # 127.0.1.1, and other nodes may not be able to resolve its host name.
    HEAD_ADDR=$(node_addresses "${HOSTS%%,*}")
    HEAD_ADDR=${HEAD_ADDR:-${HOSTS%%,*}}
    ONE_HOST=no
    if [ "$NODES" = 1 ] || [ "$(node_addresses "$HOSTS" | sort -u | wc -l)" = 1 ]; then ONE_HOST=yes; fi
  else
    HOSTS=$(hostname -s) HEAD_ADDR=127.0.0.1 ONE_HOST=yes
    [ -z "${ROLLOUT_NODES:-}" ] || ROLLOUT_HOSTS=$(yes "$HOSTS" | head -n "$ROLLOUT_NODES" | paste -sd,)
  fi
  export ROLLOUT_HOSTS=${ROLLOUT_HOSTS:-}
  local begin=(begin --hosts "$HOSTS" --max-retries "$MAX_RETRIES")
  # Returns the attempt's number and its port, or the reason why there is nothing to do.
  ask "${begin[@]}" || not_begun $? || return 1
  if [ "${REPLY% *}" = busy ]; then
    local other=${REPLY#busy }
    if job_runs "$other"; then
      say "job $other still works on this run: to start it again, cancel that job first: cookbook cancel ${RUN_DIR##*/}"
      NEXT=failed
      return 1
    fi
    ask "${begin[@]}" --ended "$other" || not_begun $? || return 1
  fi
  case $REPLY in finished | superseded) NEXT=$REPLY; return 1 ;; esac
  read -r ATTEMPT HEAD_PORT <<<"$REPLY"
  LOGS=$RUN_DIR/logs/$ATTEMPT
  STOP_ASKED=
  export ATTEMPT LOGS HOSTS HEAD_ADDR HEAD_PORT ONE_HOST COOKBOOK_ATTEMPT=$ATTEMPT
  # Before any fault can occur: a first node that is lost cannot submit a job.
  if [ "${REQUEUE:-yes}" = no ] && under_slurm && [ -z "${SUCCESSOR:-}" ] && ! submit_successor; then
    say "no successor is in the queue, so the run ends with this job: $ANSWER"
  fi
  say "attempt $ATTEMPT on ${HOSTS//,/, }; first node $HEAD_ADDR:$HEAD_PORT; logs in $LOGS"
  # An attempt that only records why it fails starts nothing.
  if [ -z "${SETUP_FAILED:-}" ]; then
    [ -z "${ROLLOUT_REPLICAS:-}" ] || start_replicas
  fi
  # In the background, so training does not wait for it.
  [ "$ATTEMPT" != 0 ] || notify start &
}

# Starts the replicas, and what restarts those that die. On rollout nodes they outlive attempts; in turns
# with the ranks they are on this attempt's nodes, and end with it: no rank finds their memory taken.
start_replicas() {
  [ -z "${REPLICAS:-}" ] || ! kill -0 "$REPLICAS" 2>/dev/null || return 0
  local node nodes=$ROLLOUT_HOSTS step=() addresses=127.0.0.1
  [ -n "$nodes" ] || nodes=$HOSTS
  if under_slurm; then
    step=(srun --overlap --mem=0 --nodes=1 --ntasks=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}
      --export=ALL "${STEP_OPTIONS[@]}")
    addresses=
    for node in ${nodes//,/ }; do addresses+=$(node_addresses "$node")$'\n'; done
  elif [ -z "$ROLLOUT_HOSTS" ]; then
    nodes=$(yes "$HOSTS" | head -n "$NODES" | paste -sd,)
  fi
  rm -rf "$RUN_DIR/.rollout"
  mkdir -m 700 "$RUN_DIR/.rollout"
  (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$RUN_DIR/.rollout/secret")
  (
    export ROLLOUT_SCRIPT ROLLOUT_ADDRESSES=$addresses
    until ROLLOUT_HOSTS=$nodes PYTHONPATH=$COOKBOOK "$VENV/bin/python" -P -m slurm.rollout "${step[@]}"; do
      sleep 2
      kill -0 "$JOB_PID" 2>/dev/null || exit
      say "slurm.rollout has ended before the run: it is started again"
    done
  ) </dev/null &
  REPLICAS=$!
}

end_replicas() {
  [ -n "${REPLICAS:-}" ] || return 0
  touch "$RUN_DIR/.rollout/end"
  # One that is stopped ends at no request.
  local waited children=()
  for ((waited = 0; waited < 90; waited++)); do
    kill -0 "$REPLICAS" 2>/dev/null || break
    sleep 1
  done
  if kill -0 "$REPLICAS" 2>/dev/null; then
    read -r -a children <"/proc/$REPLICAS/task/$REPLICAS/children"
    kill -KILL "$REPLICAS" "${children[@]}" 2>/dev/null
  fi
  wait "$REPLICAS" 2>/dev/null
  rm -rf "$RUN_DIR/.rollout"
  REPLICAS=
}

# slurm.attempt has ended with this status instead of a start. A TERM of scancel may have ended it
# after it had written, without reaching this script.
not_begun() {
  NEXT=failed
  case $1 in
  3) ;;
  143) terminated ;;
  *) last_word "$1" FAILED ;;
  esac
  return 1
}

# Returns true if another job exists, or if Slurm does not respond.
job_runs() {
  local answer
  if answer=$(squeue --noheader --jobs="$1" --format=%T 2>&1); then [ -n "$answer" ]; else [[ $answer != *"Invalid job id"* ]]; fi
}

# Sets HOSTS, the nodes of the allocation that the next attempt uses. Returns false if the job is
# requeued instead, without the nodes in LEFT_OUT.
choose_nodes() {
  await_controller || return 1
  HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
  place_by_topology
  local total=$((NODES + ${ROLLOUT_NODES:-0}))
  ask choose --hosts "$HOSTS" --nodes "$total" --silent "${SILENT:-}" || not_begun $? || return 1
  case $REPLY in
  use*)
    [ "$HOSTS" = "${REPLY#use }" ] || say "of the nodes $HOSTS these are used: ${REPLY#use }"
    HOSTS=${REPLY#use }
    return 0
    ;;
  esac
  LEFT_OUT=${REPLY#without }
  if enough_nodes_without "$LEFT_OUT"; then
    say "left out from now on, because attempts on it failed or it does not answer: $LEFT_OUT"
  elif [ -n "${SILENT:-}" ]; then
    LEFT_OUT=
  else
    say "attempts failed on $LEFT_OUT, and the partition has too few other nodes"
    LEFT_OUT=
    HOSTS=$(cut -d, -f"1-$total" <<<"$HOSTS")
    return 0
  fi
  NEXT=requeue
  return 1
}

# Orders HOSTS so that ranks below one switch are neighbours, if Slurm knows the switches. Sets PLACED,
# with which srun starts tasks in this order; otherwise it does so in the order of its list.
place_by_topology() {
  local groups
  groups=$(job_python slurm.topology "$HOSTS")
  PLACED=(--nodes="$NODES")
  [ -n "$groups" ] || return 0
  # srun takes no number of nodes then.
  HOSTS=${groups// /,} PLACED=(--distribution=arbitrary)
  [ -n "${SAID_PLACES:-}" ] || say "ranks in the order of Slurm's topology, a switch or block after the other: ${groups// / | }"
  SAID_PLACES=yes
}

# Returns true if the job's partition has enough nodes that are not down or drained, without these
# nodes and those that the job already excludes.
enough_nodes_without() {
  local others left_out
  left_out=$(scontrol show hostnames "$(excluded_nodes "$1")" | paste -sd,)
  others=$(timeout 30 sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" --format='%N %t' |
    awk -v left_out="${left_out:-$1}" 'BEGIN { split(left_out, names, ","); for (k in names) bad[names[k]] }
      !($1 in bad) && $2 !~ /down|drain|drng|fail|maint|unk|\*/ { print $1 }' | sort -u | wc -l)
  [ "$others" -ge "$SLURM_JOB_NUM_NODES" ]
}

# A run survives a controller that is down for minutes, for example during a restart or a move.
await_controller() {
  local since=$SECONDS reported=''
  until timeout 20 scontrol --oneliner show job "$SLURM_JOB_ID" >/dev/null 2>&1; do
    if ((SECONDS - since > ${CONTROLLER_WAIT_S:-600})); then
      fail "Slurm's controller has not answered for $((SECONDS - since)) s: once it does, continue with: cookbook resume ${RUN_DIR##*/}"
      NEXT=failed
      return 1
    fi
    [ -n "$reported" ] || record_once waiting --message "waiting for Slurm's controller, which does not answer, up to ${CONTROLLER_WAIT_S:-600} s"
    reported=yes
    sleep 2
  done
}

# If a lost node did not receive the request to kill a step, Slurm sends it again about a minute later.
# By then the requeued job may run on that node, with step numbers that start at 0 again, and the request
# would kill its ranks. So after every other requeue the first attempt is step 1 instead of step 0.
pass_over_a_step() {
  [ -z "${PASSED_OVER:-}" ] && PASSED_OVER=yes || return 0
  ((${SLURM_RESTART_COUNT:-0} % 2 == 0)) || answers 1 "${HOSTS%%,*}"
}

node_addresses() { scontrol --oneliner show node "$1" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p'; }

# Runs in a separate process, which becomes srun.
launch_nodes() {
  # The recipe's timeout per attempt. srun forwards the signal to the ranks.
  local limit=()
  if [ -n "${TIMEOUT_S:-}" ]; then limit=(timeout --kill-after=60 "$TIMEOUT_S"); fi
  if under_slurm; then
    # Slurm never cleans up a step that lost a node: the step keeps its resources on the other nodes.
    local beside=()
    [ -z "${SILENT:-}${OLD_STEPS:-}" ] || beside=(--overlap --mem=0)
    # srun itself writes a file that all nodes share: slurm/node.sh leaves only the first one's there.
    local log=$LOGS/node_%t.log
    [ "$KEEP_LOGS" = all ] || log=$LOGS/node_0.log
    # Since 22.05 srun does not inherit --cpus-per-task from the job.
    exec "${limit[@]}" srun "${beside[@]}" --job-name="attempt-$ATTEMPT" "${PLACED[@]}" --nodelist="$HOSTS" --ntasks="$NODES" --ntasks-per-node=1 \
      ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
      --kill-on-bad-exit=1 --wait=60 --export=ALL "${STEP_OPTIONS[@]}" \
      --output="$log" --open-mode=append \
      bash -c "$1" </dev/null
  fi
  # Without Slurm the nodes are processes on this host. The first one to fail ends the others.
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

# Waits for a process to end, even if signals are handled meanwhile, and returns its exit status.
# Meanwhile the watchdog ends it if the ranks hang, or do not stop when requested. An entry that does
# not report its steps has no watchdog.
wait_for() {
  LAUNCHED=$1
  local rc
  [ -z "${HANG_TIMEOUT_S:-}" ] || look_after slurm.watchdog &
  [ -z "${ENGINE:-}" ] || look_after slurm.engine &
  # It exits at once if the sweep has no early stopping.
  [ -z "${SWEEP_DIR:-}" ] || look_after slurm.earlystop &
  while :; do
    wait "$LAUNCHED"
    rc=$?
    kill -0 "$LAUNCHED" 2>/dev/null || { unset LAUNCHED; return $rc; }
  done
}

# Runs a program that monitors the attempt, and restarts it if it dies.
look_after() {
  local pid
  until job_python "$1" "$LAUNCHED"; do
    for _ in {1..5}; do
      sleep 1
      # This script may have been killed while the ranks continue.
      for pid in "$LAUNCHED" "$JOB_PID"; do kill -0 "$pid" 2>/dev/null || return; done
    done
    say "$1 has ended before the attempt: it is started again"
  done
}

# torchrun does not handle this signal, so a file notifies the ranks: at the next step they all save
# a checkpoint and exit.
ask_to_stop() {
  # Nothing is left to save while questions are answered.
  [ "${NEXT:-run}" != finished ] || return 0
  say "the time limit is near: the ranks save a checkpoint and stop"
  STOP_ASKED=yes
  touch "$RUN_DIR/.stop"
}

# Prints a field of Slurm's description of this job.
job_field() { timeout 20 scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null | sed -n "s/.* $1=\([^ ]*\).*/\1/p"; }

# A TERM may come from scancel, the time limit, preemption or a lost node: the job's log shows which.
terminated() {
  trap - ERR EXIT
  # Handled once: another TERM may arrive before this script ends.
  trap '' TERM
  # Slurm sends KILL after KillWait, 30 s by default.
  RECORD_WAIT_S=15
  [ -x "$VENV/bin/python" ] || RECORD_WAIT_S=0 FILES_WAIT_S=0
  local state=CANCELLED
  if under_slurm; then
    state=COMPLETING
  elif [ -n "${LAUNCHED:-}" ]; then
    kill -TERM "$LAUNCHED" 2>/dev/null
    wait "$LAUNCHED"
  fi
  [ -z "${PAUSE:-}" ] || kill "$PAUSE" 2>/dev/null
  under_slurm || end_replicas
  # Not to stdout, which may be the pipe of answers.
  say "terminated" >&2
  local next=failed
  # A recorded end is not changed: the job may be ending between two attempts.
  if ask end ${ATTEMPT:+--attempt "$ATTEMPT"} --exit-code 143 --job-state "$state"; then
    next=$REPLY
  elif last_word $? INTERRUPTED 143; then
    next=finished
  fi
  if [ "$next" != requeue ] && [ "$next" != superseded ]; then
    drop_successor
    rm -rf "$RUN_DIR/.rollout"     # whole weights
    notify ended
  fi
  [ "$next" = finished ] && exit 0
  exit 143
}

# Arguments: the exit status, and more arguments of `record end`. Sets NEXT: finished, failed, run (again,
# on these nodes, some after a pause), requeue, or superseded by another start, possibly by this job's successor.
end_attempt() {
  local rc seconds=
  NEXT=failed
  [ -z "${ROLLOUT_IN_TURNS:-}" ] || end_replicas
  [ "$1" = 0 ] || copy_logs_of_nodes
  ask end --attempt "$ATTEMPT" --exit-code "$1" --ended "$(date +%s.%N)" --max-retries "$MAX_RETRIES" \
    --timeout-s "${TIMEOUT_S:-0}" ${STOP_ASKED:+--stop-asked} "${@:2}"
  rc=$?
  case $rc in
  0) read -r NEXT seconds <<<"$REPLY" ;;
  # A TERM of scancel may end slurm.attempt without reaching this script, or reach it later.
  143) terminated ;;
  *) ! last_word $rc FAILED "$1" || NEXT=finished ;;
  esac
  ATTEMPT=
  [ -z "$seconds" ] || pause "$seconds"
  # A node that was just lost is part of the allocation until Slurm detects it.
  if [ "$NEXT" = run ] && under_slurm && await_controller; then
    find_silent_nodes
    [ -n "${SILENT:-}" ] || await_old_step
  fi
}

# A signal ends it: bash would handle none before a command in the foreground has ended.
pause() { # seconds
  sleep "$1" &
  PAUSE=$!
  wait $PAUSE
  kill $PAUSE 2>/dev/null
  PAUSE=
}

# Waits until Slurm has cleaned up the step of the last attempt. A restarted controller may continue
# to list a step that has ended, with its CPUs. Then the next attempt overlaps this step, after the nodes
# have killed any remaining rank. Sets OLD_STEPS, the ids of such steps.
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

# Lists the steps of this job that ran attempts, without steps that a user started in it.
listed_steps() {
  timeout 30 squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format='%j %i' 2>/dev/null | sed -n 's/^attempt-[0-9]* //p'
}

# Copies the logs of the nodes that failed from their disks.
copy_logs_of_nodes() {
  if [ "$KEEP_LOGS" = all ] || [ -z "${HOSTS:-}" ]; then return 0; fi
  timeout 60 srun --overlap --mem=0 "${PLACED[@]}" --nodelist="$HOSTS" --ntasks="$NODES" --ntasks-per-node=1 \
    bash "$COOKBOOK/slurm/logs.sh" </dev/null >/dev/null 2>&1
}

answers() { # number nodes; --overlap shares no memory with a step that Slurm still cleans up, hence --mem=0
  ANSWER=$(timeout 30 srun --overlap --mem=0 --nodes="$1" --nodelist="$2" --ntasks="$1" --ntasks-per-node=1 true </dev/null 2>&1)
}

# Adds the nodes of this attempt that do not respond to SILENT. If no node responds, Slurm itself starts
# no steps, for example just after its controller has come back. The function waits for this.
find_silent_nodes() {
  local node silent since=$SECONDS
  until answers "$NODES" "$HOSTS"; do
    silent=
    for node in ${HOSTS//,/ }; do
      answers 1 "$node" || silent=${silent:+$silent,}$node
    done
    if [ "$silent" = "$HOSTS" ] && ((SECONDS - since > 60)) && [[ $ANSWER == *"Unable to create step"* ]]; then
      record_once waiting --message "Slurm starts no step in this job, which goes back into the queue: ${ANSWER##*error: }"
      NEXT=requeue
      return
    fi
    if [ -n "$silent" ] && { [ "$silent" != "$HOSTS" ] || ((SECONDS - since > 60)); }; then
      say "these nodes of the allocation do not answer: $silent"
      SILENT=${SILENT:+$SILENT,}$silent
      return
    fi
    sleep 2
  done
}

# Submits a successor of this job, which starts if this job fails. Returns false if Slurm refuses it,
# with Slurm's message in ANSWER.
submit_successor() {
  local without options=(--parsable "--dependency=afternotok:$SLURM_JOB_ID" --kill-on-invalid-dep=yes)
  without=$(excluded_nodes "${LEFT_OUT:-}")
  [ -z "$without" ] || options+=("--exclude=$without")
  # The successor is not part of the job array: sbatch would pass these variables on.
  ANSWER=$(env -u SLURM_ARRAY_JOB_ID -u SLURM_ARRAY_TASK_ID -u SLURM_ARRAY_TASK_COUNT -u SLURM_ARRAY_TASK_MAX \
    -u SLURM_ARRAY_TASK_MIN -u SLURM_ARRAY_TASK_STEP timeout 60 sbatch "${options[@]}" "$RUN_DIR/job.sbatch" 2>&1) || return
  SUCCESSOR=${ANSWER##*$'\n'} SUCCESSOR=${SUCCESSOR%%;*}
  record succeed --job "$SUCCESSOR"
}

# The run has ended: the successor is not needed.
drop_successor() {
  [ -z "${SUCCESSOR:-}" ] || scancel "$SUCCESSOR" 2>/dev/null
}

# Prints the nodes that this job excludes, and additional ones.
excluded_nodes() {
  local before
  before=$(job_field ExcNodeList)
  [ "$before" != "(null)" ] || before=
  printf '%s' "$before${1:+${before:+,}$1}"
}

# The successor starts when this job has failed.
succeed() {
  say "job $SUCCESSOR takes the place of this one: it continues from the last checkpoint"
  [ -z "${LEFT_OUT:-}" ] || exclude "$SUCCESSOR" "$LEFT_OUT"
  exit 75
}

# Requeues the job, which ends this script: all state has been written before. Waits if the controller
# is down, or if Slurm is still cleaning up the job.
requeue() {
  local since=$SECONDS answer='' reported=''
  [ -z "${SUCCESSOR:-}" ] || succeed
  while ((SECONDS - since <= ${CONTROLLER_WAIT_S:-600})); do
    # Slurm may have just requeued it because it lost a node.
    if [ "$(job_field JobState)" = PENDING ] || (($(job_field Restarts) + 0 > ${SLURM_RESTART_COUNT:-0})); then exit 0; fi
    # Slurm accepts the list of excluded nodes only after the requeue, and from then on this script
    # has KillWait seconds left.
    trap '' TERM
    if answer=$(timeout 60 scontrol requeue "$SLURM_JOB_ID" 2>&1); then
      [ -z "${LEFT_OUT:-}" ] || exclude "$SLURM_JOB_ID" "$LEFT_OUT"
      exit 0
    fi
    trap terminated TERM
    case $answer in *"Invalid job id"* | *denied* | *disabled*) break ;; esac
    # Without output, Slurm's TERM may have ended scontrol.
    [ -n "$reported" ] || [ -z "$answer" ] || record_once waiting --message "waiting to go back into the queue, up to ${CONTROLLER_WAIT_S:-600} s: $answer"
    reported=$answer
    sleep 2
  done
  if submit_successor; then succeed; fi
  fail "Slurm refused to requeue job $SLURM_JOB_ID ($answer), and to take another ($ANSWER): continue with: cookbook resume ${RUN_DIR##*/}"
}

# Excludes these nodes for a job in the queue: the successor or this job itself.
exclude() {
  local tries
  for tries in 1 2 3; do
    scontrol update "JobId=$1" "ExcNodeList=$(excluded_nodes "$2")" && return
    sleep "0.$tries"
  done
  say "Slurm did not exclude $2: the next attempt may use it again"
}

# Gives all nodes back but the one that this script runs on, and sets HOSTS to it.
release_other_nodes() {
  local place
  under_slurm && [[ ,$HOSTS, == *,${SLURMD_NODENAME:-},* ]] && [ "${SLURM_JOB_NUM_NODES:-1}" != 1 ] || return 0
  place=$(mktemp -d) && cd "$place" || return 0
  # It writes a script here with the variables of the smaller job.
  if ANSWER=$(timeout 60 scontrol update "JobId=$SLURM_JOB_ID" "NodeList=$SLURMD_NODENAME" 2>&1); then
    HOSTS=$SLURMD_NODENAME
    # shellcheck disable=SC1090  # Slurm's
    source "$place/slurm_job_${SLURM_JOB_ID}_resize.sh" || export SLURM_JOB_NUM_NODES=1
  else
    say "the job keeps its other nodes while it answers questions: $ANSWER"
  fi
  cd "$RUN_DIR" && rm -rf "$place"
}

# Answers the recipe's questions with the exported model, on one node. The run is finished and recorded: a
# fault here is a warning in its record, and a TERM ends the job with success.
answer_questions() {
  # The next run of a sweep waits for this job's end.
  [ -n "${ANSWER_SCRIPT:-}" ] && [ -z "${SWEEP_DIR:-}" ] && [ -n "${LOGS:-}" ] && [ -n "${HOSTS:-}" ] || return 0
  local answering rc warning='' given_up='' wait_s=60
  release_other_nodes
  local hosts=$HOSTS nodes=${SLURM_JOB_NUM_NODES:-$NODES}
  # The watchdog may have had the nodes end ranks that stayed: these are others.
  rm -f "$LOGS/.end_ranks"
  (
    # Nothing of the attempt is left that this could wait for or overlap with. Its first node may be released.
    export NODES=1 HOSTS=${hosts%%,*} ONE_HOST=yes HEAD_ADDR=127.0.0.1 NODE_CHECK=no
    PLACED=(--nodes=1)
    TIMEOUT_S=${ANSWER_LIMIT_S:-1800} ATTEMPT=answers
    launch_nodes "$ANSWER_SCRIPT"
  ) &
  answering=$!
  # Slurm sends KILL after KillWait, 30 s by default.
  trap 'given_up=yes wait_s=15; kill -TERM $answering 2>/dev/null' TERM
  while :; do
    wait $answering
    rc=$?
    kill -0 $answering 2>/dev/null || break
  done
  case $given_up$rc in
  0) ;;
  yes*) warning="the questions were given up" ;;
  124 | 137) warning="the questions were not answered within ${ANSWER_LIMIT_S:-1800} s" ;;
  *) warning="the questions were not answered (exit status $rc, see $LOGS/node_0.log)" ;;
  esac
  [ -z "$warning" ] || warning="warning: $warning; the run is finished. By hand: python -m trainer.generate $RUN_DIR/export QUESTION"
  RECORD_WAIT_S=$wait_s record answered --message "$warning" --nodes "$nodes"
}

finish() {
  end_replicas
  [ "$NEXT" != superseded ] || exit 1
  if [ "$NEXT" = requeue ]; then
    if under_slurm; then
      say "back into the queue: the next attempt continues from the last checkpoint"
      requeue
    fi
    NEXT=failed
  fi
  drop_successor
  notify ended
  [ "$NEXT" != finished ] || answer_questions
  [ "$NEXT" = finished ]
  exit $?   # in an EXIT trap, exit alone would return the status from before it
}
