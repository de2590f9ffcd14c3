#!/usr/bin/env bash
# A real Slurm on one host: cluster.sh up | down | status | env (see --help).
#
# One munged, one slurmctld and a slurmd per node, all run by the calling user (root or not), with a
# private configuration, munge key and socket, ports and state folder, so that several clusters can
# stand side by side. --accounting adds a slurmdbd, and a mariadbd that nobody but it can reach. No
# process but those of the named cluster is ever signalled.
set -euo pipefail
umask 022

readonly PROGRAM=${0##*/}
SCRIPT=$(realpath -- "${BASH_SOURCE[0]}") && readonly SCRIPT
readonly PACKAGES_HINT="apt-get install slurm-wlm munge"
readonly ACCOUNTING_PACKAGES="slurmdbd mariadb-server-core"
readonly READY_TIMEOUT_S=30
readonly STOP_TIMEOUT_S=5
# Unix socket paths end at 107 characters, and slurmd adds up to 34 to the state folder.
readonly MAX_STATE_LENGTH=72

# What slurm.conf says whatever the place and shape; --set changes it.
declare -A SETTINGS=(
    # The host has fewer CPUs than its nodes claim: nothing is pinned, limited or measured.
    [SlurmdParameters]=config_overrides
    [ProctrackType]=proctrack/linuxproc
    [TaskPlugin]=task/none
    [PropagateResourceLimits]=NONE
    # Without a default, a job that asks for no memory takes a whole node's.
    [DefMemPerCPU]=4096
    [SelectType]=select/cons_tres
    [SelectTypeParameters]=CR_CPU_Memory
    [MailProg]=/bin/true
    [MpiDefault]=none
    [JobRequeue]=1
    [ReturnToService]=2
    # Short times: this is a cluster to break and to watch.
    [KillWait]=5
    [MinJobAge]=30
    [SchedulerParameters]="batch_sched_delay=0,bf_interval=2,sched_interval=2"
    [SlurmdTimeout]=20
)
declare -A CHANGED=()

# A small database that is thrown away: no network, little memory, no wait for the disk.
readonly DATABASE=(
    --no-defaults --skip-networking --skip-grant-tables --skip-log-bin
    --innodb-buffer-pool-size=32M --innodb-log-file-size=16M --innodb-flush-log-at-trx-commit=2
    --aria-pagecache-buffer-size=8M --aria-log-file-size=8M --key-buffer-size=1M
)

usage() {
    case ${1:-} in
    up) cat <<EOT ;;
usage: $PROGRAM up [--nodes N] [--gpus G] [--gpu-type TYPE] [--requeue-delay SECONDS]
       [--accounting] [--set KEY=VALUE ...] [--name NAME] [--state DIR]

Start a cluster and return when a job has run on every node. Where it is up already with the same
shape, only daemons that died are started again.

  --nodes N                number of nodes, n1 to nN (default 2)
  --gpus G                 stand-in GPUs a node (default 8; 0 for none)
  --gpu-type TYPE          their type, as in --gres=gpu:TYPE:G (default h100)
  --requeue-delay SECONDS  wait of a requeued job, also the life of a job credential (default 10)
  --accounting             keep accounts, QoS and ended jobs in a database, for sacctmgr and sacct;
                           you are in its account 'users'. What sacctmgr allows is enforced with
                           --set AccountingStorageEnforce=associations,limits,qos
  --set KEY=VALUE          another slurm.conf setting, such as KillWait=2; may be repeated
EOT
    down) cat <<EOT ;;
usage: $PROGRAM down [--name NAME] [--state DIR]

Cancel the cluster's jobs, stop its daemons and job steps, and remove its state folder.
EOT
    status) cat <<EOT ;;
usage: $PROGRAM status [--name NAME] [--state DIR]

List the cluster's daemons, nodes and jobs. Exit 0 only where every daemon runs.
EOT
    env) cat <<EOT ;;
usage: $PROGRAM env [--name NAME] [--state DIR]

Print the shell line that makes sbatch, srun and squeue use the cluster:
  eval "\$($PROGRAM env)"
EOT
    *) cat <<EOT ;;
