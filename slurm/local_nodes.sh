#!/bin/bash
# In place of srun, without Slurm: runs a command for each node of a job, as processes of this host.
# The first one that fails ends the others. Needs NODES and LOGS.
pids=() failed=0
trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM
for ((node = 0; node < NODES; node++)); do
  NODE_RANK=$node "$@" >>"$LOGS/node_$node.log" 2>&1 </dev/null &
  pids+=($!)
done
while [ -n "$(jobs -pr)" ]; do
  wait -n || kill -TERM "${pids[@]}" 2>/dev/null
done
# The status of the first node that failed.
for pid in "${pids[@]}"; do
  wait "$pid"
  rc=$?
  [ $failed != 0 ] || failed=$rc
done
exit "$failed"
