# shellcheck shell=bash
# Sourced on every node before its ranks. Sets the environment, and checks within seconds that the
# node can read the shared files and reach the first node. Needs RUN_DIR, VENV, LOGS, HEAD_ADDR,
# HEAD_PORT, ONE_HOST, NODES, RANKS_PER_NODE; sets NODE_RANK.

NODE_RANK=${NODE_RANK:-${SLURM_PROCID:-0}}
NODE_NAME=${SLURMD_NODENAME:-$(hostname -s)}
export NODE_RANK NODE_NAME

# Writes a fault to a file for the job script. permanent: true if a retry cannot help.
node_fault() {
  local permanent=$1 message=$2
  printf 'cookbook: fault on node %s: %s\n' "$NODE_NAME" "$message"
  message=${message//\\/\\\\}
  printf '{"rank": null, "host": "%s", "time": %s, "type": "fault", "message": "%s", "permanent": %s}\n' \
    "$NODE_NAME" "$(date +%s)" "${message//\"/\'}" "$permanent" >"$LOGS/error_node_$NODE_RANK.json"
  exit 1
}

# Exports a variable from a file, so that its value is in no script, argument or log.
read_secret() {
  [ -r "$2" ] || node_fault true "node $NODE_NAME cannot read $2, which holds the secret $1: put it on a filesystem that all nodes mount"
  export "$1=$(<"$2")"
}

# On a network filesystem, a file that the login node has just written may appear seconds later.
# The ranks need no other file of the run.
given=${COOKBOOK_PARAMETERS:-$RUN_DIR/train.yaml}
# The ranks' own interpreter, if it is on the host.
own=
case ${ENV_IN_IMAGE:-}${ENV_PYTHON:-} in /*) own=$ENV_PYTHON ;; esac
for ((waited = 0; waited < ${FILES_WAIT_S:-30}; waited++)); do
  [ -r "$given" ] && [ -x "$VENV/bin/python" ] && [ -x "${own:-/bin/sh}" ] && break
  sleep 1
done
[ -d "$LOGS" ] || { printf 'cookbook: node %s cannot see %s\n' "$NODE_NAME" "$LOGS"; exit 1; }
# Earlier attempts found these files, so in later ones the storage or this node's mount has failed.
first=false
[ "${COOKBOOK_ATTEMPT:-0}" != 0 ] || first=true
[ -r "$given" ] ||
  node_fault $first "node $NODE_NAME cannot read $given: keep runs on a filesystem that all nodes mount (COOKBOOK_ROOT)"
[ -x "$VENV/bin/python" ] ||
  node_fault $first "node $NODE_NAME cannot see the virtual environment $VENV: put it on a filesystem that all nodes mount (COOKBOOK_VENV)"

[ -x "${own:-/bin/sh}" ] ||
  node_fault $first "node $NODE_NAME cannot see $own, the Python of ${ENV_TITLE:-the environment}: put it on a filesystem that all nodes mount; if it was removed, cookbook resume ${RUN_DIR##*/} builds it again"

# A folder on the local disk, which is kept after the attempt and used only if this user owns it.
local_folder=${TMPDIR:-/tmp}/cookbook-$(id -u)
mkdir -m 700 "$local_folder" 2>/dev/null
if [ ! -O "$local_folder" ] || [ -L "$local_folder" ]; then local_folder=$(mktemp -d); fi

