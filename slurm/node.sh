# shellcheck shell=bash
# Sourced on every node before torchrun. Sets the environment, and checks within seconds that the
# node can read the shared files and reach the first node. Needs RUN_DIR, VENV, LOGS, HEAD_ADDR,
# HEAD_PORT, ONE_HOST, NODES, RANKS_PER_NODE; sets NODE_RANK.

NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-0}}
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
for ((waited = 0; waited < ${FILES_WAIT_S:-30}; waited++)); do
  [ -r "$given" ] && [ -x "$VENV/bin/python" ] && break
  sleep 1
done
[ -d "$LOGS" ] || { printf 'cookbook: node %s cannot see %s\n' "$NODE_NAME" "$LOGS"; exit 1; }
# Earlier attempts found these files, so in later ones the storage or this node's mount has failed.
first=false
[ "${ATTEMPT:-0}" != 0 ] || first=true
[ -r "$given" ] ||
  node_fault $first "node $NODE_NAME cannot read $given: keep runs on a filesystem that all nodes mount (COOKBOOK_ROOT)"
[ -x "$VENV/bin/python" ] ||
  node_fault $first "node $NODE_NAME cannot see the virtual environment $VENV: put it on a filesystem that all nodes mount (COOKBOOK_VENV)"

export PATH=$VENV/bin:$PATH VIRTUAL_ENV=$VENV PYTHONUNBUFFERED=1 PYTHONNOUSERSITE=1
unset PYTHONHOME PYTHONPATH
# The kit's code, from the checkout that submitted the run.
export PYTHONPATH=$COOKBOOK

# All ranks write compiled kernels at the same time, which is too much for a network filesystem. This
# folder is on the local disk, is kept after the attempt, and is used only if this user owns it.
local_cache=${TMPDIR:-/tmp}/cookbook-$(id -u)
mkdir -m 700 "$local_cache" 2>/dev/null
if [ ! -O "$local_cache" ] || [ -L "$local_cache" ]; then local_cache=$(mktemp -d); fi
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$local_cache/triton}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$local_cache/inductor}

# Takes at most a second, and reports why this node is unhealthy.
if [ "${NODE_CHECK:-yes}" = yes ]; then "$VENV/bin/python" -P -m slurm.ready || exit 1; fi

if [ -z "${OMP_NUM_THREADS:-}" ]; then
  OMP_NUM_THREADS=$((${SLURM_CPUS_PER_TASK:-$RANKS_PER_NODE} / RANKS_PER_NODE))
  export OMP_NUM_THREADS=$((OMP_NUM_THREADS > 1 ? OMP_NUM_THREADS : 1))
fi
# A collective that hangs ends the attempt. The flight recorder's trace is written next to the logs.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000} TORCH_NCCL_DUMP_ON_TIMEOUT=1
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE=$LOGS/nccl_trace_rank_

if [ "$NODES" -gt 1 ]; then
  # Prints the interface that reaches the first node, or an error on stderr if none does.
  if ! interface=$("$VENV/bin/python" -I -S "$COOKBOOK/slurm/rendezvous.py" 2>"$LOGS/rendezvous_$NODE_RANK.log"); then
    node_fault false "$(tail -n 1 "$LOGS/rendezvous_$NODE_RANK.log")"
  fi
  cat "$LOGS/rendezvous_$NODE_RANK.log"
  # gloo would resolve the host name, which is 127.0.1.1 on many nodes.
  [ -z "$interface" ] || export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
else
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
fi

# Samples the utilization of the GPUs. A node without GPUs has no nvidia-smi.
if command -v nvidia-smi >/dev/null; then
  "$VENV/bin/python" -P -m slurm.gpu_use $$ >/dev/null 2>&1 </dev/null &
fi

# Handles requests of the job script's watchdog: makes this node's ranks write their stacks, and kills
# them if srun cannot. torchrun replaces this shell, so the loop ends when this process id is gone.
signal_ranks() {
  local file node pid
  for file in "$LOGS"/stack_rank_*.log; do
    read -r node pid <"$file" && [ "$node" = "$NODE_NAME" ] && kill "-$1" "$pid"
  done
}
obey_the_watchdog() {
  local asked=''
  while sleep 2 && kill -0 $$; do
    if [ -z "$asked" ] && [ -e "$LOGS/.ask_for_stacks" ]; then
      asked=yes
      signal_ranks USR2
    elif [ -e "$LOGS/.end_ranks" ]; then
      # Without its ranks, torchrun exits.
      signal_ranks KILL
      sleep 10
      kill -KILL $$
    fi
  done
}
obey_the_watchdog >/dev/null 2>&1 </dev/null &
