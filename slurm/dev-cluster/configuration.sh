# shellcheck shell=bash
# shellcheck disable=SC2154  # cluster.sh sets the variables
# Functions of cluster.sh: the state folder of a cluster, with slurm.conf.

shape() {
    local key
    printf 'nodes=%s gpus=%s requeue-delay=%s' "$nodes" "$gpus" "$requeue_delay"
    for key in $(sorted "${!CHANGED[@]}"); do printf ' %s=%s' "$key" "${CHANGED[$key]}"; done
}

sorted() { printf '%s\n' "$@" | LC_ALL=C sort; }

free_ports() { # count; prints the first of as many neighbouring TCP ports that nobody uses
    local used base attempt
    used=$(sed -nE 's/^ *[0-9]+: [0-9A-F]+:([0-9A-F]+) .*/\1/p' /proc/net/tcp{,6} 2>/dev/null) || true
    for ((attempt = 0; attempt < 1000; attempt++)); do
        # Below the ports of runs, and those that the kernel assigns itself: a restarted daemon gets its port again.
        base=$((10000 + RANDOM % 9000))
        # shellcheck disable=SC2046 # one word per port
        grep -qxF -f <(printf '%04X\n' $(seq "$base" $((base + $1 - 1)))) <<<"$used" && continue
        echo "$base"
        return
    done
    fail "found no $1 free neighbouring TCP ports from 10000 on"
}

write_state() {
    local i port
    mkdir -m 0711 -- "$state" "$state"/{dev,spool}
    shape >"$state/shape"
    mkdir -m 0700 -- "$state"/{controller,log}
    for ((i = 1; i <= nodes; i++)); do mkdir -m 0755 -- "$state/spool/n$i"; done
    # slurmd needs character devices, and anybody can make links to /dev/null.
    for ((i = 0; i < gpus; i++)); do ln -s /dev/null "$state/dev/nvidia$i"; done
    (umask 077 && head -c 128 /dev/urandom >"$state/munge.key" && chmod 0400 "$state/munge.key")
    port=$(free_ports $((nodes + 1)))
    write_configuration
}

write_configuration() {
    local key user host node_gres=''
    user=$(id -un) host=$(uname -n)
    {
        cat <<EOT
ClusterName=$name
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$user
SlurmdUser=$user
AuthInfo=socket=$socket,cred_expire=$requeue_delay
StateSaveLocation=$state/controller
SlurmdSpoolDir=$state/spool/%n
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd-%n.pid
SlurmctldLogFile=$state/log/slurmctld.log
SlurmdLogFile=$state/log/slurmd-%n.log

# Two clusters, also of the same second, give no job the same id: the ranks' port follows from it.
FirstJobId=$(((RANDOM << 15 | RANDOM) % 60000000 + 1))

EOT
        for key in $(sorted "${!SETTINGS[@]}"); do echo "$key=${SETTINGS[$key]}"; done
        echo
        if ((gpus)); then
            echo "GresTypes=gpu"
            node_gres=" Gres=gpu:h100:$gpus"
        fi
        echo "NodeName=n[1-$nodes] NodeHostname=${host%%.*} NodeAddr=127.0.0.1" \
            "Port=[$((port + 1))-$((port + nodes))] CPUs=256 RealMemory=2097152$node_gres"
        echo "PartitionName=gpu Nodes=ALL Default=YES MaxTime=7-00:00:00"
        echo "PartitionName=debug Nodes=ALL MaxTime=00:30:00"
    } >"$conf"
    ((!gpus)) ||
        echo "Name=gpu Type=h100 File=$state/dev/nvidia[0-$((gpus - 1))]" >"$state/gres.conf"
    # Slurm knows this value since 24.05, and without it asks for cgroups that a container lacks.
    if printf '24.05\n%s\n' "$(slurmd -V | grep -oE '[0-9]+\.[0-9]+' | head -n 1)" | sort -VC; then
        echo "CgroupPlugin=disabled" >"$state/cgroup.conf"
    fi
}
