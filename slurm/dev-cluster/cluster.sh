#!/usr/bin/env bash
# A real Slurm on one host: cluster.sh up | down | status | env (see --help).
#
# One munged, one slurmctld and one slurmd per node, all run by the calling user (root or not), with
# their own configuration, munge key and socket, ports and state folder, so that several clusters can
# run side by side. Only processes of the named cluster are ever signalled.
set -euo pipefail
umask 022

readonly PROGRAM=${0##*/}
SCRIPT=$(realpath -- "${BASH_SOURCE[0]}") && readonly SCRIPT
# shellcheck source=slurm/dev-cluster/processes.sh
source "${SCRIPT%/*}/processes.sh"
# shellcheck source=slurm/dev-cluster/configuration.sh
source "${SCRIPT%/*}/configuration.sh"
# shellcheck source=slurm/dev-cluster/daemons.sh
source "${SCRIPT%/*}/daemons.sh"
readonly PACKAGES_HINT="apt-get install slurm-wlm munge"
readonly READY_TIMEOUT_S=30
readonly STOP_TIMEOUT_S=5
# Unix socket paths end at 107 characters, and slurmd adds up to 34 to the state folder.
readonly MAX_STATE_LENGTH=72

# Settings of slurm.conf that depend on neither place nor shape; --set changes them.
declare -A SETTINGS=(
    # The host has fewer CPUs than its nodes claim: nothing is pinned, limited or measured.
    [SlurmdParameters]=config_overrides
    [ProctrackType]=proctrack/linuxproc
    [TaskPlugin]=task/none
    [PropagateResourceLimits]=NONE
    # Without a default, a job that asks for no memory gets all the memory of a node.
    [DefMemPerCPU]=4096
    [SelectType]=select/cons_tres
    [SelectTypeParameters]=CR_CPU_Memory
    [MailProg]=/bin/true
    [MpiDefault]=none
    [JobRequeue]=1
    [ReturnToService]=2
    # Short times, because this cluster is for tests.
    [KillWait]=5
    [MinJobAge]=30
    [SchedulerParameters]="batch_sched_delay=0,bf_interval=2,sched_interval=2"
    [SlurmdTimeout]=20
)
declare -A CHANGED=()

usage() {
    cat <<EOT
usage: $PROGRAM ${1:-up|down|status|env} [options]

A real Slurm on one host, with fake GPU devices, for tests and experiments.

  up      start a cluster and return when every node is ready. If it is already up with the same
          shape, start only the dead daemons
  down    cancel its jobs, stop its daemons and job steps, and remove its state folder
  status  list its nodes and jobs; exit 0 only if every daemon runs
  env     print the shell line that makes sbatch, srun and squeue use it: eval "\$($PROGRAM env)"

Options of all commands:
  --name NAME    which cluster (default "default")
  --state DIR    folder of all clusters' state (default /tmp/slurm-cookbook-<uid>)

Additional options of up:
  --nodes N                number of nodes, n1 to nN (default 2)
  --gpus G                 fake GPUs per node, as --gres=gpu:h100:G (default 8; 0 for none)
  --requeue-delay SECONDS  how long a requeued job waits, and the lifetime of a job credential
                           (default 10)
  --set KEY=VALUE          another slurm.conf setting, such as KillWait=2; may be repeated

Exit status: 0 done, 1 failed, 2 wrong usage.
EOT
}

# A handler of signals may run while a function's standard error goes to a file.
exec 7>&2
say() { printf '%s\n' "$*" >&7; }

fail() {
    say "$PROGRAM: $*"
    exit 1
}

wrong_usage() {
    say "$PROGRAM: $* (see $PROGRAM ${COMMAND:+$COMMAND }--help)"
    exit 2
}

# --- Options and places ---------------------------------------------------------------------------

parse_options() {
    local option
    name=default nodes=2 gpus=8 requeue_delay=10
    root=/tmp/slurm-cookbook-$UID
    while (($#)); do
        case $1 in
        -h | --help)
            usage "$COMMAND"
            exit 0
            ;;
        --name | --state) ;;
        --nodes | --gpus | --requeue-delay | --set)
            [[ $COMMAND == up ]] || wrong_usage "$1 is an option of 'up', not of '$COMMAND'"
            ;;
        *) wrong_usage "unknown argument '$1'" ;;
        esac
        (($# > 1)) || wrong_usage "$1 needs a value"
        case $1 in
        --state) root=$2 ;;
        --set) set_option "$2" ;;
        *)
            option=${1#--}
            printf -v "${option//-/_}" %s "$2"
            ;;
        esac
        shift 2
    done
    [[ $root ]] || wrong_usage "--state needs a folder"
    root=$(realpath -m -- "$root")
    check_options
    state=$root/$name
    conf=$state/slurm.conf
    socket=$state/munge.socket
}

set_option() {
    [[ $1 =~ ^([A-Za-z]+)=([A-Za-z0-9_.,:=/-]*)$ ]] ||
        wrong_usage "--set must be KEY=VALUE as in slurm.conf, got '$1'"
    CHANGED[${BASH_REMATCH[1]}]=${BASH_REMATCH[2]}
    SETTINGS[${BASH_REMATCH[1]}]=${BASH_REMATCH[2]}
}

