"""Runs as rows of a table that fits the terminal, and as objects for a program to read."""

import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from launcher.look.text import duration, number, percent, plain
from launcher.run.directory import Run
from launcher.run.states import State, judged

_COLOURS = {
    "COMPLETED": "green",
    "RUNNING": "cyan",
    "PENDING": "yellow",
    "RETRYING": "yellow",
    "REQUEUED": "yellow",
    "FAILED": "red",
    "INTERRUPTED": "magenta",
    "CANCELLED": "magenta",
    "UNKNOWN": "magenta",
}
# From the one that is missed least, if the terminal is too narrow for all.
_LEFT_OUT_FIRST = ("JOB", "RECIPE", "MFU", "USED", "TOK/S/GPU", "SIZE", "LEFT", "LOSS", "STEP")

Row = dict[str, Any]


def row(run: Run, state: State) -> Row:
    """Return what `cookbook status --json` prints for one run."""
    progress, status, asked = run.progress, run.status, run.asked
    # progress.json of a finished run says all; before, the metrics are newer.
    newest = {} if progress.get("state") == "finished" else run.newest_metrics
    step, total = newest.get("step", progress.get("step")), progress.get("total_steps")
    nodes = status.get("nodes")
    count = len(nodes) if isinstance(nodes, list) and nodes else asked["nodes"]
    return {
        "run": run.name,
        "recipe": run.submission.get("recipe"),
        "state": state.word,
        "source": state.source,
        "detail": state.detail,
        "job_id": state.job_id,
        "attempt": status.get("attempt"),
        "nodes": nodes,
        "node_count": count,
        "gpus_per_node": asked["gpus_per_node"],
        "device": progress.get("device"),
        "step": step,
        "total_steps": total,
        "loss": newest.get("loss", progress.get("loss_last")),
        "tokens_per_second_per_gpu": _newest("tokens_per_second_per_gpu", newest, progress),
        "mfu": _newest("mfu", newest, progress),
        "used_s": used_s(run, state),
        "left_s": left_s(newest, total) if state.word == "RUNNING" else None,
        "checkpoint_step": progress.get("checkpoint_step"),
        "part": part_of(run) if state.word == "RUNNING" else None,
        "path": str(run.path),
    }


def part_of(run: Run) -> str | None:
    """Say how far a preparation of data is within its step, None if its run does not say."""
    part = run.progress.get("part")
    if not isinstance(part, dict):
        return None
    text = f"{part.get('name')}: {number(part.get('rows'), ',.0f')} of "
    text += f"{number(part.get('of'), ',.0f')} rows"
    left = part.get("left_s")
    return plain(text if left is None else f"{text}, about {duration(left)} left")


def _newest(key: str, newest: dict[str, Any], progress: dict[str, Any]) -> Any:
    return newest.get(key, progress.get(key))


def used_s(run: Run, state: State) -> float | None:
    """Return the seconds that all attempts of a run have taken, None before the first."""
    status = run.status
    begin = status.get("started")
    if not isinstance(begin, int | float):
        return None
    end = status.get("ended")
    if not isinstance(end, int | float):
        # An attempt that left no last word has a last sign of life.
        seen = run.newest_metrics.get("time")
        known = [value for value in (status.get("updated"), seen) if isinstance(value, int | float)]
        end = time.time() if not state.ended else max(known, default=begin)
    # Most runs have one attempt: there the record of all is not read.
    earlier = run.attempts if status.get("attempt") else []
    return end - begin + sum(_spent(each) for each in earlier if each.get("started") != begin)


def _spent(attempt: dict[str, Any]) -> float:
    begin, end = attempt.get("started"), attempt.get("ended")
    if isinstance(begin, int | float) and isinstance(end, int | float):
        return max(0.0, end - begin)
    return 0.0


def left_s(newest: dict[str, Any], total: Any) -> float | None:
    """Return the seconds to the last step as the trainer's log has them, None if it is not known.

    A script may log only its pace.
    """
    if "left_s" in newest:
        left = newest["left_s"]
        return float(left) if isinstance(left, int | float) else None
    step, pace = newest.get("step"), newest.get("step_time_s")
    if isinstance(step, int) and isinstance(pace, int | float) and isinstance(total, int):
        return max(0, total - step) * pace
    return None


def chosen(runs: Sequence[Run], limit: int | None = None) -> list[Row]:
    """Return the rows of the newest runs, oldest first; a directory without records is no run.

    limit: the maximum number of rows; None for all.
    """
    picked = islice((run for run in reversed(runs) if not run.torn), limit)
    rows = [row(run, state) for run, state in judged([*picked])]
    return sorted(rows, key=lambda each: str(each["run"]))


def table(
    rows: Sequence[Row], width: int | None = None, paint: Callable[[str, str], str] | None = None
) -> Iterator[str]:
    """Yield a heading and a line or more for each run.

    Args:
        width: the terminal's; None shows everything, one line per run.
        paint: gives a text its colour; None without colours.
    """
    cells = [_cells(each) for each in rows]
    names = list(cells[0])
    if width is not None:
        names = [name for name in names if any(each[name] != "-" for each in cells)]
    sizes = {name: max(len(name), *(len(each[name]) for each in cells)) for name in names}
    for name in _LEFT_OUT_FIRST:
        if width is None or sum(sizes.values()) + 2 * len(sizes) <= width:
            break
        sizes.pop(name, None)
    used = sum(sizes.values()) + 2 * len(sizes)
    room = None if width is None else max(0, width - used)
    heading = "  ".join(f"{name:<{size}}" for name, size in sizes.items())
    yield f"{heading}  REASON" if room is None or room >= 6 else heading.rstrip()
    for each, values in zip(rows, cells, strict=True):
        parts = [f"{values[name]:<{size}}" for name, size in sizes.items()]
        if paint is not None:
            place = list(sizes).index("STATE")
            parts[place] = paint(parts[place], _COLOURS.get(each["state"], ""))
        line, reason = "  ".join(parts), plain(each["detail"])
        if room is None or len(reason) <= room:
            yield f"{line}  {reason}".rstrip()
            continue
        yield line.rstrip()
        indent = "    "
        yield from textwrap.wrap(
            reason, max(20, width or 0), initial_indent=indent, subsequent_indent=indent
        )


def _cells(values: Row) -> dict[str, str]:
    """Return the texts of a row's columns; "-" for what is not known."""
    step, size = values["step"], f"{values['node_count'] or '?'}x{values['gpus_per_node'] or '?'}"
    texts = {
        "RUN": values["run"],
        "RECIPE": values["recipe"] or "-",
        "STATE": values["state"],
        "JOB": values["job_id"] or "-",
        "SIZE": "-" if size == "?x?" else size,
        "STEP": "-" if step is None else f"{step}/{values['total_steps'] or '?'}",
        "LOSS": number(values["loss"], ".4f"),
        "TOK/S/GPU": number(values["tokens_per_second_per_gpu"], ",.0f"),
        "MFU": percent(values["mfu"]),
        "USED": "-" if values["used_s"] is None else duration(values["used_s"]),
        "LEFT": "-" if values["left_s"] is None else duration(values["left_s"]),
    }
    return {name: plain(str(text)) for name, text in texts.items()}
