#!/bin/bash
# What one process asks of a shared filesystem when it imports modules: imports.sh MICROSECONDS [MODULE...]
#
# The checkout with its virtual environment, and the Python that it was made with, are mounted over
# themselves by delayed.c, in a mount namespace of their own and with empty caches. Needs root, /dev/fuse,
# gcc and libfuse3-dev. Set SITE to measure the environment of another checkout.
set -euo pipefail
[ -n "${INSIDE:-}" ] || INSIDE=yes exec unshare -m --propagation private bash "$0" "$@"
delay_us=${1:?usage: imports.sh MICROSECONDS [MODULE...]} && shift
here=$(dirname "$(realpath "$0")") python=${SITE:-$(realpath "$here/../..")}/.venv/bin/python
work=$(mktemp -d)
read -ra flags <<<"$(pkg-config --cflags --libs fuse3)"
gcc -O2 -o "$work/delayed" "$here/delayed.c" "${flags[@]}"
base=$("$python" -c 'import sys; print(sys.base_prefix)') daemons=()
for folder in "${python%/.venv/*}" "$base"; do
  "$work/delayed" "$folder" "$work/log" "$delay_us" >/dev/null 2>&1 &
  daemons+=($!)
  for _ in {1..50}; do ! mountpoint -q "$folder" || break; sleep 0.1; done
done
trap 'kill "${daemons[@]}"; rm -rf "$work"' EXIT
: >"$work/log"
cd /
began=$(date +%s.%N)
env -u PYTHONDONTWRITEBYTECODE "$python" -c "import $(IFS=, && echo "${*:-torch}")"
ended=$(date +%s.%N)
awk -v s="$(bc <<<"$ended - $began")" '{ n[$1]++; bytes += $1 == "r" ? $2 : 0 } END {
  printf "%.1f s: %d opened, %d looked for, %d folders listed, %d reads of %.0f MB\n", s, n["o"], n["l"], n["d"], n["r"], bytes / 1e6 }' "$work/log"
