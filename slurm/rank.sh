#!/bin/bash
# torchrun starts this for each rank: it runs the command, with its output in the rank's own log and,
# marked with the rank, in the node's log.
log=$LOGS/rank_$RANK.log
keep() { tee -a "$log" | sed -u "s/^/[$RANK] /"; }
redact() { PYTHONPATH=$COOKBOOK python -P -m runspec.redact; }
# These must survive a signal to the whole step, or the rank's last lines would be lost.
exec > >(trap '' TERM INT HUP; if [ "${REDACT:-no}" = yes ]; then redact | keep; else keep; fi) 2>&1
exec "$@"
