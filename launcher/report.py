"""Following a run to its end, and telling how it ended."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from launcher import logs, paths, runs
from launcher.runs import Run, State

# How long an end that only the queue or the accounting tells of has to last to be believed.
_DOUBT_S = 10.0


def watch(run: Run, say: Callable[[str], None], poll_s: float = 1.0) -> State:
    """Say a run's states and its log lines until it has ended; return the last state."""
    tail = logs.Tail(run)
    said, next_question, pause_s = "", 0.0, 2.0
    ended_at: float | None = None
    while True:
        now = time.monotonic()
        own = run.status.get("state")
        # The job's own file costs nothing to read; the controller is asked seldom.
        if now >= next_question or own in runs.FINAL:
            state = runs.states([run])[run.name]
            words = f"{state.word}{f' ({state.detail})' if state.detail else ''}"
            if words != said and not state.final:
                say(f"{run.name}: {words}")
                said, pause_s = words, 2.0
            # A cluster has many watchers: ask less and less often while nothing changes.
            next_question = now + pause_s * random.uniform(0.8, 1.2)
            pause_s = 2.0 if state.final else min(60.0, pause_s * 1.5)
        for line in tail.new_lines():
            say(line)
        # What the queue calls ended may be on its way back into it; the job's own word is final.
        ended = state.final or state.word == "UNKNOWN"
        ended_at = (ended_at or now) if ended else None
        if ended_at and (state.source == "status.json" or now - ended_at > _DOUBT_S):
            for line in tail.new_lines():
                say(line)
            return state
        if run.is_local:
            runs.reap(int(str(run.job_id).removeprefix("local-")))
        time.sleep(poll_s)


def summary(run: Run, state: State) -> Iterator[str]:
    """Yield the lines that tell how a run ended and where its results are."""
    attempts = run.attempts
    spent = ""
    if attempts and attempts[0].get("started"):
        spent = f" after {runs.duration(attempts[-1]['ended'] - attempts[0]['started'])}"
    count = f"{len(attempts)} attempt{'s' if len(attempts) != 1 else ''}"
    yield f"{run.name} {state.word}{spent}, {count}{f': {state.detail}' if state.detail else ''}"
    rows = [
        ("loss", _curve(run.metrics())),
        *((label, text) for sample in samples(run) for label, text in sample),
        ("logs", _if_there(run.path / "logs" / "latest")),
        ("metrics", _if_there(run.path / "metrics.jsonl")),
        (
            "tensorboard",
            f"{run.path / 'tensorboard'} (cookbook tensorboard {run.name})"
            if (run.path / "tensorboard").is_dir()
            else "",
        ),
        ("profile", _if_there(run.path / "profile")),
        ("checkpoints", _if_there(run.path / "checkpoints")),
        ("model", _if_there(run.path / "export")),
        ("adapter", _if_there(run.path / "export" / "adapter")),
    ]
    for label, text in rows:
        if text:
            yield f"  {label:<12} {text}"
    if state.final and state.word != "COMPLETED":
        yield f"  next         cookbook logs {run.name}; then cookbook resume {run.name}"


def _if_there(path: Path) -> str:
    return str(path) if path.exists() else ""


def _curve(metrics: list[dict[str, Any]]) -> str:
    losses = [row["loss"] for row in metrics if isinstance(row.get("loss"), (int, float))]
    if not losses:
        return ""
    middle = (
        [f"{losses[len(losses) * k // 5]:.3g}" for k in range(1, 5)] if len(losses) > 10 else []
    )
    through = f" through {', '.join(middle)}" if middle else ""
    first, last = metrics[0]["step"], metrics[-1]["step"]
    return f"{losses[0]:.3f} at step {first} -> {losses[-1]:.3f} at step {last}{through}"


def samples(run: Run) -> Iterator[list[tuple[str, str]]]:
    """Yield question and answer of each sample that the finished model was asked for."""
    for sample in paths.read_json_lines(run.path / "samples.jsonl"):
        yield [("question", str(sample["prompt"])), ("answer", str(sample["answer"]))]
