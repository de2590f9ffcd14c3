"""What became of one run: its state, its attempts, its curve, and where its results are."""

import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launcher.errors import CookbookError
from launcher.look.status import row
from launcher.look.text import duration, number, percent, plain
from launcher.recipe.model import time_limit_s
from launcher.run.directory import Run
from launcher.run.states import State
from launcher.slurm.executors import title
from runspec import files


def summary(run: Run, state: State) -> Iterator[str]:
    """Yield the lines that say how a run ended, or how it stands, and where its results are."""
    yield _headline(run, state)
    yield from _lines(_results(run, state))


def story(run: Run, state: State) -> Iterator[str]:
    """Yield all that is known of a run: as summary, with its job, its speed and every attempt."""
    yield _headline(run, state)
    yield from _lines(_facts(run, state))
    for place, line in enumerate(_attempts(run, state)):
        yield f"  {'' if place else 'attempts':<12} {line}"
    yield from _lines(_results(run, state))


def _headline(run: Run, state: State) -> str:
    attempts = run.attempts
    times = [attempts[0].get("started"), attempts[-1].get("ended")] if attempts else []
    known = [time for time in times if isinstance(time, int | float)]
    spent = f" after {duration(known[1] - known[0])}" if len(known) == 2 else ""
    count = f", {len(attempts)} attempt{'s' if len(attempts) != 1 else ''}" if attempts else ""
    detail = f": {plain(state.detail)}" if state.detail else ""
    return f"{run.name} {state.word}{spent}{count}{detail}"


def _lines(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    for label, text in rows:
        if text:
            yield f"  {label:<12} {plain(text)}"


def _facts(run: Run, state: State) -> Iterator[tuple[str, str]]:
    """Yield what a run is, where it runs, how far and how fast it is."""
    values, asked, provenance = row(run, state), run.asked, run.provenance
    command = provenance.get("command")
    typed = " ".join(map(str, command)) if isinstance(command, list) else ""
    yield "recipe", f"{values['recipe'] or '?'}{f', by: {typed}' if typed else ''}"
    for each in run.all_jobs:
        cluster = f" of cluster {each['cluster']}" if each.get("cluster") else ""
        changes = each.get("changes")
        changed = f", with {' '.join(map(str, changes))}" if isinstance(changes, list) else ""
        submitted = f", {_clock(each['submitted'])}" if "submitted" in each else ""
        yield "submitted", f"{title(str(each.get('job_id')))}{cluster}{submitted}{changed}"
    names = ", ".join(map(str, values["nodes"])) if isinstance(values["nodes"], list) else ""
    size = f"{values['node_count'] or '?'} nodes x {values['gpus_per_node'] or '?'} GPUs"
    yield "nodes", f"{size}{f' ({names})' if names else ''}{_limit(run, state, asked['time'])}"
    if values["step"] is not None:
        left = values["left_s"]
        yield (
            "step",
            f"{values['step']} of {values['total_steps'] or '?'}"
            f"{'' if left is None else f', about {duration(left)} left'}"
            f"; newest checkpoint {values['checkpoint_step'] or 'none yet'}",
        )
    if values["part"]:
        yield "within it", values["part"]
    memory = run.newest_metrics.get("peak_memory_reserved_gb")
    parts = [
        number(values["tokens_per_second_per_gpu"], ",.0f", " tokens/s per GPU"),
        f"MFU {percent(values['mfu'])}",
        f"peak memory {number(memory, '.1f', ' GiB per GPU')}",
    ]
    yield "speed", ", ".join(part for part in parts if not part.endswith("-"))
    yield "time used", "" if values["used_s"] is None else duration(values["used_s"])


def _limit(run: Run, state: State, limit: str | None) -> str:
    """Say the job's time limit, and how much of it is left to a job that runs."""
    if not limit:
        return ""
    text = f", time limit {limit}{' min' * limit.isdigit()}"
    if state.word != "RUNNING" or (began := run.job_began) is None:
        return text
    try:
        left = began + time_limit_s(limit) - time.time()
    except (CookbookError, ValueError):
        return text
    return f"{text}, {duration(left)} of it left"


def _attempts(run: Run, state: State) -> Iterator[str]:
    """Yield a line for each attempt: when, how long, where, and why it ended."""
    attempts, status = run.attempts, run.status
    recorded = [each.get("attempt") for each in attempts]
    if "attempt" in status and status["attempt"] not in recorded:
        attempts = [*attempts, {**status, "cause": None}]
    for each in attempts:
        began, ended = each.get("started"), each.get("ended")
        if isinstance(began, int | float) and isinstance(ended, int | float):
            lasted = duration(ended - began)
        else:
            lasted = "now" if state.word == "RUNNING" and each is attempts[-1] else "?"
        nodes = each.get("nodes")
        where = ",".join(map(str, nodes)) if isinstance(nodes, list) else "?"
        cause = each.get("cause") or ("is running" if lasted == "now" else "left no record")
        message = f": {each['message']}" if each.get("message") else ""
        saved = each.get("checkpoint_step")
        kept = f" (checkpoint {saved})" if isinstance(saved, int) and saved > 0 else ""
        yield plain(
            f"{each.get('attempt')}  {_clock(began)}  {lasted:<12}  "
            f"{title(str(each.get('job_id')))} on {where}  {cause}{message}{kept}"
        )


def _clock(seconds: object) -> str:
    """Return a time as 2026-01-31 23:59:00 UTC."""
    if not isinstance(seconds, int | float):
        return "?"
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S UTC}"
    except (OverflowError, OSError, ValueError):
        return "?"


def _results(run: Run, state: State) -> Iterator[tuple[str, str]]:
    """Yield the curve and the places of results."""
    board = run.path / files.TENSORBOARD
    yield "loss", _curve(run.metrics, "loss")
    yield "reward", _curve(run.metrics, "reward")
    logs = _if_there(run.path / files.LATEST_LOGS) or _if_there(run.path / files.JOB_LOG)
    yield "logs", logs
    yield "metrics", _if_there(run.path / files.METRICS)
    if board.is_dir():
        yield "tensorboard", f"{board} (cookbook tensorboard {run.name})"
    yield "profile", _if_there(run.path / files.PROFILE)
    yield "checkpoints", _if_there(run.path / files.CHECKPOINTS)
    yield "model", _if_there(run.path / files.EXPORT)
    yield "adapter", _if_there(run.path / files.EXPORT / files.ADAPTER)
    if state.word == "COMPLETED" and (run.path / files.EXPORT / "config.json").is_file():
        yield "in Python", "docs/runs.md, The exported model"
    if state.ended and state.word != "COMPLETED":
        yield "next", f"cookbook logs {run.name}; then cookbook resume {run.name}"


def _if_there(path: Path) -> str:
    return str(path) if path.exists() else ""


def _curve(metrics: list[dict[str, Any]], name: str) -> str:
    """Return the first and the last value, and four between them of a longer run."""
    points = [
        (row.get("step"), row[name]) for row in metrics if isinstance(row.get(name), int | float)
    ]
    if not points:
        return ""
    middle = [points[len(points) * k // 5][1] for k in range(1, 5)] if len(points) > 10 else []
    through = f" through {', '.join(f'{value:.3g}' for value in middle)}" if middle else ""
    (first, begin), (last, end) = points[0], points[-1]
    return f"{begin:.3f} at step {first} -> {end:.3f} at step {last}{through}"
