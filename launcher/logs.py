"""Finding and following a run's log files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import UsageFault
from launcher.runs import Run, states


def choose(run: Run, node: int | None, rank: int | None, attempt: int | None) -> Path:
    """Return the log that is asked for: a rank's, a node's, or by default the first node's.

    Before the first attempt, or where none came so far, it is the job script's own log.
    """
    if node is not None and rank is not None:
        raise UsageFault("give --node or --rank, not both: --node shows all ranks of a node")
    folder = run.latest_logs() if attempt is None else run.path / "logs" / str(attempt)
    if folder is None or not folder.is_dir():
        if attempt is not None:
            known = sorted(
                path.name for path in (run.path / "logs").iterdir() if path.name.isdigit()
            )
            raise UsageFault(
                f"{run.name} has no attempt {attempt}; it has: {', '.join(known) or 'none yet'}"
            )
        if node is not None or rank is not None:
            raise UsageFault(
                f"{run.name} has not started yet: see why with: cookbook status {run.name}"
            )
        return run.path / "logs" / "job.log"
    name = f"rank_{rank}.log" if rank is not None else f"node_{node or 0}.log"
    path = folder / name
    if not path.exists():
        known = sorted(
            found.name for kind in ("node", "rank") for found in folder.glob(f"{kind}_*.log")
        )
        if node is None and rank is None:
            return run.path / "logs" / "job.log"
        raise UsageFault(
            f"attempt {folder.name} of {run.name} has no {name}; it has: "
            f"{', '.join(known) or 'none yet'}"
        )
    return path


def lines(path: Path) -> Iterator[str]:
    """Yield a log's lines."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                yield line.rstrip("\n")
    except FileNotFoundError:
        return


def follow(run: Run, node: int | None, rank: int | None, attempt: int | None) -> Iterator[str]:
    """Yield a log's lines as they come, through retries, until the run has ended."""
    current: Path | None = None
    position, next_question, ended = 0, 0.0, False
    while True:
        path = choose_when_there(run, node, rank, attempt)
        if path is not None and path != current:
            current, position = path, 0
            yield f"==> {path} <=="
        if current is not None:
            position, fresh = _read_from(current, position)
            yield from fresh
        if ended:
            return
        if time.monotonic() >= next_question:
            state = states([run])[run.name]
            # One more look at the file, for what was written while the question was asked.
            ended = state.final or state.word == "UNKNOWN"
            next_question = time.monotonic() + 30
        if not ended:
            ended = run.status.get("state") in ("COMPLETED", "FAILED", "CANCELLED")
            time.sleep(0.5)


def choose_when_there(
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
    """The lines of a run that a watcher wants: the job script's, and rank 0's of each attempt."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.positions: dict[Path, int] = {}

    def new_lines(self) -> list[str]:
        """Return what has been written since the last call."""
        wanted = [self.run.path / "logs" / "job.log"]
        attempts = [path for path in (self.run.path / "logs").iterdir() if path.name.isdigit()]
        wanted += [
            path / "rank_0.log" for path in sorted(attempts, key=lambda path: int(path.name))
        ]
        fresh: list[str] = []
        for path in wanted:
            self.positions[path], lines_ = _read_from(path, self.positions.get(path, 0))
            fresh += lines_
        return fresh