usage: $PROGRAM up|down|status|env [options]

A real Slurm on one host, with stand-in GPUs, for tests and for trying things out.

  up      start a cluster (default: 2 nodes of 8 h100)
  down    stop it and remove its state
  status  list its daemons, nodes and jobs
  env     print the shell line that selects it

$PROGRAM COMMAND --help lists a command's options. All take:
  --name NAME    which cluster (default "default")
  --state DIR    folder of all clusters' state (default \$COOKBOOK_DEV_CLUSTER_ROOT, else
                 /tmp/slurm-cookbook-<uid>)

Exit status: 0 done, 1 failed, 2 wrong usage.
EOT
    esac
}

say() { printf '%s\n' "$*" >&2; }

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
    name=default nodes=2 gpus=8 gpu_type=h100 requeue_delay_s=10 accounting=0
    root=${COOKBOOK_DEV_CLUSTER_ROOT:-/tmp/slurm-cookbook-$UID}
    while (($#)); do
        case $1 in
        -h | --help)
            usage "$COMMAND"
            exit 0
            ;;
        --name | --state) ;;
        --nodes | --gpus | --gpu-type | --requeue-delay | --set | --accounting)
            [[ $COMMAND == up ]] || wrong_usage "$1 belongs to 'up', not to '$COMMAND'"
            ;;
        *) wrong_usage "unknown argument '$1'" ;;
        esac
        if [[ $1 == --accounting ]]; then
            accounting=1
            shift
            continue
        fi
        (($# > 1)) || wrong_usage "$1 needs a value"
        case $1 in
        --name) name=$2 ;;
        --state) root=$2 ;;
        --nodes) nodes=$2 ;;
        --gpus) gpus=$2 ;;
        --gpu-type) gpu_type=$2 ;;
        --requeue-delay) requeue_delay_s=$2 ;;
        --set) set_option "$2" ;;
        esac
        shift 2
    done
    [[ $root ]] || wrong_usage "--state needs a folder"
    root=$(realpath -m -- "$root")
    check_options
    state=$root/$name
    conf=$state/slurm.conf
    socket=$state/munge.socket
    database=$state/database
}

set_option() {
    [[ $1 =~ ^([A-Za-z]+)=([A-Za-z0-9_.,:=/-]*)$ ]] ||
        wrong_usage "--set takes KEY=VALUE as slurm.conf has it, got '$1'"
    CHANGED[${BASH_REMATCH[1]}]=${BASH_REMATCH[2]}
    SETTINGS[${BASH_REMATCH[1]}]=${BASH_REMATCH[2]}
}

check_options() {
    check_number --nodes "$nodes" 1 64
    check_number --gpus "$gpus" 0 64
    check_number --requeue-delay "$requeue_delay_s" 1 3600
    [[ $gpu_type =~ ^[a-z][a-z0-9_]{0,31}$ ]] ||
        wrong_usage "--gpu-type takes lower-case letters, digits and '_', got '$gpu_type'"
    [[ $name =~ ^[a-z0-9][a-z0-9-]{0,31}$ ]] ||
        wrong_usage "--name takes lower-case letters, digits and '-', got '$name'"
    [[ $root =~ ^[A-Za-z0-9/._@+-]+$ ]] ||
        wrong_usage "--state takes a path of letters, digits and '/._@+-', got '$root'"
}

check_number() { # option value least most
    [[ $2 =~ ^(0|[1-9][0-9]{0,4})$ && $2 -ge $3 && $2 -le $4 ]] ||
        wrong_usage "$1 takes a whole number from $3 to $4, got '$2'"
}