export PATH=$VENV/bin:$PATH VIRTUAL_ENV=$VENV PYTHONUNBUFFERED=1 PYTHONNOUSERSITE=1
# The interpreter of another environment, if it is on the host (slurm/environment.sh).
if [ -n "$own" ]; then PATH=${own%/*}:$PATH && unset VIRTUAL_ENV; fi
unset PYTHONHOME PYTHONPATH
# The kit's code, from the checkout that submitted the run.
export PYTHONPATH=$COOKBOOK

# The first node's store holds a socket of each rank, and a rank those of its peers.
[ "$(ulimit -Sn)" = unlimited ] || [ "$(ulimit -Sn)" -ge 65536 ] || ulimit -Sn 65536 2>/dev/null || ulimit -Sn "$(ulimit -Hn)"

# gloo would connect each rank to all others before the first message, in each group. As few talk to each
# other, large runs connect when they do.
if ((NODES > 16)); then export TORCH_GLOO_LAZY_INIT=${TORCH_GLOO_LAZY_INIT:-1}; fi

# All ranks write compiled kernels at the same time, which is too much for a network filesystem.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$local_folder/triton}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$local_folder/inductor}

# Takes at most a second, and reports why this node is unhealthy.
if [ "${NODE_CHECK:-yes}" = yes ]; then "$VENV/bin/python" -P -m slurm.ready || exit 1; fi

# Without Slurm the nodes are processes on this host. nproc would return OMP_NUM_THREADS if that is set.
cpus=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-$(($(env -u OMP_NUM_THREADS nproc) / NODES))}}
cpus=$((cpus > RANKS_PER_NODE ? cpus / RANKS_PER_NODE : 1))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cpus}
# torch starts as many compilers for each rank as the node has CPUs (32 at most).
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-$cpus}
# Rows of experts change with each batch: fixed segments would leave gaps that fit none of them.
if [ -z "${PYTORCH_ALLOC_CONF:-}${PYTORCH_CUDA_ALLOC_CONF:-}${PYTORCH_HIP_ALLOC_CONF:-}" ]; then
  export PYTORCH_ALLOC_CONF=expandable_segments:True
fi
# torch's flight recorder keeps each rank's last collectives, which NCCL writes at its own timeout.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000} TORCH_NCCL_DUMP_ON_TIMEOUT=1
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE=$LOGS/nccl_trace_rank_

if [ "$NODES" -gt 1 ]; then
  # Prints the address from which this node reaches the first one, or why it does not.
  if ! address=$("$VENV/bin/python" -I -S "$COOKBOOK/slurm/rendezvous.py"); then
    node_fault false "${address:-node $NODE_NAME could not look for the first node: see its log}"
  fi
  # gloo would resolve the host name, which is 127.0.1.1 on many nodes.
  interface=$(PATH=$PATH:/usr/sbin:/sbin ip -oneline address show to "$address" | awk '{print $2; exit}')
  [ -z "$interface" ] || export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
else
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
fi

# Handles requests of the supervisor (slurm/watchdog.py): makes this node's ranks write their stacks, and kills
# them if srun cannot. What starts the ranks replaces this shell, so the loop ends when this process id is gone.
signal_ranks() {
  local rank pid
  for ((rank = NODE_RANK * RANKS_PER_NODE; rank < (NODE_RANK + 1) * RANKS_PER_NODE; rank++)); do
    read -r _ pid <"$LOGS/stack_rank_$rank.log" && kill "-$1" "$pid"
  done
}
# Asks this node's ranks of another trainer to save and stop, if a signal does that.
ask_ranks() {
  local file pid
  for file in "$LOGS/.pid_${NODE_NAME}_"*; do
    read -r pid <"$file" && kill "-$STOP_SIGNAL" "$pid"
  done
}
obey_the_supervisor() {
  local asked='' stopped=''
  while sleep 2 && kill -0 $$; do
    if [ -n "${STOP_SIGNAL:-}" ] && [ -z "$stopped" ] && [ -e "$RUN_DIR/.stop" ]; then
      stopped=yes
      ask_ranks
    fi
    if [ -z "$asked" ] && [ -e "$LOGS/.ask_for_stacks" ]; then
      asked=yes
      signal_ranks USR2
    elif [ -e "$LOGS/.end_ranks" ]; then
      # Without its ranks, what started them exits.
      signal_ranks KILL
      sleep 10
      kill -KILL $$
    fi
  done
}
obey_the_supervisor >/dev/null 2>&1 </dev/null &
