"""Follows another trainer from the host: the companion of entries such as litgpt:.

While an attempt runs it reads the engine's own files by engine.json (runspec/engines.py), and keeps
metrics.jsonl and progress.json as the kit's trainer does, and heartbeat.json for the watchdog,
unless the engine's ranks write it. It does so once more at the end of an attempt, because an exit
status of 0 does not say that the training is finished. Standard library only.
"""

import csv
import json
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from runspec import files, progress
from runspec.engines import Records
from runspec.storage import patiently
from slurm.companion import Companion
from slurm.faults import WAIT_S
from slurm.history import latest_checkpoint, read_object
from slurm.nodes import Nodes

_EVERY_S = 2.0
# The time of a step is the mean of this many logged steps.
_WINDOW = 20
# From this number of logged steps on, the time between two is known: an engine may log seldom.
_KNOWN = 3
_OF_TIME = ("time", "step_time_s", "tokens_per_second_per_gpu")
_FIGURES = ("tokens_per_second_per_gpu", "peak_memory_reserved_gb")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def records(run_dir: Path) -> Records | None:
    """Return what is known of the run's engine, None for the kit's own trainer."""
    return Records.of(patiently(files.read_object, run_dir / files.ENGINE, most_s=WAIT_S))


def set_aside(run_dir: Path) -> None:
    """Rename the checkpoints that an earlier attempt left incomplete: an engine would load them."""
    engine, folder = records(run_dir), run_dir / files.CHECKPOINTS
    if engine is None or not folder.is_dir():
        return
    for path in list(folder.iterdir()):
        if re.fullmatch(engine.checkpoint, path.name) and not engine.is_complete(path):
            with suppress(OSError):
                path.rename(path.with_name(f"incomplete_{path.name}_{int(time.time())}"))


def rows(run_dir: Path, engine: Records) -> list[dict[str, Any]]:
    """Return the engine's figures by step, under the kit's names; a repeated step counts once."""
    by_step: dict[int, dict[str, Any]] = {}
    paths = sorted(run_dir.glob(engine.metrics), key=lambda path: path.stat().st_mtime)
    for path in paths:
        for given in _lines(path, engine):
            row = {engine.names.get(key, key): _number(value) for key, value in given.items()}
            row = {key: value for key, value in row.items() if key and value is not None}
            step = row.get("step")
            if isinstance(step, int | float) and ("loss" in row or "val_loss" in row):
                number, rest = divmod(int(step) + 1 - engine.first_step, engine.iterations)
                if rest:
                    continue
                row = {**row, "step": number}
                by_step[number] = {**by_step.get(number, {}), **row}
                # Later steps of an earlier attempt are trained again.
                if given.get("loss") is not None:
                    by_step = {key: row for key, row in by_step.items() if key <= number}
    return [by_step[step] for step in sorted(by_step)]


def _timed(rows: list[dict[str, Any]], before: list[Any], since: float) -> None:
    """Give each row the time at which it was first seen, and the rates that follow from times.

    Args:
        before: the rows as they were written the last time.
        since: when the attempt began: rates are not taken over the time between two attempts.
    """
    seen = {(row.get("step"), row.get("loss")): row for row in before if isinstance(row, dict)}
    ranks = int(os.environ.get("NODES") or 1) * int(os.environ.get("RANKS_PER_NODE") or 1)
    now = round(time.time(), 3)
    for place, row in enumerate(rows):
        if known := seen.get((row["step"], row.get("loss"))):
            row |= {key: known[key] for key in _OF_TIME if key in known}
            continue
        row.setdefault("time", now)
        window = [row for row in rows[max(0, place - _WINDOW) : place] if "loss" in row]
        first = next((each for each in window if since <= each["time"] < row["time"]), None)
        if first is None or "loss" not in row:
            continue
        spent = row["time"] - first["time"]
        row.setdefault("step_time_s", round(spent / (row["step"] - first["step"]), 4))
        if "tokens" in row and "tokens" in first:
            rate = (row["tokens"] - first["tokens"]) / spent / ranks
            row.setdefault("tokens_per_second_per_gpu", round(rate, 1))


def _lines(path: Path, engine: Records) -> list[dict[str, Any]]:
    if engine.form == "json":
        return files.read_json_lines(path)
    text = path.read_text(encoding="utf-8", errors="replace")
    if engine.form == "csv":
        return list(csv.DictReader(text.splitlines()))
    return [match.groupdict() for match in re.finditer(engine.line, _COLOUR.sub("", text))]


def _number(value: Any) -> int | float | None:
    """Return a figure as a number; None for what is none."""
    if isinstance(value, bool) or value in (None, ""):
        return None
    with suppress(TypeError, ValueError):
        return value if isinstance(value, int | float) else float(str(value).replace(",", ""))
    return None


