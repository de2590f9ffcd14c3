"""The files of a run directory by name, and how they are read and written.

A file is written under a temporary name, flushed to the disk and renamed: a reader, or a crash,
sees the old content or the new one, never a part.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runspec import storage

# What the launcher writes before the job is submitted.
RECIPE = "recipe.yaml"
TRAIN = "train.yaml"
PARAMETERS = "parameters.yaml"
JOB_SCRIPT = "job.sbatch"
PROVENANCE = "provenance.json"
SUBMISSION = "submission.json"
CODE = "code"  # a copy of the user's script tree
ENGINE = "engine.json"  # where another trainer keeps its progress: runspec/engines.py
KIT = "kit"  # a link to the copy of the kit's own code that the run uses
LOCK = ".lock"
# What the launcher tells a job that is running.
CANCELLED = "cancelled.json"
STOP = ".stop"
# What the job script and its attempt record write.
ATTEMPTS = "attempts.jsonl"
STATUS = "status.json"
LOGS = "logs"
LATEST_LOGS = "logs/latest"
JOB_LOG = "logs/job.log"
# Inside logs/<attempt>: the trainer's sign of life, the stacks of its ranks, and who asks for them.
HEARTBEAT = "heartbeat.json"
STACKS = "stack_rank_{}.log"
ASK_FOR_STACKS = ".ask_for_stacks"
END_RANKS = ".end_ranks"
# Inside logs/<attempt>: the process above its command, and the command's exit status.
CHILD = ".child.json"
EXIT_STATUS = ".exit_status"
# What the trainer writes.
PROGRESS = "progress.json"
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
PROFILE = "profile"
CHECKPOINTS = "checkpoints"
# Beside the runs: tokenised data that they share.
DATA_CACHE = ".data_cache"
EXPORT = "export"
ADAPTER = "adapter"
EVALS = "evals"
SHARDS = "shards"  # of an evaluation, in its EVALS
SERVED = "served.json"  # of a replica: the minutes for which it has been ready
# Inside checkpoints/step_<n>: the folder counts only with the marker.
CHECKPOINT_STATE = "trainer_state.json"
CHECKPOINT_MANIFEST = "manifest.json"
CHECKPOINT_COMPLETE = "COMPLETE"
# What begins so is being written.
TEMPORARY = ".tmp-"
_CHECKPOINT = re.compile(r"step_(0|[1-9]\d*)")


def checkpoint_folders(folder: Path) -> list[int]:
    """Return the steps in the names of a folder of checkpoints, ascending, complete or not.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for match in map(_CHECKPOINT.fullmatch, names) if match)


def checkpoint_steps(run_dir: Path) -> list[int]:
    """Return the steps of the complete checkpoints, ascending.

    Raises:
        OSError: the folder cannot be read.
        DamagedFile: engine.json does not hold an object.
    """
    folder = run_dir / CHECKPOINTS
    if (given := read_object(run_dir / ENGINE)) is not None:
        from runspec.engines import Records  # few runs are another trainer's

        if (engine := Records.of(given)) is not None:
            return engine.steps(folder)
    steps = checkpoint_folders(folder)
    return [n for n in steps if os.path.exists(folder / f"step_{n}" / CHECKPOINT_COMPLETE)]


