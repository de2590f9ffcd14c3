# shellcheck shell=bash
# shellcheck disable=SC2154  # cluster.sh sets the variables
# Functions of cluster.sh: finding, starting and ending the processes of one cluster.

pids_matching() { # file-in-/proc grep-option...
    grep -l "${@:2}" /proc/[0-9]*/"$1" 2>/dev/null | cut -d/ -f3 || true
}

# A daemon is recognised by its name and by this cluster's file in its arguments: the pid in a pid
# file may belong to another process by now.
daemon_pids() { # [daemon [node]]
    local pid daemon
    for pid in $(pids_matching cmdline -zxF -e "$conf" -e "--socket=$socket"); do
        daemon=$(cat "/proc/$pid/comm" 2>/dev/null) || continue
        [[ $daemon =~ ^(munged|slurmctld|slurmd)$ && $daemon == "${1:-$daemon}" ]] || continue
        [[ ! ${2:-} ]] || grep -qzxF -- "$2" "/proc/$pid/cmdline" 2>/dev/null || continue
        echo "$pid"
    done
}

# The daemons, and what they and the jobs have started.
cluster_pids() {
    local pid
    daemon_pids ""
    # These hide their arguments, but their working directory is the log folder of their daemon.
    for pid in $(pids_matching comm -xE 'slurmstepd|slurmscriptd'); do
        [[ $(readlink "/proc/$pid/cwd" 2>/dev/null) != "$state/log" ]] || echo "$pid"
    done
    # What a job left behind has this cluster's SLURM_CONF and a node's name in its environment.
    for pid in $(pids_matching environ -zxF "SLURM_CONF=$conf"); do
        ! grep -qz '^SLURMD_NODENAME=' "/proc/$pid/environ" 2>/dev/null || echo "$pid"
    done
}

end_processes() { # lister [argument...]
    local pids deadline=$((EPOCHSECONDS + STOP_TIMEOUT_S))
    while pids=$("$@") && [[ $pids ]]; do
        ((EPOCHSECONDS <= deadline)) ||
            fail "could not end these processes of $state: ${pids//$'\n'/ }"
        # shellcheck disable=SC2086 # one word per pid
        kill -KILL $pids 2>/dev/null || true
        sleep 0.05
    done
}

none_left() { [[ ! $("$@") ]]; }

# A daemon that goes into the background changes its process id meanwhile: one look may miss it.
twice() { "$@" && sleep 0.3 && "$@"; }

wait_until() { # seconds command...
    local deadline=$((EPOCHSECONDS + $1))
    shift
    until "$@"; do
        ((EPOCHSECONDS <= deadline)) || return 1
        sleep 0.05
    done
}

# Nothing of the caller's Slurm settings, lock or terminal may reach the daemons.
isolated() {
    env -i PATH="$PATH" HOME="${HOME:-/}" LC_ALL=C SLURM_CONF="$conf" \
        ${LD_LIBRARY_PATH:+LD_LIBRARY_PATH="$LD_LIBRARY_PATH"} ${TZ:+TZ="$TZ"} \
        "$@" </dev/null 7>&- 9>&-
}

# In a subshell, so that an interrupt is not reported into the log.
start_daemon() ( # log program argument...
    isolated setsid "${@:2}" >>"$state/log/$1.log" 2>&1
)