def follow(run_dir: Path, attempt: int) -> None:
    """Bring metrics.jsonl and progress.json up to date."""
    engine = records(run_dir)
    if engine is None or not engine.metrics:
        return
    logged = rows(run_dir, engine)
    since = read_object(run_dir / files.STATUS).get("started", 0)
    _timed(logged, files.read_json_lines(run_dir / files.METRICS), float(since))
    text = "".join(json.dumps(row) + "\n" for row in logged)
    path = run_dir / files.METRICS
    if logged and (not path.exists() or path.read_text(encoding="utf-8") != text):
        files.write_text(path, text)
    losses = [row["loss"] for row in logged if "loss" in row]
    step, saved = (logged[-1]["step"] if logged else 0), max(latest_checkpoint(run_dir), 0)
    known = {
        "state": "running",
        "attempt": attempt,
        "step": max(step, saved),
        "total_steps": engine.total_steps,
        "checkpoint_step": saved,
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        **{key: logged[-1][key] for key in _FIGURES if logged and key in logged[-1]},
    }
    before = read_object(run_dir / files.PROGRESS)
    if any(before.get(key) != value for key, value in known.items()):
        progress.write(run_dir, known)


def settle(run_dir: Path, attempt: int, exit_code: int, stop_asked: bool) -> None:
    """Say in progress.json whether an attempt that has ended finished the training or stopped."""
    engine = records(run_dir)
    if engine is None or not engine.metrics:
        return
    follow(run_dir, attempt)
    known = read_object(run_dir / files.PROGRESS)
    if exit_code != 0 or known.get("state") != "running":
        return
    total = engine.total_steps
    done = not stop_asked if total is None else known.get("step", 0) >= total
    progress.write(run_dir, {**known, "state": "finished" if done else "stopped"})


@dataclass
class Beat:
    """Tells from what an engine writes that its steps go on; begins anew with each attempt."""

    run_dir: Path
    attempt: int
    _began: tuple[float, float] = (0.0, 0.0)
    _seen: list[tuple[float, int]] = field(default_factory=list)
    _written: dict[str, Any] = field(default_factory=dict)

    def look(self, now: float) -> dict[str, Any]:
        """Return what heartbeat.json says; now: a monotonic clock, in seconds."""
        known = read_object(self.run_dir / files.PROGRESS)
        rows = [row for row in files.read_json_lines(self.run_dir / files.METRICS) if "step" in row]
        seen = (known.get("step"), rows[-1]["step"] if rows else 0)
        step = max((each for each in seen if isinstance(each, int)), default=0)
        if not self._seen:
            self._began = (now, time.time())
        if not self._seen or self._seen[-1][1] != step:
            self._seen.append((now, step))
        times = [when for when, _ in self._seen[1:]][-100:]
        between = [later - earlier for earlier, later in pairwise(times)]
        logged = sum(float(row.get("time") or 0) >= self._began[1] for row in rows)
        count = max(logged, len(times))
        if len(between) >= _KNOWN:
            usual_s = median(between)
        else:
            # Several were logged since the last look, or the start is part of it: at most so long.
            usual_s = (self._seen[-1][0] - self._began[0]) / max(count, 1)
        total, phase = known.get("total_steps"), "starting"
        if known.get("attempt") != self.attempt:
            phase = "starting"  # an earlier attempt wrote it
        elif known.get("state") != "running" or (isinstance(total, int) and step >= total):
            phase = "ending"
        elif count >= _KNOWN:
            phase = "training"
        return {
            "phase": phase,
            "step": step,
            "steps": count,
            "median_step_s": round(usual_s, 3),
            # A checkpoint that is being written is a sign of life.
            "written": _newest(self.run_dir / files.CHECKPOINTS),
        }

    def write(self, now: float) -> None:
        """Bring logs/<attempt>/heartbeat.json up to date."""
        beat = self.look(now)
        if beat != self._written:
            files.write_json(self.run_dir / files.LOGS / str(self.attempt) / files.HEARTBEAT, beat)
            self._written = beat


def _newest(folder: Path) -> float:
    """Return when something in the folder, or in one of its folders, was written last."""
    newest = 0.0
    for path in (folder, *folder.glob("*"), *folder.glob("*/*")):
        with suppress(OSError):
            newest = max(newest, path.stat().st_mtime)
    return newest


class Follower(Companion):
    """Keeps the records of an engine's attempts up to date."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._attempt, self._beat, self._next = 0, Beat(run_dir, 0), 0.0

    def prepare(self) -> None:
        set_aside(self.run_dir)

    def begin(self, attempt: int, nodes: Nodes, step: Sequence[str]) -> None:
        self._attempt, self._beat, self._next = attempt, Beat(self.run_dir, attempt), 0.0

    def look(self) -> None:
        """Bring them up to date if it is time to."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _EVERY_S
        # A file may be half written, or its storage away for a moment.
        with suppress(OSError, ValueError):
            engine = Records.of(files.read_object(self.run_dir / files.ENGINE))
            follow(self.run_dir, self._attempt)
            if engine is not None and not engine.beats:
                self._beat.write(time.monotonic())

    def settle(self, attempt: int, exit_code: int, stop_asked: bool) -> None:
        settle(self.run_dir, attempt, exit_code, stop_asked)
