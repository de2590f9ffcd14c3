"""What became of one run: its state, its curve, its answers, and where its results are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.runs.directory import Run
from launcher.runs.states import State
from runspec import files


def summary(run: Run, state: State) -> Iterator[str]:
    """Yield the lines that say how a run ended, or how it stands, and where its results are."""
    attempts = run.attempts
    times = [attempts[0].get("started"), attempts[-1].get("ended")] if attempts else []
    known = [time for time in times if isinstance(time, int | float)]
    spent = f" after {duration(known[1] - known[0])}" if len(known) == 2 else ""
    count = f", {len(attempts)} attempt{'s' if len(attempts) != 1 else ''}" if attempts else ""
    yield f"{run.name} {state.word}{spent}{count}{f': {state.detail}' if state.detail else ''}"
    board = run.path / files.TENSORBOARD
    rows = [
        ("loss", _curve(run.metrics)),
        *_samples(run),
        ("logs", _if_there(run.path / files.LATEST_LOGS) or _if_there(run.path / files.JOB_LOG)),
        ("metrics", _if_there(run.path / files.METRICS)),
        ("tensorboard", f"{board} (cookbook tensorboard {run.name})" if board.is_dir() else ""),
        ("profile", _if_there(run.path / files.PROFILE)),
        ("checkpoints", _if_there(run.path / files.CHECKPOINTS)),
        ("model", _if_there(run.path / files.EXPORT)),
        ("adapter", _if_there(run.path / files.EXPORT / files.ADAPTER)),
    ]
    if state.ended and state.word != "COMPLETED":
        rows.append(("next", f"cookbook logs {run.name}; then cookbook resume {run.name}"))
    for label, text in rows:
        if text:
            yield f"  {label:<12} {text}"


def _if_there(path: Path) -> str:
    return str(path) if path.exists() else ""


def _curve(metrics: list[dict[str, Any]]) -> str:
    """Return the first and the last loss, and four between them of a longer run."""
    points = [
        (row.get("step"), row["loss"])
        for row in metrics
        if isinstance(row.get("loss"), int | float)
    ]
    if not points:
        return ""
    middle = [points[len(points) * k // 5][1] for k in range(1, 5)] if len(points) > 10 else []
    through = f" through {', '.join(f'{loss:.3g}' for loss in middle)}" if middle else ""
    (first, begin), (last, end) = points[0], points[-1]
    return f"{begin:.3f} at step {first} -> {end:.3f} at step {last}{through}"


def _samples(run: Run) -> Iterator[tuple[str, str]]:
    """Yield question and answer of each sample that the finished model was asked for."""
    for sample in run.samples:
        yield "question", str(sample.get("prompt", ""))
        yield "answer", str(sample.get("answer", ""))


def duration(seconds: float) -> str:
    """Return a length of time as people write it: 42 s, 3 min 10 s, 5 h 2 min, 3 d 4 h."""
    seconds = max(0, int(seconds))
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    if seconds < 86400:
        return f"{seconds // 3600} h {seconds % 3600 // 60} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600} h"