check_options() {
    check_number --nodes "$nodes" 1 64
    check_number --gpus "$gpus" 0 64
    check_number --requeue-delay "$requeue_delay" 1 3600
    [[ $name =~ ^[a-z0-9][a-z0-9-]{0,31}$ ]] ||
        wrong_usage "--name must be lower-case letters, digits and '-', got '$name'"
    [[ $root =~ ^[A-Za-z0-9/._@+-]+$ ]] ||
        wrong_usage "--state must be a path of letters, digits and '/._@+-', got '$root'"
}

check_number() { # option value least most
    [[ $2 =~ ^(0|[1-9][0-9]{0,4})$ && $2 -ge $3 && $2 -le $4 ]] ||
        wrong_usage "$1 must be a whole number from $3 to $4, got '$2'"
}

require_programs() {
    # Ordinary users have no sbin in PATH.
    PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
    local program missing=()
    local programs=(munged slurmctld slurmd slurmstepd sbatch scancel scontrol sinfo squeue srun)
    for program in "${programs[@]}"; do
        command -v "$program" >/dev/null || missing+=("$program")
    done
    ((!${#missing[@]})) ||
        fail "not installed: ${missing[*]}. On Debian and Ubuntu, as root: $PACKAGES_HINT"
}

# munged itself refuses folders that not everybody may enter, or that others may change.
check_root() {
    ((${#state} <= MAX_STATE_LENGTH)) ||
        fail "$state is too long for unix sockets (${#state} characters, at most" \
            "$MAX_STATE_LENGTH): pass a shorter --state or --name"
    (umask 066 && mkdir -p -- "$root" 2>/dev/null) || true
    [[ -d $root ]] || fail "cannot create the state folder $root: pass another --state"
    [[ -O $root ]] ||
        fail "$root belongs to $(stat -c %U -- "$root"), not to you: pass another --state"
}

take_lock() {
    exec 9>"$root/.lock"
    flock -w 120 9 || fail "another $PROGRAM has been using $root for 2 minutes: try again later"
}

# A folder that this script did not make is never emptied.
check_state_is_ours() {
    [[ ! -e $state || -f $state/shape ]] ||
        fail "$state is not a cluster's state folder: pass another --name or --state"
}

# --- Commands -------------------------------------------------------------------------------------

cluster_up() {
    require_programs
    check_root
    take_lock
    check_state_is_ours
    if [[ $(daemon_pids) ]]; then
        fresh=0
        [[ $(<"$state/shape") == "$(shape)" ]] ||
            fail "cluster '$name' is up as $(<"$state/shape"), not as $(shape);" \
                "first: $SCRIPT down --name $name --state $root"
        if every_daemon_runs; then
            say "cluster '$name' is already up: $(shape)"
            return
        fi
    else
        fresh=1
        stop_cluster
        rm -rf -- "$state"
        write_state
    fi
    trap abandon EXIT
    trap 'give_up slurmctld "interrupted"' INT TERM HUP
    start_cluster
    trap - EXIT INT TERM HUP
    say "cluster '$name' is up: $(shape)"
    say "to use it: $(use_line)"
}

every_daemon_runs() {
    local i
    [[ $(daemon_pids munged) && $(daemon_pids slurmctld) ]] || return 1
    for ((i = 1; i <= nodes; i++)); do
        [[ $(daemon_pids slurmd "n$i") ]] || return 1
    done
}

use_line() { echo "eval \"\$($SCRIPT env --name $name --state $root)\""; }

cluster_down() {
    if [[ ! -e $state ]]; then
        say "cluster '$name' is not up (nothing in $state)"
        return
    fi
    [[ -O $state ]] || fail "$state belongs to $(stat -c %U -- "$state"), who must take it down"
    require_programs
    take_lock
    check_state_is_ours
    stop_cluster
    rm -rf -- "$state"
    say "cluster '$name' is down"
}

cluster_status() {
    require_running
    read -r nodes _ <<<"$(<"$state/shape")"
    nodes=${nodes#*=}
    echo "cluster $name: $(<"$state/shape"); state and logs: $state"
    every_daemon_runs || fail "daemons of '$name' are dead: 'up' with the same shape starts them again"
    require_programs
    isolated timeout 5 sinfo -o '%P %N %t %c %m %G'
    isolated timeout 5 squeue
    echo "to use it: $(use_line)"
}

cluster_env() {
    require_running
    echo "export SLURM_CONF=$conf"
}

require_running() {
    [[ -f $conf && $(daemon_pids) ]] ||
        fail "cluster '$name' is not up; to start it: $SCRIPT up --name $name --state $root"
}

main() {
    COMMAND=
    case ${1:-} in
    up | down | status | env) COMMAND=$1 ;;
    -h | --help)
        usage
        exit 0
        ;;
    '') wrong_usage "no command: give up, down, status or env" ;;
    *) wrong_usage "unknown command '$1'" ;;
    esac
    parse_options "${@:2}"
    "cluster_$COMMAND"
}

main "$@"
