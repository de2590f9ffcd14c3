#!/bin/bash
# torchrun starts this for each rank: it runs the command, with its output in the rank's own log and,
# marked with the rank, in the node's log.
log=$LOGS/rank_$RANK.log
# tee and sed must survive a signal to the whole step, or the rank's last lines would be lost.
exec > >(trap '' TERM INT HUP; tee -a "$log" | sed -u "s/^/[$RANK] /") 2>&1
exec "$@"
