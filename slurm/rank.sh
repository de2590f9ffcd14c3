#!/bin/bash
# Started by torchrun for each rank: runs the command with its output in the rank's own log, and,
# marked with the rank, in the node's.
log=$LOGS/rank_$RANK.log
# The copies must outlive a signal to the whole step, or the rank's last words would be lost.
exec > >(trap '' TERM INT HUP; tee -a "$log" | sed -u "s/^/[$RANK] /") 2>&1
exec "$@"
