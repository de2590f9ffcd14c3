"""Finding and following a run's log files."""

import time
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import UsageFault
from launcher.runs.directory import Run
from launcher.runs.states import own_state, state_of
from runspec import files
from runspec.states import FINAL


def choose(run: Run, node: int | None, rank: int | None, attempt: int | None) -> Path:
    """Return the log that is asked for: a rank's, a node's, or by default the first node's.

    Before the first attempt, or if no node has started in it, it is the job script's own log.
    """
    if node is not None and rank is not None:
        raise UsageFault("give --node or --rank, not both: --node shows all ranks of a node")
    default = node is None and rank is None
    folder = run.latest_logs() if attempt is None else run.logs / str(attempt)
    if folder is None or not folder.is_dir():
        if attempt is not None:
            known = ", ".join(path.name for path in _attempts(run)) or "none yet"
            raise UsageFault(f"{run.name} has no attempt {attempt}; it has: {known}")
        if default:
            return run.path / files.JOB_LOG
        raise UsageFault(
            f"{run.name} has not started yet: see why with: cookbook status {run.name}"
        )
    path = folder / (f"node_{node or 0}.log" if rank is None else f"rank_{rank}.log")
    if path.exists():
        return path
    if default:
        return run.path / files.JOB_LOG
    known = ", ".join(
        found.name for kind in ("node", "rank") for found in sorted(folder.glob(f"{kind}_*.log"))
    )
    raise UsageFault(
        f"attempt {folder.name} of {run.name} has no {path.name}; it has: {known or 'none yet'}"
    )


def _attempts(run: Run) -> list[Path]:
    """Return the log folders of the attempts, the first one first."""
    return sorted(
        (path for path in run.logs.iterdir() if path.name.isdigit()),
        key=lambda path: int(path.name),
    )


def lines(path: Path) -> Iterator[str]:
    """Yield a log's lines; none if there is no file yet."""
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from (line.rstrip("\n") for line in file)


def follow(run: Run, node: int | None, rank: int | None, attempt: int | None) -> Iterator[str]:
    """Yield a log's lines as they come, through retries, until the run has ended."""
    current: Path | None = None
    position, next_question, ended = 0, 0.0, False
    while True:
        path = _choose_if_there(run, node, rank, attempt)
        if path is not None and path != current:
            current, position = path, 0
            yield f"==> {path} <=="
        if current is not None:
            position, fresh = _read_from(current, position)
            yield from fresh
        if ended:
            return
        # After the end the file is read once more, for what was written while Slurm was asked.
        ended = own_state(run) in FINAL
        if time.monotonic() >= next_question:
            ended = state_of(run).ended
            next_question = time.monotonic() + 30
        if not ended:
            time.sleep(0.5)


def _choose_if_there(
    run: Run, node: int | None, rank: int | None, attempt: int | None
) -> Path | None:
    """Like choose, but None for a log that may still come."""
    try:
        path = choose(run, node, rank, attempt)
    except UsageFault:
        if node is not None and rank is not None:
            raise
        return None
    return path if path.exists() else None


def _read_from(path: Path, position: int) -> tuple[int, list[str]]:
    """Return the new position and the whole lines written since the old one."""
    try:
        with path.open("rb") as file:
            file.seek(position)
            data = file.read()
    except FileNotFoundError:
        return position, []
    end = data.rfind(b"\n") + 1
    return position + end, data[:end].decode("utf-8", errors="replace").splitlines()


class Tail:
    """The lines that `cookbook watch` shows: the job script's, and rank 0's of each attempt."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._positions: dict[Path, int] = {}

    def new_lines(self) -> list[str]:
        """Return what has been written since the last call."""
        logs = [self._run.path / files.JOB_LOG]
        logs += [folder / "rank_0.log" for folder in _attempts(self._run)]
        fresh: list[str] = []
        for path in logs:
            self._positions[path], written = _read_from(path, self._positions.get(path, 0))
            fresh += written
        return fresh
