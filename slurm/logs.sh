# shellcheck shell=bash
# Logs of a large run (KEEP_LOGS is failing): the first node's are on the shared filesystem. Those of the
# others are on their own disks, in files of limited size, and are copied when a node has failed.
# Sourced by slurm/node.sh. As a program, on each node: the end of an attempt.

# How many nodes' logs are copied at most: a fault of the network ends all of them.
copied_nodes=16

# Writes its input to a file of which the last RING_BYTES at least are kept, and twice that at most.
ring() { # file
  local bytes=${RING_BYTES:-8388608}
  while : >"$1"; stdbuf -o0 head -c "$bytes" >>"$1"; [ "$(stat -c %s "$1")" -ge "$bytes" ]; do
    mv -f "$1" "$1.old"
  done
}

# Whether a fault began on this node, and not with what it was told by others.
node_failed() { # its log
  local rank record
  grep -qE 'exitcode +: -[0-9]+ .*\(SIG(KILL|SEGV|ABRT|BUS|FPE|ILL)\)' "$1" && return
  [ ! -e "$LOGS/error_node_$NODE_RANK.json" ] || return 0
  for ((rank = NODE_RANK * RANKS_PER_NODE; rank < (NODE_RANK + 1) * RANKS_PER_NODE; rank++)); do
    record=$LOGS/error_rank_$rank.json
    [ ! -e "$record" ] || grep -qE '"type": "(PeerError|NetworkError|NetworkTimeout)"' "$record" || return 0
  done
  # A script of the user's own leaves no records.
  ! compgen -G "$LOGS/error_*.json" >/dev/null && grep -q '^Traceback\|^\[[0-9]*\] Traceback' "$1"
}

# Copies this node's log, and from it those of its ranks.
copy_logs() { # its log
  local rank
  [ -r "$1" ] && node_failed "$1" || return 0
  (($(compgen -G "$LOGS/node_*.log" | wc -l) <= copied_nodes)) || return 0
  { [ ! -r "$1.old" ] || cat "$1.old"; cat "$1"; } >"$LOGS/.node_$NODE_RANK.tmp" &&
    mv "$LOGS/.node_$NODE_RANK.tmp" "$LOGS/node_$NODE_RANK.log"
  for ((rank = NODE_RANK * RANKS_PER_NODE; rank < (NODE_RANK + 1) * RANKS_PER_NODE; rank++)); do
    sed -n "s/^\[$rank\] //p" "$LOGS/node_$NODE_RANK.log" >"$LOGS/rank_$rank.log"
  done
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  NODE_RANK=$SLURM_PROCID
  copy_logs "${TMPDIR:-/tmp}/cookbook-$(id -u)/logs/$SLURM_JOB_ID.$ATTEMPT.$NODE_RANK"
fi
