#!/bin/bash
# torchrun starts this script for each rank. It runs the command and writes its output to the rank's log
# and, prefixed with the rank, to the node's log.
log=$LOGS/rank_$RANK.log
keep() { tee -a "$log" | sed -u "s/^/[$RANK] /"; }
redact() { PYTHONPATH=$COOKBOOK python -P -m runspec.redact; }
# These processes must survive a signal to the whole step, or the rank's last lines would be lost.
exec > >(trap '' TERM INT HUP; if [ "${REDACT:-no}" = yes ]; then redact | keep; else keep; fi) 2>&1
exec "$@"
