"""What can go wrong in a rank, and the record that a rank leaves of it.

TrainerError             a fault that the trainer understands
├── ConfigError          the user's to fix: config, paths, data, model folder
├── NonFiniteLossError   loss or gradient NaN or infinite too often in a row; exit status 65
├── BadNodeError         a GPU computes wrong numbers or is slow; the node is left out
├── CheckpointError      every checkpoint in the run directory is damaged
├── StorageError         files cannot be read for now, and may be sound
├── SupersededError      a newer start of the run has taken over
└── PeerError            another rank failed; its own record says why
"""

import errno
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runspec import failure, files
from runspec.redact import redacted
from runspec.storage import OF_A_DISK, is_of_storage, number_of

_OF_TORCH_DISTRIBUTED = ("DistBackendError", "DistNetworkError", "DistStoreError")


class TrainerError(Exception):
    """A fault that the trainer understands; `permanent` if a retry cannot help.

    `exit_status` is the rank's own; torchrun passes none on, so that the record must say it. An
    error with a `node` is that node's fault, or none's if it is None, and not the rank's node's.
    """

    permanent = True
    exit_status = 1


class ConfigError(TrainerError):
    """One or more faults in what the user gave; all of them, one per line."""

    def __init__(self, *faults: str) -> None:
        self.faults = faults
        super().__init__("\n".join(faults))


class NonFiniteLossError(TrainerError):
    """The loss or the gradient was NaN or infinite in too many steps in a row."""

    exit_status = 65


class BadNodeError(TrainerError):
    """A node is not fit for training; on another one the run may go on."""

    permanent = False


class CheckpointError(TrainerError):
    """No checkpoint can be trusted, and starting again at step 0 must be a person's choice."""


class StorageError(TrainerError):
    """Files of the run cannot be read for now; a later attempt may read them."""

    permanent = False


class SupersededError(TrainerError):
    """A newer start of the run has taken over: this one must write nothing more."""

    permanent = False


@dataclass(frozen=True)
class Fault:
    """What a rank tells the others of its error: `kind`, one line, and whether a retry can help."""

    type: str
    message: str
    permanent: bool

    @classmethod
    def of(cls, error: BaseException) -> "Fault":
        """Return the fault that an error is reported as."""
        return cls(kind(error), describe(error).splitlines()[0], is_permanent(error))


class PeerError(TrainerError):
    """Another rank failed while all ranks had to agree; as permanent as that rank's fault.

    Args:
        faults: those of the ranks that failed, by rank.
    """

    def __init__(self, faults: dict[int, Fault]) -> None:
        self.faults = faults
        self.permanent = any(fault.permanent for fault in faults.values())
        texts = "; ".join(f"rank {rank}: {fault.message}" for rank, fault in faults.items())
        super().__init__(f"another rank failed: {texts}")


def is_permanent(error: BaseException) -> bool:
    """True if the same start would fail again: user faults, memory, a full disk, a damaged file."""
    if is_of_storage(error):
        return False
    if isinstance(error, TrainerError):
        return error.permanent
    kinds = (
        MemoryError,
        FileNotFoundError,
        PermissionError,
        IsADirectoryError,
        files.DamagedFile,
    )
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, kinds):
        return True
    return number_of(error, OF_A_DISK) is not None


def describe(error: BaseException) -> str:
    """One clear sentence first, then the details if there are any."""
    text = str(error).strip() or type(error).__name__
    if kind(error) == "OutputError":
        return f"{text}: tee or sed, which slurm/rank.sh starts for the rank's log, was killed"
    if type(error).__name__ == "OutOfMemoryError":
        return (
            "GPU out of memory: lower batch_size, or set activation_checkpointing=full, "
            f"or use more GPUs.\n{text}"
        )
    return text if isinstance(error, TrainerError) else f"{type(error).__name__}: {text}"


def kind(error: BaseException) -> str:
    """Return the name of a fault, from which its cause follows: slurm/retry.py.

    That is the exception's own name, but for a full disk, a quota, storage that cannot be read, a
    reader of the rank's output that is gone, and a connection between ranks: gloo raises
    RuntimeError, NCCL one error for everything.
    """
    if is_of_storage(error):
        return StorageError.__name__
    if (full := number_of(error, OF_A_DISK)) is not None:
        return OF_A_DISK[full]
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        return "OutputError"
    name, text = type(error).__name__, str(error)
    if name in _OF_TORCH_DISTRIBUTED or (name == "RuntimeError" and "gloo/" in text):
        timed_out = "timed out" in text.lower() or "timeout" in text.lower()
        return "NetworkTimeout" if timed_out else "NetworkError"
    return name


def write_error_record(folder: Path, rank: int, error: BaseException) -> None:
    """Write `error_rank_<rank>.json` for whoever decides on a retry."""
    more: dict[str, Any] = {"traceback": redacted("".join(traceback.format_exception(error)))}
    if isinstance(error, TrainerError) and hasattr(error, "node"):
        more["of_node"] = error.node
    if isinstance(error, PeerError):
        # A rank whose disk is full may leave no record of its own.
        more["peers"] = [
            {"rank": peer, **asdict(fault), "message": redacted(fault.message)}
            for peer, fault in error.faults.items()
        ]
    message, permanent = redacted(describe(error)), is_permanent(error)
    failure.write(folder, rank, kind(error), message, permanent=permanent, **more)
