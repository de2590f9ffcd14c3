# shellcheck shell=bash
# shellcheck disable=SC2154  # cluster.sh sets the variables
# Functions of cluster.sh: starting the daemons of a cluster, waiting for them, and stopping them.

# Starts each daemon that does not run, and waits for it.
start_cluster() {
    local i stepd
    # slurmd itself would start the one of the folder for which it was built.
    stepd=$(type -P slurmstepd)
    [[ $(daemon_pids munged) ]] ||
        start_daemon munged munged --key-file="$state/munge.key" --socket="$socket" \
            --pid-file="$state/munged.pid" --log-file="$state/log/munged.log" \
            --seed-file="$state/munge.seed" --num-threads=2 || give_up munged "munged did not start"
    [[ $(daemon_pids slurmctld) ]] || start_daemon slurmctld slurmctld -f "$conf" ||
        give_up slurmctld "slurmctld did not start"
    wait_until "$READY_TIMEOUT_S" controller_settled || true
    controller_answers || give_up slurmctld "slurmctld does not answer"
    for ((i = 1; i <= nodes; i++)); do
        [[ $(daemon_pids slurmd "n$i") ]] || start_daemon "slurmd-n$i" slurmd -f "$conf" -N "n$i" -d "$stepd" ||
            give_up "slurmd-n$i" "slurmd of n$i did not start"
    done
    wait_until "$READY_TIMEOUT_S" nodes_settled || true
    none_left missing_nodes ||
        give_up "slurmd-$(missing_nodes | head -n 1)" "not ready: $(missing_nodes | tr '\n' ' ')"
}

# Ready, or dead, so that there is nothing to wait for.
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

give_up() { # log reason
    trap '' INT TERM HUP
    say "$PROGRAM: $2; the logs are in $state/log"
    if [[ -s $state/log/$1.log ]]; then
        say "end of $1.log:"
        tail -n 15 -- "$state/log/$1.log" >&7
    fi
    exit 1
}

# However `up` ends before it is done: a cluster that cannot be completed is stopped, unless it was
# there before; its logs stay.
abandon() {
    trap '' INT TERM HUP
    ((!fresh)) || stop_cluster
}

stop_cluster() {
    cancel_jobs
    # The controller first, or it would start queued jobs when others end. Nothing has to be saved,
    # and after a TERM slurmd would wait for jobs that do not end.
    end_processes daemon_pids slurmctld
    end_processes cluster_pids
    rm -f -- "$socket" "$socket.lock"
}

# Through Slurm first, so that waiting srun and sbatch commands end and nothing is requeued.
cancel_jobs() {
    local jobs
    [[ $(daemon_pids slurmctld) ]] || return 0
    jobs=$(isolated timeout 5 squeue -h -o %A 2>/dev/null | sort -u) || return 0
    [[ $jobs ]] || return 0
    # shellcheck disable=SC2086 # one word per job
    isolated timeout 5 scancel $jobs >/dev/null 2>&1 || true
    wait_until 2 none_left isolated timeout 5 squeue -h || true
}
