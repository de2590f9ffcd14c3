"""The files of a run directory by name, and how they are read and written.

A file is written under a temporary name, flushed to the disk and renamed: a reader, or a crash,
sees the old content or the new one, never a part.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

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
RESERVE = ".reserve"  # space that is freed for the last word when the disk is full
LOGS = "logs"
LATEST_LOGS = "logs/latest"
JOB_LOG = "logs/job.log"
REHEARSAL = "rehearsal.md"  # the page of cookbook doctor --rehearse, in a folder of its own
# Inside logs/<attempt>: the trainer's sign of life, the stacks of its ranks, and who asks for them.
HEARTBEAT = "heartbeat.json"
STACKS = "stack_rank_{}.log"
FLIGHT = "flight_rank_{}.json"
ASK_FOR_STACKS = ".ask_for_stacks"
END_RANKS = ".end_ranks"
# Inside logs/<attempt>: how busy each node's GPUs were.
GPU_USE = "gpus_node_{}.jsonl"
# What the trainer writes.
PROGRESS = "progress.json"
DATA_SETTINGS = "data.yaml"  # of a job that prepares data
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
# Of rollout replicas: where they listen, and what became of them (slurm/rollout.py).
ROLLOUT = ".rollout"
REPLICA = "replica_{}.json"
WEIGHTS = "weights_{}.safetensors"
WEIGHTS_FOLDER = "weights_{}"
ROLLOUT_SECRET = "secret"
NO_REPLICA = "failed.json"
ROLLOUT_END = "end"
ROLLOUT_STATE = "rollout.json"
ROLLOUTS = "rollouts.jsonl"  # of reinforcement learning: some answers of each step
TENSORBOARD = "tensorboard"
PROFILE = "profile"
CHECKPOINTS = "checkpoints"
# Beside the runs: tokenised data that they share.
DATA_CACHE = ".data_cache"
KEPT_TEACHERS = "*/teacher_*/meta.json"  # in it, log-probabilities that are complete
EXPORT = "export"
ADAPTER = "adapter"
EVALS = "evals"
SHARDS = "shards"  # of an evaluation, in its EVALS
SERVED = "served.json"  # of a replica: the minutes for which it has been ready
# The directory of a sweep: what it is, and its runs by the number of their task.
SWEEPS = "sweeps"  # the folder of all sweeps
SWEEP = "sweep.json"
TASKS = "tasks"
ARRAY_SCRIPT = "array_{}.sbatch"
# In a run of a sweep: why it was stopped early.
EARLY_STOP = "early_stop.json"
# Inside checkpoints/step_<n>: the folder counts only with the marker.
CHECKPOINT_STATE = "trainer_state.json"
CHECKPOINT_MANIFEST = "manifest.json"
CHECKPOINT_COMPLETE = "COMPLETE"
_CHECKPOINT = re.compile(r"step_(0|[1-9]\d*)")
# The content of files that keep() has read, and which version of a file it is.
_kept: dict[Path, tuple[tuple[int, ...], bytes]] = {}


def checkpoint_folders(run_dir: Path) -> dict[int, int]:
    """Return by the step in the name of each checkpoint's folder the step that its manifest says.

    They differ if the folder was copied or renamed. One without a manifest that can be
    parsed counts as its name says. Whether a checkpoint is complete is not looked at.

    Raises:
        OSError: the folder or a manifest cannot be read.
    """
    folder, by_step = run_dir / CHECKPOINTS, {}
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return {}
    for match in filter(None, (_CHECKPOINT.fullmatch(name) for name in names)):
        step = int(match[1])
        try:
            manifest = read_json(folder / match[0] / CHECKPOINT_MANIFEST)
        except (ValueError, NotADirectoryError, IsADirectoryError):
            manifest = None
        said = manifest.get("step") if isinstance(manifest, dict) else None
        by_step[step] = said if isinstance(said, int) else step
    return dict(sorted(by_step.items()))


def checkpoint_steps(run_dir: Path) -> list[int]:
    """Return the steps of the complete checkpoints, ascending; copies of others do not count.

    Raises:
        OSError: the folder or a manifest cannot be read.
    """
    folder = run_dir / CHECKPOINTS
    if (given := read_json_or_none(run_dir / ENGINE)) is not None:
        from runspec.engines import Records  # few runs are another trainer's

        if (engine := Records.of(given)) is not None:
            return engine.steps(folder)
    return [
        step
        for step, said in checkpoint_folders(run_dir).items()
        if step == said and os.path.exists(folder / f"step_{step}" / CHECKPOINT_COMPLETE)
    ]


def write_text(path: Path, text: str, mode: int | None = None) -> None:
    """Replace path by text, atomically.

    Args:
        mode: the file's permissions; None leaves them to the process's umask.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any, mode: int | None = None) -> None:
    """Replace path by value as indented JSON, atomically."""
    write_text(path, json_text(value), mode)


def json_text(value: Any) -> str:
    """Return value as write_json writes it."""
    return json.dumps(value, indent=1) + "\n"


def keep(paths: Iterable[Path]) -> None:
    """Read files for this process, and those that it will fork, which then open none of them.

    One that is kept is opened again if it has changed; one that cannot be read is left to them.
    """
    for path in paths:
        with suppress(OSError):
            if _current(path) is None:
                with open(path, "rb", buffering=0) as file:
                    _kept[path] = _version(os.fstat(file.fileno())), file.readall()


def read_bytes(path: Path) -> bytes:
    """Return a file's content; one that is kept and has not changed is not opened.

    Raises:
        OSError: the file cannot be read.
    """
    kept = _current(path)
    if kept is not None:
        return kept
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def _current(path: Path) -> bytes | None:
    """What is kept of a file, None if that is nothing or the file has changed since."""
    kept = _kept.get(path)
    return kept[1] if kept is not None and _version(os.stat(path)) == kept[0] else None


def _version(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_json(path: Path | str) -> Any:
    """Return the JSON value in a file, None if there is no file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file does not hold JSON.
    """
    try:
        return json.loads(read_bytes(Path(path)))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} does not hold JSON: {error}") from error


def read_json_or_none(path: Path) -> Any:
    """Return the JSON value in a file, None if it is missing, unreadable or not JSON."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def read_json_lines(path: Path) -> list[Any]:
    """Return one value per line, [] if there is no file; a line that is cut short is left out."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    values = []
    for line in text.splitlines():
        try:
            values.append(json.loads(line))
        except ValueError:
            continue
    return values


def last_json_line(path: Path, tail_bytes: int = 8192) -> Any:
    """Return the last whole value of a JSON lines file, None if there is none in its last bytes."""
    try:
        with open(path, "rb", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - tail_bytes))
            lines = file.read(tail_bytes).splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        try:
            return json.loads(line)
        except ValueError:
            continue
    return None


def append_json_line(path: Path, value: Any) -> None:
    """Add one line to a JSON lines file and flush it to the disk.

    A line before it that was cut short stays a line of its own, which readers leave out.
    """
    with open(path, "ab+") as file:
        torn = file.seek(0, os.SEEK_END) > 0 and _last_byte(file) != b"\n"
        file.write(b"\n" * torn + json.dumps(value).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _last_byte(file: BinaryIO) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)


def fsync_path(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file's content."""
    kept = _current(path)
    if kept is not None:
        return hashlib.sha256(kept).hexdigest()
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
