"""What a process that prepares data needs of its job: settings, memory, an end by TERM, faults."""

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plugins.data.errors import DataError
from runspec import failure, yamlrules

# Longer than an end takes, and less than Slurm's KillWait of 30 s.
AGAIN_S = 20.0


def load(settings: Path) -> Mapping[str, Any]:
    """Return the settings that cookbook prepare has written."""
    import yaml

    text = settings.read_text(encoding="utf-8")
    loaded: Mapping[str, Any] = yaml.load(text, Loader=yamlrules.loader(yaml))
    return loaded


def memory_bytes() -> int:
    """Return the memory of this node, or the job's share of it."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    given = os.environ.get("SLURM_MEM_PER_NODE", "")
    return min(whole, int(given) * 2**20) if given.isdigit() and int(given) else whole


def stop(number: int, frame: Any) -> None:
    """Handle a signal: the exit runs every finally block.

    Python drops it if the signal came in a destructor, or in a callback of a library: then it is
    raised again.
    """
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)
    sys.exit(128 + signal.SIGTERM)


def leave_fault(error: DataError, logs: Path, rank: int) -> None:
    """Write the record of a fault for the job script; a retry cannot fix it."""
    failure.write(logs, rank, "DataError", error.faults[0], permanent=True)
