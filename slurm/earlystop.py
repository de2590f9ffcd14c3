"""Stops a run of a sweep that is clearly worse than the others: python -P -m slurm.earlystop PID

slurm/job.sh starts it beside each attempt of such a run, with RUN_DIR and SWEEP_DIR set. It reads
the metrics of all runs of the sweep; runspec/earlystop.py has the rule. A run that it stops saves a
checkpoint first. PID is srun, or without Slurm the process that starts the nodes. Standard library
only.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from runspec import files
from runspec.earlystop import KEYS, verdict
from runspec.states import process_start
from runspec.storage import patient_json
from slurm.history import read_lines


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the logged steps of a run, [] if there are none."""
    try:
        return read_lines(run_dir / files.METRICS)
    except OSError:
        return []


def stopped_before(run_dir: Path) -> bool:
    """Whether an earlier attempt was stopped early: a run that was resumed since then continues."""
    lines = read_lines(run_dir / files.ATTEMPTS)
    return any(line.get("cause") == "stopped_early" for line in lines)


def look(run_dir: Path, sweep_dir: Path, rule: dict[str, Any]) -> str:
    """Return the reason to stop the run, "" to continue."""
    own = rows(run_dir)
    if not own:
        return ""
    tasks = sorted((sweep_dir / files.TASKS).iterdir())
    others = [rows(task) for task in tasks if task.resolve() != run_dir.resolve()]
    return verdict(own, others, rule)


def main() -> None:
    run_dir, sweep_dir = Path(os.environ["RUN_DIR"]), Path(os.environ["SWEEP_DIR"])
    rule = (patient_json(sweep_dir / files.SWEEP) or {}).get("early_stop")
    if not isinstance(rule, dict) or stopped_before(run_dir):
        return
    pid = int(sys.argv[1])
    every_s = float({**KEYS, **rule}["every_s"])
    while process_start(pid) is not None:
        time.sleep(every_s)
        if reason := look(run_dir, sweep_dir, rule):
            # The reason first: it must be written before the ranks have stopped.
            files.write_json(run_dir / files.EARLY_STOP, {"message": reason, "time": time.time()})
            (run_dir / files.STOP).touch()
            return


if __name__ == "__main__":
    main()
