"""A file that reserves space for the last record of a run that fills the disk.

Standard library only.
"""

import json
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
    """Replace the status; on a full disk by the reserve, which needs no new file and no space."""
    path, kept = run_dir / files.STATUS, run_dir / files.RESERVE
    try:
        files.write_json(path, status)
    except OSError as error:
        if error.errno not in OF_A_DISK:
            raise
        try:
            with kept.open("r+", encoding="utf-8") as file:
                file.write(json.dumps(status, indent=1) + "\n")
                file.truncate()
                file.flush()
                os.fsync(file.fileno())
            os.replace(kept, path)
        except OSError:
            # A copy-on-write filesystem needs new space for each change.
            kept.unlink(missing_ok=True)
            files.write_json(path, status)
    kept.unlink(missing_ok=True)


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
