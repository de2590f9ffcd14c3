# shellcheck shell=bash
# Writes the run's records for the job script. Sourced by slurm/job.sh. Needs RUN_DIR, COOKBOOK and VENV.

# The pipe for the output of slurm.attempt: the run directory may not accept a file, and bash 5.2
# loses one in a hundred signals that arrive while it reads a $(...).
exec {ANSWERS}<> <(:)

# Runs one of the job script's own programs, which need only the standard library.
# -P prevents imports from the folder in which the job was submitted.
job_python() { # module arguments
  PYTHONPATH=$COOKBOOK "$VENV/bin/python" -P -m "$@"
}

# One small program writes the run's records.
record_once() { job_python slurm.attempt "$@"; }

# The same, repeated until it succeeds: a filesystem that is missing or read-only for a minute, or a
# kill, must not end the run. Returns 0 on success, 3 if no attempt follows and the program has
# recorded the cause, 143 if a TERM has ended it.
record() {
  local rc since=$SECONDS pause=1 wait_s=${RECORD_WAIT_S:-600}
  # At the start of the job it is more likely a wrong path than a filesystem that comes back.
  [ -n "${LOGS:-}" ] || [ -x "$VENV/bin/python" ] || wait_s=${FILES_WAIT_S:-30}
  while :; do
    record_once "$@"
    rc=$?
    case $rc in 0 | 3 | 143) return $rc ;; esac
    ((SECONDS - since < wait_s)) || return $rc
    say "the run's records were not written (slurm.attempt $1: exit status $rc): tried again for up to $wait_s s" >&2
    sleep $pause
    pause=$((pause < 16 ? 2 * pause : 30))
  done
}

# Sets REPLY to the program's answer.
ask() {
  local rc
  REPLY=
  record "$@" >&"$ANSWERS"
  rc=$?
  # The last line counts: a killed call may have written an answer before.
  while [ $rc = 0 ] && read -r -t 0 -u "$ANSWERS" && read -r -u "$ANSWERS" REPLY; do :; done
  return $rc
}

# The run fails between two attempts.
fail() { record failed --message "$1" || last_word $? FAILED; }

# Writes the end of the run if slurm.attempt cannot. Arguments: the exit status of slurm.attempt, the
# state, and the exit status of the attempt if one was running. Returns true if the run is completed
# nevertheless.
last_word() {
  local state=$2 cause=not_recorded job=${SLURM_JOB_ID:-local-$JOB_PID} progress now reason
  reason="the run's records were not written (exit status $1, see $RUN_DIR/logs/job.log): check the filesystem"
  [ -x "$VENV/bin/python" ] ||
    reason="$(hostname -s) cannot see the virtual environment $VENV: put it on a filesystem that all nodes mount"
  reason="$reason, then continue with: cookbook resume ${RUN_DIR##*/}"
  [ -z "${SLURM_ARRAY_JOB_ID:-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  now=$(date +%s)
  progress=$(cat "$RUN_DIR/progress.json" 2>/dev/null)
  if [[ $progress == *'"state": "finished"'* && $progress =~ \"attempt\":\ ${ATTEMPT:-none}[^0-9] ]]; then
    state=COMPLETED cause=finished reason=
  fi
  say "${reason:-the run is finished}" >&2
  write_end "$job" "\"state\": \"$state\", \"updated\": $now, \"ended\": $now, \"exit_code\": ${3:-null}, \"cause\": \"$cause\"" "$reason" 2>/dev/null
  [ "$state" = COMPLETED ]
}

# Adds fields and a message to the status of this job, and a line to attempts.jsonl if an attempt was running.
write_end() {
  local job=$1 fields=$2 message=${3//\\/\\\\} status temporary=$RUN_DIR/.status.json.$JOB_PID.tmp
  status=$(cat "$RUN_DIR/status.json")
  if [[ $status != *"\"job_id\": \"$job\""* ]]; then
    # Another job may be running this run.
    [[ $status != *'"state": "RUNNING"'* ]] || return
    status="{\"job_id\": \"$job\", \"restart_count\": ${SLURM_RESTART_COUNT:-0}${ATTEMPT:+, \"attempt\": $ATTEMPT}}"
  fi
  # If a key occurs twice, the last value counts.
  status="${status%\}*}, $fields, \"message\": \"${message//\"/\'}\"}"
  printf '%s\n' "$status" >"$temporary" && sync "$temporary" && mv "$temporary" "$RUN_DIR/status.json" || return
  [ -n "${ATTEMPT:-}" ] || return
  # The last line may be incomplete.
  [ -z "$(tail -c 1 "$RUN_DIR/attempts.jsonl")" ] || printf '\n' >>"$RUN_DIR/attempts.jsonl"
  printf '%s\n' "${status//$'\n'/}" >>"$RUN_DIR/attempts.jsonl"
}