require_programs() {
    # Ordinary users have no sbin in PATH.
    PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
    local program missing=() hint=$PACKAGES_HINT
    local programs=(munged slurmctld slurmd sbatch scancel scontrol sinfo squeue srun)
    if ((accounting)); then
        programs+=(slurmdbd mariadbd sacctmgr)
        hint+=" $ACCOUNTING_PACKAGES"
    fi
    for program in "${programs[@]}"; do
        command -v "$program" >/dev/null || missing+=("$program")
    done
    ((!${#missing[@]})) ||
        fail "not installed: ${missing[*]}. On Debian and Ubuntu, as root: $hint"
}

# munged serves only a socket whose folders everybody may pass and nobody else may change.
check_root() {
    ((${#state} <= MAX_STATE_LENGTH)) ||
        fail "$state is too long for unix sockets (${#state} characters, at most" \
            "$MAX_STATE_LENGTH): pass a shorter --state or --name"
    local folder faults=()
    (umask 066 && mkdir -p -- "$root" 2>/dev/null) || true
    [[ -d $root ]] || fail "cannot make the state folder $root: pass another --state"
    [[ -O $root ]] ||
        fail "$root belongs to $(stat -c %U -- "$root"), not to you: pass another --state"
    [[ -w $root && -x $root ]] || fail "cannot write in $root: pass another --state"
    folder=$root
    while :; do
        check_folder "$folder"
        [[ $folder == / ]] && break
        folder=$(dirname -- "$folder")
    done
    ((!${#faults[@]})) || fail "munged cannot work under $root: $(join '; ' "${faults[@]}")." \
        "Change that, or pass another --state"
}

check_folder() { # adds to the caller's faults
    local mode owner
    read -r mode owner < <(stat -c '%a %u' -- "$1")
    ((8#$mode & 8#001)) || faults+=("$1 is closed to others (chmod o+x)")
    ((owner == 0 || owner == UID)) || faults+=("$1 belongs to $(stat -c %U -- "$1")")
    ((8#$mode & 8#1000 || !(8#$mode & 8#022))) ||
        faults+=("$1 can be changed by others (chmod go-w)")
}

join() { # separator word...
    local separator=$1 text=$2 word
    for word in "${@:3}"; do text+=$separator$word; done
    printf '%s' "$text"
}

take_lock() {
    exec 9>"$root/.lock"
    flock -w 120 9 || fail "another $PROGRAM has worked in $root for 2 minutes: try again later"
}

# A folder that this script did not make is never emptied.
check_state_is_ours() {
    [[ ! -e $state || -f $state/shape ]] ||
        fail "$state is no cluster's state folder: pass another --name or --state"
}

# --- Processes ------------------------------------------------------------------------------------

pids_matching() { # file-in-/proc grep-option...
    grep -l "${@:2}" /proc/[0-9]*/"$1" 2>/dev/null | cut -d/ -f3 || true
}

# A daemon is known by its name and by this cluster's file among its arguments: a pid file may
# name a process that took the pid over. slurmdbd takes no file, only SLURM_CONF.
daemon_pids() { # [daemon [node]]
    local pid daemon
    for pid in $(pids_matching cmdline -zxF -e "$conf" -e "--socket=$socket" \
        -e "--socket=$database/socket"); do
        daemon=$(cat "/proc/$pid/comm" 2>/dev/null) || continue
        [[ $daemon == "${1:-$daemon}" ]] || continue
        case $daemon in
        slurmd) [[ ! ${2:-} ]] || grep -qzxF -- "$2" "/proc/$pid/cmdline" 2>/dev/null || continue ;;
        munged | slurmctld | mariadbd) ;;
        *) continue ;;
        esac
        echo "$pid"
    done
    [[ ${1:-slurmdbd} == slurmdbd ]] || return 0
    for pid in $(pids_matching comm -xF slurmdbd); do
        ! grep -qzxF "SLURM_CONF=$conf" "/proc/$pid/environ" 2>/dev/null || echo "$pid"
    done
}

# slurmstepd and slurmscriptd hide their arguments, but work in the log folder of the daemon that
# started them.
helper_pids() { # helper
    local pid
    for pid in $(pids_matching comm -xF "$1"); do
        [[ $(readlink "/proc/$pid/cwd" 2>/dev/null) != "$state/log" ]] || with_descendants "$pid"
    done
}

# What a job left behind has this cluster's SLURM_CONF and a node's name in its environment.
orphan_pids() {
    local pid
    for pid in $(pids_matching environ -zxF "SLURM_CONF=$conf"); do
        ! grep -qz '^SLURMD_NODENAME=' "/proc/$pid/environ" 2>/dev/null || echo "$pid"
    done
}

with_descendants() {
    local pid
    for pid in "$@"; do
        echo "$pid"
        # shellcheck disable=SC2046 # one word a child
        with_descendants $(cat "/proc/$pid/task/"*/children 2>/dev/null)
    done
}

# Sends the signals one after another for as long as a process is left.
end_processes() { # signals lister [argument...]
    local pids signal signals=$1
    shift
    for signal in $signals; do
        pids=$("$@")
        [[ $pids ]] || return 0
        # shellcheck disable=SC2086 # one word a pid
        kill -s "$signal" $pids 2>/dev/null || true
        wait_until "$STOP_TIMEOUT_S" none_left "$@" && return 0
    done
    fail "could not end these processes of $state: $("$@" | tr '\n' ' ')"
}

none_left() { [[ ! $("$@") ]]; }

# A daemon that goes into the background changes its process id on the way: one look may miss it.
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
        "$@" </dev/null 9>&-
}

# In a subshell, so that an interrupt is not reported into the log.
start_daemon() ( # log program argument...
    isolated setsid "${@:2}" >>"$state/log/$1.log" 2>&1
)

# --- Configuration --------------------------------------------------------------------------------

shape() {
    local key
    printf 'nodes=%s gpus=%s gpu-type=%s requeue-delay=%s' \
        "$nodes" "$gpus" "$gpu_type" "$requeue_delay_s"
    ((!accounting)) || printf ' accounting=1'
    for key in $(sorted "${!CHANGED[@]}"); do printf ' %s=%s' "$key" "${CHANGED[$key]}"; done
}

sorted() { printf '%s\n' "$@" | LC_ALL=C sort; }

free_ports() { # count; prints the first of as many neighbouring TCP ports that nobody uses
    local address port base attempt
    local -A used=()
    while read -r _ address _; do
        [[ $address != *:* ]] || used[$((16#${address##*:}))]=1
    done < <(cat /proc/net/tcp /proc/net/tcp6 2>/dev/null)
    for ((attempt = 0; attempt < 1000; attempt++)); do
        # Below the ports that the kernel hands out, so that a daemon finds its own again.
        base=$((20000 + (RANDOM * 32768 + RANDOM) % 12000))
        for ((port = base; port < base + $1; port++)); do
            [[ ! ${used[$port]:-} ]] || continue 2
        done
        echo "$base"
        return
    done
    fail "found no $1 free neighbouring TCP ports from 20000 on"
}

write_state() {
    local i
    local port
    mkdir -m 0711 -- "$state" "$state"/{dev,spool}
    shape >"$state/shape"
    mkdir -m 0700 -- "$state"/{controller,log}
    for ((i = 1; i <= nodes; i++)); do mkdir -m 0755 -- "$state/spool/n$i"; done
    # slurmd asks for character devices, and links to /dev/null need no rights to make.
    for ((i = 0; i < gpus; i++)); do ln -s /dev/null "$state/dev/nvidia$i"; done
    (umask 077 && head -c 128 /dev/urandom >"$state/munge.key" && chmod 0400 "$state/munge.key")
    port=$(free_ports $((nodes + 1 + accounting)))
    ((!accounting)) || write_database
    write_configuration
}

# Nobody but this user can pass the folder of the database's socket, so that it asks for no password.
# The server's own tables are made because slurmdbd keeps a procedure in them.
write_database() {
    local tables
    for tables in /usr/share/{mysql,mariadb}/{mysql,mariadb}_system_tables.sql; do
        [[ ! -r $tables ]] || break
    done
    [[ -r $tables ]] || fail "mariadbd's own tables are missing: $ACCOUNTING_PACKAGES gives them"
    mkdir -m 0700 -- "$database"
    { printf 'create database mysql;\nuse mysql;\n' && cat -- "$tables"; } |
        env -i PATH="$PATH" mariadbd "${DATABASE[@]}" --datadir="$database" --bootstrap \
            >"$state/log/mariadbd.log" 2>&1 9>&- || give_up mariadbd "mariadbd made no database"
    cat >"$state/slurmdbd.conf" <<EOT
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=$((port + nodes + 1))
SlurmUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$socket
PidFile=$state/slurmdbd.pid
LogFile=$state/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=$(id -un)
StorageLoc=slurm
EOT
    chmod 0600 "$state/slurmdbd.conf"
}

write_configuration() {
    local version key user host node_gres=''
    user=$(id -un) host=$(uname -n)
    version=$(slurmd -V | grep -oE '[0-9]+\.[0-9]+' | head -n 1)
    {
        cat <<EOT
ClusterName=$name
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$user
SlurmdUser=$user
AuthInfo=socket=$socket,cred_expire=$requeue_delay_s
StateSaveLocation=$state/controller
SlurmdSpoolDir=$state/spool/%n
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd-%n.pid
SlurmctldLogFile=$state/log/slurmctld.log
SlurmdLogFile=$state/log/slurmd-%n.log

# Ids start from the clock, so that no later cluster gives a job the id of an earlier one.
FirstJobId=$((EPOCHSECONDS % 10000000 + 1))

EOT
        for key in $(sorted "${!SETTINGS[@]}"); do echo "$key=${SETTINGS[$key]}"; done
        echo
        if ((accounting)); then
            echo "AccountingStorageType=accounting_storage/slurmdbd"
            echo "AccountingStorageHost=127.0.0.1"
            echo "AccountingStoragePass=$socket"
            echo "AccountingStoragePort=$((port + nodes + 1))"
            ((!gpus)) || echo "AccountingStorageTRES=gres/gpu,gres/gpu:$gpu_type"
        fi
        if ((gpus)); then
            echo "GresTypes=gpu"
            node_gres=" Gres=gpu:$gpu_type:$gpus"
        fi
        echo "NodeName=n[1-$nodes] NodeHostname=${host%%.*} NodeAddr=127.0.0.1" \
            "Port=[$((port + 1))-$((port + nodes))] CPUs=256 RealMemory=2097152$node_gres"
        echo "PartitionName=gpu Nodes=ALL Default=YES MaxTime=7-00:00:00"
        echo "PartitionName=debug Nodes=ALL MaxTime=00:30:00"
    } >"$conf"
    ((!gpus)) ||
        echo "Name=gpu Type=$gpu_type File=$state/dev/nvidia[0-$((gpus - 1))]" >"$state/gres.conf"
    # Slurm knows this value since 24.05, and without it asks for cgroups that a container lacks.
    if printf '24.05\n%s\n' "$version" | sort -VC; then
        echo "CgroupPlugin=disabled" >"$state/cgroup.conf"
    fi
}

# --- Starting and stopping ------------------------------------------------------------------------

# Starts each daemon that does not run, and waits for it.
start_cluster() {
    local i
    if none_left daemon_pids munged; then
        start_daemon munged munged --key-file="$state/munge.key" --socket="$socket" \
            --pid-file="$state/munged.pid" --log-file="$state/log/munged.log" \
            --seed-file="$state/munge.seed" --num-threads=2 || give_up munged "munged did not start"
    fi
    ((!accounting)) || start_accounting
    if none_left daemon_pids slurmctld; then
        start_daemon slurmctld slurmctld -f "$conf" || give_up slurmctld "slurmctld did not start"
    fi
    wait_until "$READY_TIMEOUT_S" controller_settled || true
    controller_answers || give_up slurmctld "slurmctld does not answer"
    for ((i = 1; i <= nodes; i++)); do
        none_left daemon_pids slurmd "n$i" || continue
        start_daemon "slurmd-n$i" slurmd -f "$conf" -N "n$i" ||
            give_up "slurmd-n$i" "slurmd of n$i did not start"
    done
    wait_until "$READY_TIMEOUT_S" nodes_settled || true
    none_left missing_nodes ||
        give_up "slurmd-$(missing_nodes | head -n 1)" "not ready: $(missing_nodes | tr '\n' ' ')"
}

start_accounting() {
    if none_left daemon_pids mariadbd; then
        start_daemon mariadbd --fork mariadbd "${DATABASE[@]}" --user="$(id -un)" \
            --datadir="$database" --socket="$database/socket" --pid-file="$database/pid"
        wait_until "$READY_TIMEOUT_S" database_settled || true
        [[ -S $database/socket ]] || give_up mariadbd "mariadbd did not start"
    fi
    if none_left daemon_pids slurmdbd; then
        # How the database's client library is told of another socket than the system's.
        start_daemon slurmdbd env MYSQL_UNIX_PORT="$database/socket" slurmdbd ||
            give_up slurmdbd "slurmdbd did not start"
    fi
    wait_until "$READY_TIMEOUT_S" accounting_settled || true
    accounting_answers || give_up slurmdbd "slurmdbd does not answer"
    # Without its cluster there, and a user's account, the controller would refuse every job.
    if ((fresh)); then
        add cluster "$name"
        add account users Description=users Organization=users
        add user "$(id -un)" Account=users DefaultAccount=users
    fi
}

add() {
    isolated timeout 20 sacctmgr --immediate --quiet add "$@" >>"$state/log/sacctmgr.log" 2>&1 ||
        give_up sacctmgr "sacctmgr could not add $1 $2"
}

database_settled() {
    [[ -S $database/socket ]] || grep -q 'ERROR. Aborting' "$state/log/mariadbd.log"
}

accounting_settled() { accounting_answers || twice none_left daemon_pids slurmdbd; }

accounting_answers() { isolated timeout 5 sacctmgr --noheader show cluster >/dev/null 2>&1; }

# Ready, or so dead that waiting longer is idle.
controller_settled() { controller_answers || twice none_left daemon_pids slurmctld; }

nodes_settled() { none_left missing_nodes || twice a_daemon_is_dead; }

a_daemon_is_dead() { ! every_daemon_runs; }

controller_answers() { isolated timeout 5 scontrol ping 2>/dev/null | grep -q 'is UP'; }

missing_nodes() {
    local ready i
    ready=$(isolated timeout 5 sinfo -h -N -p gpu -o '%N %t' 2>/dev/null |
        grep -E ' (idle|mix|alloc|comp|resv|drain|drng)$') || true
    for ((i = 1; i <= nodes; i++)); do
        grep -q "^n$i " <<<"$ready" || echo "n$i"
    done
}

run_test_job() {
    local answer expected
    expected=$(printf 'n%s\n' $(seq "$nodes") | sort)
    answer=$(cd / && isolated timeout "$READY_TIMEOUT_S" srun --job-name=ready --partition=debug \
        --nodes="$nodes" --ntasks-per-node=1 printenv SLURMD_NODENAME 2>"$state/log/ready.log" |
        sort) || true
    [[ $answer == "$expected" ]] ||
        give_up ready "a test job on $nodes nodes answered '${answer//$'\n'/ }'"
}

# A cluster that cannot be completed is stopped, unless it was there before; its logs stay.
give_up() { # log reason
    trap - INT TERM
    say "$PROGRAM: $2; the logs are in $state/log"
    if [[ -s $state/log/$1.log ]]; then
        say "end of $1.log:"
        tail -n 15 -- "$state/log/$1.log" >&2
    fi
    ((!fresh)) || stop_cluster
    exit 1
}

stop_cluster() {
    cancel_jobs
    # The controller first, or it would start queued jobs in place of the ended ones. slurmd has
    # nothing to save, and told to end waits for jobs that do not.
    end_processes "TERM KILL" daemon_pids slurmctld
    end_processes KILL helper_pids slurmscriptd
    end_processes KILL helper_pids slurmstepd
    end_processes KILL orphan_pids
    end_processes KILL daemon_pids slurmd
    end_processes "TERM KILL" daemon_pids slurmdbd
    end_processes KILL daemon_pids mariadbd
    end_processes "TERM KILL" daemon_pids munged
    rm -f -- "$socket" "$socket.lock" "$database/socket"
}

# Through Slurm first, so that waiting srun and sbatch commands end and nothing is requeued.
cancel_jobs() {
    local jobs
    [[ $(daemon_pids slurmctld) ]] || return 0
    jobs=$(isolated timeout 5 squeue -h -o %A 2>/dev/null | sort -u) || return 0
    [[ $jobs ]] || return 0
    # shellcheck disable=SC2086 # one word a job
    isolated timeout 5 scancel $jobs >/dev/null 2>&1 || true
    wait_until 2 none_left helper_pids slurmstepd || true
}

# --- Commands -------------------------------------------------------------------------------------

cluster_up() {
    local started=${EPOCHREALTIME/[.,]/} took_ms
    require_programs
    check_root
    take_lock
    check_state_is_ours
    fresh=1
    if [[ $(daemon_pids) ]]; then
        fresh=0
        [[ $(<"$state/shape") == "$(shape)" ]] ||
            fail "cluster '$name' is up as $(<"$state/shape"), not as $(shape);" \
                "first: $SCRIPT down --name $name --state $root"
        if every_daemon_runs; then
            say "cluster '$name' is already up: $(description)"
            return
        fi
    fi
    if ((fresh)); then
        stop_cluster
        rm -rf -- "$state"
        write_state
    fi
    trap 'give_up slurmctld "interrupted"' INT TERM
    start_cluster
    ((!fresh)) || run_test_job
    trap - INT TERM
    took_ms=$(((${EPOCHREALTIME/[.,]/} - started) / 1000))
    say "cluster '$name' is up after $((took_ms / 1000)).$(printf %03d $((took_ms % 1000))) s:" \
        "$(description)"
    say "to use it: $(use_line)"
}

every_daemon_runs() {
    local i
    [[ $(daemon_pids munged) && $(daemon_pids slurmctld) ]] || return 1
    ((!accounting)) || [[ $(daemon_pids mariadbd) && $(daemon_pids slurmdbd) ]] || return 1
    for ((i = 1; i <= nodes; i++)); do
        [[ $(daemon_pids slurmd "n$i") ]] || return 1
    done
}

description() {
    local text="$nodes nodes"
    ((nodes > 1)) || text="1 node"
    ((!gpus)) || text+=", $gpus $gpu_type GPUs each"
    ((!accounting)) || text+=", with accounting"
    echo "$text"
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

# Reads the shape of the cluster that is there.
read_shape() {
    [[ -f $state/shape ]] || return 1
    read -r nodes gpus gpu_type _ <"$state/shape"
    nodes=${nodes#*=} gpus=${gpus#*=} gpu_type=${gpu_type#*=}
    ! grep -qw accounting=1 "$state/shape" || accounting=1
}

cluster_status() {
    local daemons=(munged slurmctld) daemon pid dead=0 i
    if ! read_shape; then
        say "cluster '$name' is not up (nothing in $state); to start it:" \
            "$SCRIPT up --name $name --state $root"
        return 1
    fi
    ((!accounting)) || daemons+=(mariadbd slurmdbd)
    for ((i = 1; i <= nodes; i++)); do daemons+=("slurmd n$i"); done
    echo "cluster $name: $(<"$state/shape")"
    for daemon in "${daemons[@]}"; do
        # shellcheck disable=SC2086 # daemon and node
        pid=$(daemon_pids $daemon)
        if [[ $pid ]]; then pid="pid ${pid//$'\n'/ }"; else pid=dead dead=1; fi
        printf '  %-12s %s\n' "$daemon" "$pid"
    done
    echo "state and logs: $state"
    if ((dead)); then
        say "daemons of '$name' are dead; to start them again, pass 'up' the same shape"
        return 1
    fi
    require_programs
    isolated timeout 5 sinfo -o '%P %N %t %c %m %G'
    isolated timeout 5 squeue
    echo "to use it: $(use_line)"
}

cluster_env() {
    [[ -f $conf && $(daemon_pids slurmctld) ]] ||
        fail "cluster '$name' is not up; to start it: $SCRIPT up --name $name --state $root"
    echo "export SLURM_CONF=$conf"
}

main() {
    COMMAND=
    case ${1:-} in
    up | down | status | env) COMMAND=$1 ;;
    -h | --help)
        usage
        exit 0
        ;;
    '') wrong_usage "which command: up, down, status or env?" ;;
    *) wrong_usage "unknown command '$1'" ;;
    esac
    parse_options "${@:2}"
    "cluster_$COMMAND"
}

main "$@"
