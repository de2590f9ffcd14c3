"""The record of a fault, from which slurm/retry.py takes the cause of an attempt."""

import os
import socket
import time
from pathlib import Path
from typing import Any

from runspec import files


def fault(
    message: str,
    kind: str = "fault",
    host: str | None = "",
    permanent: bool = True,
    rank: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return the record of a fault that was found now.

    Args:
        kind: class of the error, or what is wrong with a disk (runspec.storage.OF_A_DISK).
        host: the node whose fault it is, None if it is no single one's; "" for this one.
        permanent: a retry cannot fix it.
        rank: the one that has ended by it.
    """
    # Slurm's name of the node; the host may call itself something else.
    here = os.environ.get("NODE_NAME") or socket.gethostname()
    return {
        "rank": rank,
        "host": here if host == "" else host,
        "time": time.time(),
        "type": kind,
        "message": message,
        "permanent": permanent,
        **more,
    }


def write(
    folder: Path, rank: int, kind: str, message: str, *, permanent: bool, **more: Any
) -> None:
    """Write the record of a rank's fault into logs/<attempt> of the run."""
    folder.mkdir(parents=True, exist_ok=True)
    record = fault(message, kind, permanent=permanent, rank=rank, **more)
    files.write_json(folder / f"error_rank_{rank}.json", record)
