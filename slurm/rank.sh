#!/bin/bash
# torchrun starts this script for each rank, or a node for its command. It runs the command and writes
# its output to the rank's log and, prefixed with the rank, to the node's log.
# A command that torchrun does not start has no rank: its log has the node's number.
rank=${RANK:-$NODE_RANK}
log=$LOGS/rank_$rank.log
# A container may know its interpreter by another name.
python=${ENV_PYTHON:-python}
keep() { tee -a "$log" | sed -u "s/^/[$rank] /"; }
# These processes must survive a signal to the whole step, or the rank's last lines would be lost.
write() { trap '' TERM INT HUP; keep; }
# The command gets this process id; node.sh signals it.
[ -z "${STOP_SIGNAL:-}" ] || echo $$ >"$LOGS/.pid_${NODE_NAME}_$rank"
[ "$1" != python ] || set -- "$python" "${@:2}"
exec > >(write) 2>&1
exec "$@"
