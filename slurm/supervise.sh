# shellcheck shell=bash
# Starts the supervisor of a job (slurm/supervise.py), again if it is killed. Sourced by the job script.
# Needs RUN_DIR, COOKBOOK and VENV.

# The process id of the job script names a job without Slurm.
export JOB_PID=$$
# AGAIN: why the supervisor is restarted, if it is.
SUPERVISOR='' AGAIN='' WARNED=''

say() { printf '%s cookbook: %s\n' "$(date -u +%H:%M:%S)" "$*"; }

# Slurm's warning that the time limit is near, and its TERM, reach this script.
warn() { WARNED=yes; kill -USR1 "$SUPERVISOR" 2>/dev/null; }
terminate() { AGAIN=terminated; kill -TERM "$SUPERVISOR" 2>/dev/null; }
trap terminate TERM

# Runs the supervisor, and ends the job script with it.
supervise() { # command
  local rc began since pause=1 wait_s=${RECORD_WAIT_S:-600} given
  while :; do
    began=$SECONDS given=$AGAIN
    env COOKBOOK_AGAIN="$AGAIN" ${WARNED:+COOKBOOK_WARNED=yes} PYTHONPATH="$COOKBOOK" "$@" &
    SUPERVISOR=$!
    [ "$AGAIN" = "$given" ] || kill -TERM $SUPERVISOR
    until wait $SUPERVISOR; ! kill -0 $SUPERVISOR 2>/dev/null; do :; done
    # Not the status of a wait that a signal has ended.
    wait $SUPERVISOR
    rc=$?
    case $rc in 0 | 1) exit $rc ;; 76) exit 143 ;; esac
    ((SECONDS - began < 60)) && [ -n "${since:-}" ] || since=$SECONDS pause=1
    # At the start of the job it is more likely a wrong path than a filesystem that comes back.
    [ -n "$AGAIN" ] || [ -x "$VENV/bin/python" ] || wait_s=${FILES_WAIT_S:-30}
    [ "$AGAIN" != terminated ] || wait_s=15
    ((SECONDS - since < wait_s)) || not_supervised $rc
    say "the supervisor has ended before the job (exit status $rc): it is restarted"
    AGAIN=${AGAIN:-yes}
    [ "$AGAIN" = terminated ] || { sleep $pause & wait $!; }
    pause=$((pause < 16 ? 2 * pause : 30))
  done
}

# The supervisor cannot be started: shows that in the run's status, unless an attempt's is there.
not_supervised() { # exit status
  local reason="the supervisor could not be started (exit status $1, see $RUN_DIR/logs/job.log)"
  [ -x "$VENV/bin/python" ] ||
    reason="$(hostname -s) cannot see the virtual environment $VENV: put it on a filesystem that all nodes mount"
  reason="$reason, then continue with: cookbook resume ${RUN_DIR##*/}"
  [[ $(cat "$RUN_DIR/status.json" 2>/dev/null) != *'"state": "RUNNING"'* ]] || { say "$reason"; exit 1; }
  fail_run not_recorded "$reason"
}

# A line of the site's job_setup failed or ended the script. The run fails, because a retry cannot fix
# this. SETUP_LINE is the line, SETUP_PLACE the site's file and the number of the line in it.
setup_failed() {
  local rc=$?
  trap - ERR EXIT
  set +eu
  [ "$rc" != 0 ] || rc=1
  fail_run setup "$SETUP_PLACE: the ${SETUP_KEY:-job_setup} line '$SETUP_LINE' failed with exit status $rc (see $RUN_DIR/logs/job.log): fix it there, then: ${AGAIN:-cookbook resume ${RUN_DIR##*/}}"
}

# Ends the job script without a supervisor: the run has failed.
fail_run() { # cause message
  local job=${SLURM_JOB_ID:-local-$JOB_PID} message=${2//\\/\\\\} now
  now=$(date +%s)
  say "$2"
  message=${message//\"/\\\"} message=${message//[[:cntrl:]]/ }
  printf '{"job_id": "%s", "restart_count": %s, "state": "FAILED", "cause": "%s", "updated": %s, "ended": %s, "message": "%s"}\n' \
    "$job" "${SLURM_RESTART_COUNT:-0}" "$1" "$now" "$now" "$message" >"$RUN_DIR/.status.json.tmp" &&
    mv "$RUN_DIR/.status.json.tmp" "$RUN_DIR/status.json"
  exit 1
}
