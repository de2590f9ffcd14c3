"""The record of why a rank has ended, from which slurm/retry.py takes the cause of an attempt."""

import os
import socket
import time
from pathlib import Path
from typing import Any

from runspec import files


def write(
    folder: Path, rank: int, kind: str, message: str, *, permanent: bool, **more: Any
) -> None:
    """Write error_rank_<rank>.json.

    Args:
        folder: logs/<attempt> of the run.
        kind: class of the error, or what is wrong with a disk (runspec.storage.OF_A_DISK).
        permanent: a retry cannot fix it.
    """
    record = {
        "rank": rank,
        # Slurm's name of the node; the host may call itself something else.
        "host": os.environ.get("NODE_NAME") or socket.gethostname(),
        "time": time.time(),
        "type": kind,
        "message": message,
        "permanent": permanent,
        **more,
    }
    folder.mkdir(parents=True, exist_ok=True)
    files.write_json(folder / f"error_rank_{rank}.json", record)
