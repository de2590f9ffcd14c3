# shellcheck shell=bash
# Run by `cookbook doctor` on a node and passed as text: it must work even if the node sees none of
# the kit's files. Each answer is a line "@ key value"; everything else is ignored.
# Needs SHARED, VENV and COOKBOOK.

report() { printf '@ %s\n' "$*"; }

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

# An import takes seconds on a network filesystem: the packages are only searched for.
check_python() {
  local program answer
  if [ ! -x "$VENV/bin/python" ]; then
    report python missing
    return
  fi
  program='import importlib.util
missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
print("missing " + " ".join(missing) if missing else "finds torch and transformers")'
  # cd: Python searches the current folder before its packages.
  answer=$(cd / && PYTHONNOUSERSITE=1 "$VENV/bin/python" -c "$program" 2>&1) || answer="fault ${answer##*$'\n'}"
  report python "$("$VENV/bin/python" -I -S -c 'import platform; print(platform.python_version())' 2>&1 | tail -n 1)"
  # Packages may warn before it.
  report packages "${answer##*$'\n'}"
}

check_gpus() {
  if ! command -v nvidia-smi >/dev/null; then
    report gpu_tool none
    return
  fi
  local line output query=name,memory.total,driver_version
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

NODE_NAME=${SLURMD_NODENAME:-$(hostname -s)}
report node "$NODE_NAME"
check_network
check_gpus
check_files
check_python
report finished yes
