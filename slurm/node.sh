# shellcheck shell=bash
# Sourced on every node before torchrun: sets the environment, and checks within seconds that the
# node sees the shared files and reaches the first node. Needs RUN_DIR, VENV, LOGS, HEAD_ADDR,
# HEAD_PORT, ONE_HOST, NODES, RANKS_PER_NODE; sets NODE_RANK.

NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-0}}
NODE_NAME=${SLURMD_NODENAME:-$(hostname -s)}
export NODE_RANK NODE_NAME

# Leaves a fault where the job script finds it. permanent: true if a retry cannot help.
node_fault() {
  local permanent=$1 message=$2
  printf 'cookbook: fault on node %s: %s\n' "$NODE_NAME" "$message"
  message=${message//\\/\\\\}
  printf '{"rank": null, "host": "%s", "time": %s, "type": "fault", "message": "%s", "permanent": %s}\n' \
    "$NODE_NAME" "$(date +%s)" "${message//\"/\'}" "$permanent" >"$LOGS/error_node_$NODE_RANK.json"
  exit 1
}

# Exports a variable from a file, so that its value stands in no script, argument or log.
read_secret() {
  [ -r "$2" ] || node_fault true "node $NODE_NAME cannot read $2, which holds the secret $1: put it on a filesystem that all nodes mount"
  export "$1=$(<"$2")"
}

# On a network filesystem a file that the login node wrote a moment ago may appear seconds later.
for ((waited = 0; waited < ${FILES_WAIT_S:-30}; waited++)); do
  [ -r "$RUN_DIR/recipe.yaml" ] && [ -x "$VENV/bin/python" ] && break
  sleep 1
done
[ -d "$LOGS" ] || { printf 'cookbook: node %s cannot see %s\n' "$NODE_NAME" "$LOGS"; exit 1; }
[ -r "$RUN_DIR/recipe.yaml" ] ||
  node_fault true "node $NODE_NAME cannot read $RUN_DIR/recipe.yaml: keep runs on a filesystem that all nodes mount (COOKBOOK_ROOT)"
[ -x "$VENV/bin/python" ] ||
  node_fault true "node $NODE_NAME cannot see the virtual environment $VENV: put it on a filesystem that all nodes mount (COOKBOOK_VENV)"

export PATH=$VENV/bin:$PATH VIRTUAL_ENV=$VENV PYTHONUNBUFFERED=1 PYTHONNOUSERSITE=1
unset PYTHONHOME PYTHONPATH
# The kit's own code, from the checkout that submitted the run.
export PYTHONPATH=$COOKBOOK

# Every rank writes compiled kernels at once, which is too much for a network filesystem. This folder
# is on the local disk, outlives the attempt, and is used only if it belongs to this user.
local_cache=${TMPDIR:-/tmp}/cookbook-$(id -u)
mkdir -m 700 "$local_cache" 2>/dev/null
if [ ! -O "$local_cache" ] || [ -L "$local_cache" ]; then local_cache=$(mktemp -d); fi
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$local_cache/triton}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$local_cache/inductor}

# Needs a second at most, and names what makes this node unfit.
if [ "${NODE_CHECK:-yes}" = yes ]; then "$VENV/bin/python" -P -m slurm.ready || exit 1; fi

if [ -z "${OMP_NUM_THREADS:-}" ]; then
  OMP_NUM_THREADS=$((${SLURM_CPUS_PER_TASK:-$RANKS_PER_NODE} / RANKS_PER_NODE))
  export OMP_NUM_THREADS=$((OMP_NUM_THREADS > 1 ? OMP_NUM_THREADS : 1))
fi
# A collective that hangs ends the attempt, with the flight recorder's trace beside the logs.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000} TORCH_NCCL_DUMP_ON_TIMEOUT=1
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE=$LOGS/nccl_trace_rank_

if [ "$NODES" -gt 1 ]; then
  # Prints the interface that reaches the first node; says on standard error why none does.
  if ! interface=$("$VENV/bin/python" -I -S "$COOKBOOK/slurm/rendezvous.py" 2>"$LOGS/rendezvous_$NODE_RANK.log"); then
    node_fault false "$(tail -n 1 "$LOGS/rendezvous_$NODE_RANK.log")"
  fi
  cat "$LOGS/rendezvous_$NODE_RANK.log"
  # gloo would ask the host name for its address, which is 127.0.1.1 on many nodes.
  [ -z "$interface" ] || export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
else
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
fi

# Samples how busy the GPUs are; a node without them has no nvidia-smi.
if command -v nvidia-smi >/dev/null; then
  "$VENV/bin/python" -P -m slurm.gpu_use $$ >/dev/null 2>&1 </dev/null &
fi

# Does what the job script's watchdog asks for: has this node's ranks write their stacks, and ends them
# where srun cannot. torchrun takes the place of this shell, so its process id says when to end.
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
      # With its ranks gone, torchrun ends, too.
      signal_ranks KILL
      sleep 10
      kill -KILL $$
    fi
  done
}
obey_the_watchdog >/dev/null 2>&1 </dev/null &
