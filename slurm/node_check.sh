# shellcheck shell=bash
# Run by `cookbook doctor` on a node and passed as text: it must work even if the node sees none of
# the kit's files. Each answer is a line "@ key value"; everything else is ignored.
# Needs SHARED, VENV, COOKBOOK, MEASURES (yes or no), RANKS_PER_NODE, ACCELERATOR.

report() { printf '@ %s\n' "$*"; }

# Milliseconds since the epoch.
now_ms() { date +%s%3N; }

check_files() {
  # On a network filesystem a new file may need some seconds to show here.
  local waited
  for ((waited = 0; waited < 10; waited++)); do
    [ -r "$SHARED/from_login" ] && break
    sleep 0.5
  done
  if [ -r "$SHARED/from_login" ]; then report shared_read yes; else report shared_read no; fi
  if { printf 'seen' >"$SHARED/from_$NODE_NAME"; } 2>/dev/null; then report shared_write yes; else report shared_write no; fi
  if [ -r "$COOKBOOK/slurm/node.sh" ]; then report checkout yes; else report checkout no; fi
}

# An import takes seconds on a network filesystem: if nothing is measured the packages are only searched for.
check_python() {
  local program answer started
  if [ ! -x "$VENV/bin/python" ]; then
    report python missing
    return
  fi
  if [ "$MEASURES" = yes ]; then
    program='import torch, torchtune
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
print("torch", torch.__version__, "sees", gpus, "GPUs")'
  else
    program='import importlib.util, sys
missing = [name for name in ("torch", "torchtune") if importlib.util.find_spec(name) is None]
print("missing " + " ".join(missing) if missing else "finds torch and torchtune")'
  fi
  started=$(now_ms)
  # cd: Python searches the current folder before its packages.
  answer=$(cd / && PYTHONNOUSERSITE=1 "$VENV/bin/python" -c "$program" 2>&1) || answer="fault ${answer##*$'\n'}"
  report python "$("$VENV/bin/python" -I -S -c 'import platform; print(platform.python_version())' 2>&1 | tail -n 1)"
  # Packages may warn before it.
  report packages "${answer##*$'\n'}"
  report import_ms $(($(now_ms) - started))
}

check_gpus() {
  report gpus_given "${SLURM_GPUS_ON_NODE:-0}"
  if ! command -v nvidia-smi >/dev/null; then
    report gpu_tool none
    return
  fi
  local line output query=index,name,memory.total,driver_version,ecc.errors.uncorrected.volatile.total
  if ! output=$(timeout 20 nvidia-smi --query-gpu=$query --format=csv,noheader,nounits 2>&1); then
    report gpu_tool "fault $(tail -n 1 <<<"$output")"
    return
  fi
  report gpu_tool nvidia-smi
  while read -r line; do [ -z "$line" ] || report gpu "$line"; done <<<"$output"
}

check_network() {
  local folder name state
  for folder in /sys/class/net/*; do
    name=${folder##*/} state=$(cat "$folder/operstate" 2>/dev/null)
    # lo says unknown; so do some virtual ones, which are up.
    [ "$name" = lo ] || report interface "$name ${state:-unknown}"
  done
  for folder in /sys/class/infiniband/*/ports/*; do
    [ -r "$folder/state" ] || continue
    name=${folder#/sys/class/infiniband/}
    report infiniband "${name%%/*} $(sed 's/^.*: //' "$folder/state") $(cat "$folder/rate" 2>/dev/null)"
  done
}

# Runs a program on the ranks of this node, with the variables of a training job.
on_ranks() ( # seconds folder program...
  local limit_s=$1
  export RUN_DIR=$2 LOGS=$2/logs/0 ATTEMPT=0 COOKBOOK_ATTEMPT=0 HEAD_ADDR=localhost HEAD_PORT ONE_HOST=yes NODES=1
  export RANKS_PER_NODE VENV COOKBOOK FILES_WAIT_S=5
  shift 2
  mkdir -p "$LOGS"
  HEAD_PORT=$(PYTHONPATH=$COOKBOOK "$VENV/bin/python" -S -P -c "from slurm.rendezvous import port_of; print(port_of('$SLURM_JOB_ID', 0))") || return 1
  # shellcheck source=slurm/node.sh
  source "$COOKBOOK/slurm/node.sh"
  timeout --kill-after=10 "$limit_s" python -P -m torch.distributed.run --nproc-per-node="$RANKS_PER_NODE" \
    --rdzv-backend=static --master-addr="$HEAD_ADDR" --master-port="$HEAD_PORT" --max-restarts=0 "$@"
)

NODE_NAME=${SLURMD_NODENAME:-$(hostname -s)}
report node "$NODE_NAME"
check_network
check_gpus
check_files
check_python
if [ "$MEASURES" = yes ]; then
  if answer=$(on_ranks 120 "$SHARED" "$COOKBOOK/slurm/all_reduce.py" "$ACCELERATOR" 2>&1); then
    grep '^@ ' <<<"$answer"
  else
    report all_reduce_fault "$(grep -v '^ *$' <<<"$answer" | grep -m 1 -E 'fault on node|Error|error' || tail -n 1 <<<"$answer")"
  fi
fi
report finished yes
