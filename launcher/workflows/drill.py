"""cookbook doctor --drill: faults in a small run on this site, and what each of them cost."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

from launcher import executors
from launcher import site as sites
from launcher.errors import CookbookError, RunFault, SlurmFault, UsageFault
from launcher.executors.slurm import faults
from launcher.observe.drill import TITLES, Outcome, page
from launcher.observe.drill import Site as Place
from launcher.recipes import recipe as recipes
from launcher.runs.directory import Run
from launcher.runs.states import state_of
from launcher.site import Site
from launcher.workflows.cancel import cancel
from launcher.workflows.submit import context, plan, submit
from runspec import files
from runspec.states import FINAL

# Without those that a user has to allow.
USUAL = ("rank", "step", "checkpoint", "requeue")
ALL = ("rank", "step", "checkpoint", "node", "requeue")
LIMIT_S = 600
_SAVE_EVERY = 20
_OVERRIDES = (
    *("max_steps=1000000", "epochs=1000000", "log_every_n_steps=1", "~generate"),
    *(f"save_every_n_steps={_SAVE_EVERY}", "keep_last_n_checkpoints=2", "max_retries=5"),
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """The run of a drill, its page and what came of each fault."""

    run: Run
    page: list[str]
    outcomes: list[Outcome]


def chosen(text: str | None) -> tuple[str, ...]:
    """Return the faults that are named, in the order in which they are tried."""
    named = USUAL if text is None else tuple(filter(None, text.split(",")))
    if unknown := [each for each in named if each not in ALL]:
        raise UsageFault(f"there is no fault {unknown[0]!r}: choose from {', '.join(ALL)}")
    # The requeue comes last: Slurm may hold a requeued job back for minutes.
    return tuple(each for each in ALL if each in named)


def drill(site: Site, nodes: int, wait_s: float, wanted: Sequence[str], say: Say) -> Result:
    """Run the demo on this site, let faults happen to it, and cancel it.

    Args:
        wait_s: how long the job may wait to start.
        wanted: keys of TITLES.

    Raises:
        RunFault: the job did not start, or ended before the first fault.
    """
    executor = executors.choose(False)
    recipe = recipes.load("demo", _OVERRIDES, {"nodes": nodes})
    planned = plan(sites.complete(recipe, site, executor), site, "drill")
    run = submit(planned, context(planned, executor), say)
    say(f"submitted {run.name} as {executors.title(run.job_id)}; waiting for its first checkpoints")
    scene = _Scene(run, site.signal)
    outcomes: list[Outcome] = []
    try:
        _await_start(run, wait_s)
        end = time.monotonic() + LIMIT_S
        if not scene.trains(end):
            raise RunFault(f"{run.name} did not train within {LIMIT_S} s: {state_of(run).detail}")
        for fault in wanted:
            outcomes.append(_try(scene, fault, end))
            say(_in_short(outcomes[-1]))
        place = _place(site, scene)
    finally:
        with suppress(CookbookError):
            cancel(run)
    lines = page(place, outcomes)
    files.write_text(run.path / files.DRILL, "\n".join([*lines, ""]), mode=0o600)
    return Result(run, lines, outcomes)


def _await_start(run: Run, wait_s: float) -> None:
    """Wait until an attempt has begun; RunFault if it does not in time, or the job has ended."""
    deadline = time.monotonic() + wait_s
    while not run.status:
        state = state_of(run)
        if state.ended:
            raise RunFault(f"{run.name} is {state.word}: {state.detail}")
        if time.monotonic() > deadline:
            raise RunFault(
                f"{run.name} did not start within {wait_s:.0f} s ({state.detail}) and was "
                "cancelled: try again later, or wait longer with --wait SECONDS"
            )
        time.sleep(1)


def _in_short(outcome: Outcome) -> str:
    title = TITLES[outcome.fault]
    if outcome.survived:
        return f"{title}: {outcome.lost_steps} steps lost, trains after {outcome.seconds:.0f} s"
    return f"{title}: {outcome.note}"


@dataclass(frozen=True)
class _Scene:
    """A run that trains, and the signal that warns its job."""

    run: Run
    signal: str

    @property
    def attempt(self) -> int:
        return int(self.run.status.get("attempt", -1))

    @property
    def nodes(self) -> list[str]:
        return [str(node) for node in self.run.status.get("nodes") or []]

    @property
    def job_id(self) -> str:
        return str(self.run.status["job_id"])

    @property
    def last_step(self) -> int:
        return int(self.run.newest_metrics.get("step", 0))

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended by its own word; Slurm is not asked."""
        return self.run.status.get("state") in FINAL

    def ranks(self) -> list[tuple[str, int]]:
        """Node and process of each rank of the newest attempt, by rank."""
        folder = self.run.logs / str(self.attempt)
        by_rank = {}
        for path in folder.glob(files.STACKS.format("*")):
            node, _, pid = path.read_text(encoding="utf-8").partition("\n")[0].partition(" ")
            if pid.isdigit():
                by_rank[int(path.stem.rpartition("_")[2])] = (node, int(pid))
        return [by_rank[rank] for rank in sorted(by_rank)]

    def first_row(self) -> dict[str, Any] | None:
        """The first step that the newest attempt has logged."""
        began = self.run.status.get("started", 0)
        rows = self.run.metrics
        return next((row for row in rows if float(row.get("time", 0)) >= float(began)), None)

    def trains(self, end: float) -> bool:
        """Wait until this attempt has saved two checkpoints and is some steps beyond the newest."""
        while time.monotonic() < end:
            if self.has_ended:
                return False
            row, saved = self.first_row(), files.checkpoint_steps(self.run.path)
            own = [step for step in saved[-2:] if row is not None and step >= row["step"]]
            if len(own) == 2 and self.last_step >= own[-1] + _SAVE_EVERY // 4:
                return True
            time.sleep(0.3)
        return False

    def cause_fault(self, fault: str) -> None:
        """Let a fault happen; SlurmFault if Slurm does not let it."""
        ranks = self.ranks()
        if fault == "rank":
            node, pid = ranks[-1]
            faults.kill_on_node(self.job_id, node, [pid])
        elif fault == "node":
            # Not the first node, which runs the job's script, if there is another one.
            node = self.nodes[-1]
            own = [pid for where, pid in ranks if where == node]
            faults.kill_on_node(self.job_id, node, own, parents=True)
        elif fault == "requeue":
            faults.warn(self.job_id, self.signal)
        else:
            faults.cancel_step(self.job_id, f"attempt-{self.attempt}")

    def damage_newest_checkpoint(self) -> None:
        step = files.checkpoint_steps(self.run.path)[-1]
        folder = self.run.path / files.CHECKPOINTS / f"step_{step}"
        largest = max(
            (path for path in folder.rglob("*") if path.is_file()),
            key=lambda path: path.stat().st_size,
        )
        os.truncate(largest, largest.stat().st_size // 2)


def _try(scene: _Scene, fault: str, end: float) -> Outcome:
    """Let one fault happen, and wait until the run trains again."""
    if not scene.trains(end):
        return Outcome(fault, None, note=_why_not(scene, end))
    number, began = scene.attempt, time.time()
    try:
        scene.cause_fault(fault)
    except SlurmFault as error:
        return Outcome(fault, None, note=str(error))
    line = None
    while line is None and time.monotonic() < end:
        lines = (each for each in scene.run.attempts if each.get("attempt") == number)
        line = next(lines, None)
        time.sleep(0.1)
    # The next attempt has not read its checkpoint yet, and has not cut the record of steps.
    before = scene.last_step
    if line is not None and fault == "checkpoint":
        scene.damage_newest_checkpoint()
    row = None
    while row is None and time.monotonic() < end and not scene.has_ended:
        row = scene.first_row() if scene.attempt > number else None
        time.sleep(0.3)
    if line is None or row is None:
        return Outcome(fault, False, note=_why_not(scene, end))
    ended, started = float(line["ended"]), float(scene.run.status["started"])
    return Outcome(
        fault,
        True,
        cause=str(line.get("cause")),
        lost_steps=max(0, before - int(row["step"]) + 1),
        noticed_s=max(0.0, ended - began),
        waited_s=max(0.0, started - ended),
        started_s=max(0.0, float(row["time"]) - started),
    )


def _why_not(scene: _Scene, end: float) -> str:
    state = state_of(scene.run)
    if time.monotonic() >= end and not state.ended:
        return f"the {LIMIT_S // 60} minutes were over; the run is {state.word}: {state.detail}"
    return f"the run is {state.word}: {state.detail}"


def _place(site: Site, scene: _Scene) -> Place:
    times = [row["step_time_s"] for row in scene.run.metrics if row.get("step_time_s")]
    step_s = median(times) if times else None
    per_node = int(scene.run.asked["gpus_per_node"] or 1)
    name = scene.run.name
    return Place(site.name, name, scene.nodes, per_node, _SAVE_EVERY, step_s, site.requeue)
