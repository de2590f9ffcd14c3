"""A file that reserves space for the last record of a run that fills the disk.

Standard library only.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from runspec import files
from runspec.storage import OF_A_DISK
from slurm.faults import no_space

# Enough for the records and the last lines of the log.
_BYTES = 65536


def keep(run_dir: Path) -> None:
    """Create the file."""
    with suppress(OSError):
        (run_dir / files.RESERVE).write_bytes(b"0" * _BYTES)


def write_status(run_dir: Path, status: dict[str, Any]) -> None:
    """Replace the status; on a full disk in the space of the reserve."""
    try:
        files.write_json(run_dir / files.STATUS, status)
    except OSError as error:
        if error.errno not in OF_A_DISK:
            raise
        (run_dir / files.RESERVE).unlink(missing_ok=True)
        files.write_json(run_dir / files.STATUS, status)
    (run_dir / files.RESERVE).unlink(missing_ok=True)


def fault(run_dir: Path) -> dict[str, Any] | None:
    """Return the record of a full disk, None if it has space."""
    probe = run_dir / f".probe.{os.getpid()}"
    try:
        with probe.open("xb", buffering=0) as file:
            file.write(b"0" * _BYTES)
    except OSError as error:
        # An empty new file needs an inode only.
        return no_space(run_dir, not probe.exists()) if error.errno in OF_A_DISK else None
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return None