def write_text(path: Path, text: str, mode: int | None = None) -> None:
    """Replace path by text, atomically.

    Args:
        mode: the file's permissions; None leaves them to the process's umask.
    """
    with replacing(path) as temporary, open(temporary, "x", encoding="utf-8") as file:
        if mode is not None:
            os.fchmod(file.fileno(), mode)
        file.write(text)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the name of a file to write, which replaces path if the block succeeds, atomically."""
    temporary = beside(path)
    try:
        yield temporary
        fsync_path(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def beside(path: Path) -> Path:
    """Return a new name beside path, for what is to be renamed to it."""
    return path.with_name(f"{TEMPORARY}{path.name}.{os.urandom(4).hex()}")


def write_json(path: Path, value: Any, mode: int | None = None) -> None:
    """Replace path by value as indented JSON, atomically."""
    write_text(path, json_text(value), mode)


def renew_json(path: Path, value: Any, mode: int | None = None) -> None:
    """Replace path by value; on a full disk in place, in the space that the file has.

    Then a reader, or a crash, may see a part of it: for what is written again soon, or last.

    Raises:
        OSError: it cannot be written, or it is new and the disk is full.
    """
    try:
        write_json(path, value, mode)
    except OSError as error:
        if error.errno not in storage.OF_A_DISK:
            raise
        with open(path, "r+b", buffering=0) as file:
            text = json_text(value).encode().ljust(os.fstat(file.fileno()).st_size)
            if file.write(text) < len(text):
                raise


def json_text(value: Any) -> str:
    """Return value as write_json writes it."""
    return json.dumps(value, indent=1) + "\n"


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"a number has more than {_DIGITS} digits")
    return int(digits)


def _no_json(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


_DIGITS = 300
_TAIL_BYTES = 8192
_DECODER = json.JSONDecoder(parse_int=_integer)
_STRICT = json.JSONDecoder(parse_int=_integer, parse_constant=_no_json)


class DamagedFile(ValueError):
    """A file was read and does not hold JSON."""


def parse_json(text: str | bytes, strict: bool = False) -> Any:
    """Return the value of a JSON text.

    Args:
        strict: refuse NaN and Infinity, which Python writes and JSON does not have.

    Raises:
        ValueError: it is not JSON, nested deeper than Python can read, or has a number that no
            float holds.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    try:
        return (_STRICT if strict else _DECODER).decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path | str) -> Any:
    """Return the JSON value in a file, None if and only if there is no file.

    Raises:
        OSError: the file cannot be read, and may be sound: runspec/storage.py reads it again.
        DamagedFile: the file does not hold JSON.
    """
    try:
        return parse_json(Path(path).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DamagedFile(f"{path} does not hold JSON: {error}") from error


def read_object(path: Path | str) -> dict[str, Any] | None:
    """Return the JSON object in a file, None if and only if there is no file.

    Raises:
        OSError: the file cannot be read, and may be sound.
        DamagedFile: the file does not hold a JSON object.
    """
    value = read_json(path)
    if value is not None and not isinstance(value, dict):
        raise DamagedFile(f"{path} does not hold a JSON object")
    return value


def patient_json(path: Path) -> dict[str, Any] | None:
    """Return read_object(path), tried again while the storage cannot be read.

    Raises:
        OSError: it could not be read in all that time.
        DamagedFile: the file does not hold a JSON object.
    """
    return storage.patiently(read_object, path)


def peek(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file as far as it can be seen now, {} if it cannot.

    For what is shown, and what is looked at again in a moment. It does not say that there is no
    file: whoever decides by that calls read_object.
    """
    try:
        return read_object(path) or {}
    except (OSError, DamagedFile):
        return {}


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return one object per line, [] if there is no file; any other line is left out."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    objects = map(_object_of, text.splitlines())
    return [each for each in objects if each is not None]


def last_json_line(path: Path) -> dict[str, Any]:
    """Return the last whole object of a JSON lines file, {} if its last bytes have none."""
    try:
        with open(path, "rb", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).splitlines()
    except FileNotFoundError:
        return {}
    return next(filter(None, map(_object_of, reversed(lines))), {})


def _object_of(line: str | bytes) -> dict[str, Any] | None:
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def append_json_line(path: Path, value: Any) -> None:
    """Add one line to a JSON lines file and flush it to the disk.

    A line before it that was cut short stays a line of its own, which readers leave out.
    """
    with open(path, "ab+") as file:
        size = file.seek(0, os.SEEK_END)
        torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
        file.write(b"\n" * torn + json.dumps(value).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def fsync_path(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
