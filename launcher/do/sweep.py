"""From a sweep to its runs: plan every cell, check all, make the runs, start a job of each."""

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.check import preflight
from launcher.check.recipe import ask_ahead
from launcher.do.cancel import cancel
from launcher.do.prepare import prepare
from launcher.do.resume import resume
from launcher.do.submit import (
    PlannedRun,
    context,
    discard,
    interrupted_later,
    plan,
    record,
    refuse,
    start,
)
from launcher.errors import (
    RecipeFault,
    RunFault,
    SlurmFault,
    SlurmTimeout,
    UsageFault,
)
from launcher.recipe import load as recipes
from launcher.recipe.model import Recipe
from launcher.recipe.override import key_of
from launcher.recipe.sweep import Cell, Sweep
from launcher.run import built, code, directory, sweeps
from launcher.run.directory import Run
from launcher.run.states import State, judged, state_of
from launcher.site import Site
from launcher.slurm.job import Executor

Say = Callable[[str], None]
# A label of a run has this many characters at most; a cell's number is added to the sweep's name.
_LABEL = 58
# Runs that have ended and are not restarted.
_DONE = frozenset({"COMPLETED", "OUT_OF_MEMORY"})


@dataclass(frozen=True)
class PlannedSweep:
    """A sweep that could be started: its name, and the run of each cell."""

    sweep: Sweep
    site: Site
    name: str
    parallel: int
    runs: Sequence[PlannedRun]


def plan_sweep(
    sweep: Sweep,
    site: Site,
    executor: Executor,
    overrides: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    parallel: int | None = None,
) -> PlannedSweep:
    """Work out all runs of a sweep without writing anything; RecipeFault names every cell's faults.

    Args:
        overrides, options: of every cell, on top of its own.
        parallel: the maximum number of concurrent runs; None: as in its file.
    """
    name = directory.new_name(sweep.name[:_LABEL])
    planned: list[PlannedRun] = []
    faults: dict[str, list[str]] = {}
    for number, cell in enumerate(sweep.cells):
        path = directory.runs_root(site.root) / sweeps.run_name(name, number)
        label = path.name[16:-5]
        try:
            recipe = recipes.load(sweep.recipe, (*cell.overrides, *overrides), options)
            planned.append(plan(recipe, site, executor, label, path, name))
        except RecipeFault as error:
            for fault in error.faults:
                faults.setdefault(fault, []).append(cell.name)
    if faults:
        texts = _with_cells(faults, len(sweep.cells))
        raise RecipeFault([f"{fault}; the sweep is {sweep.path}" for fault in texts])
    return PlannedSweep(sweep, site, name, parallel or sweep.parallel, planned)


def _with_cells(faults: Mapping[str, Sequence[str]], count: int) -> list[str]:
    """Return faults that several cells may share, each once and with the cells that have it."""
    lines = []
    for fault, cells in faults.items():
        which = "all cells" if len(cells) == count else f"cell {cells[0]!r}"
        more = f" and {len(cells) - 1} more" if 1 < len(cells) < count else ""
        lines.append(f"{which}{more}: {fault}" if count > 1 else fault)
    return lines


def faults(planned: PlannedSweep, skip: bool = False) -> list[str]:
    """Return what stands in the way of the runs; that one does not fit is no fault."""
    by_fault: dict[str, list[str]] = {}
    answers: dict[str, dict[str, Any]] = {}
    contexts = [replace(context(run), answers=answers) for run in planned.runs]
    if not skip:
        ask_ahead(contexts, answers)
    for cell, checked in zip(planned.sweep.cells, contexts, strict=True):
        for finding in preflight.check(checked, skip):
            if finding.state == "failed" and finding.subject != "GPU memory":
                fault = _repeatable(finding.line, checked.recipe, cell)
                by_fault.setdefault(fault, []).append(cell.name)
    return _with_cells(by_fault, len(contexts))


def _repeatable(fault: str, recipe: Recipe, cell: Cell) -> str:
    """Return a fault whose command for the download names the cell's own model and dataset."""
    command = f"cookbook download {recipe.given_name}"
    wanted = ("hub", "checkpointer", "dataset")
    own = (text for text in cell.overrides if key_of(text).partition(".")[0] in wanted)
    return fault.replace(command, " ".join([command, *map(shlex.quote, own)]))


def submit_sweep(planned: PlannedSweep, say: Say, skip: bool = False) -> list[Run]:
    """Check a sweep and record all its runs, or none; start_runs() starts them."""
    for each in planned.runs:
        prepare(each.recipe, planned.site, say)
    refuse(faults(planned, skip))
    used = (each.recipe.environment for each in planned.runs)
    for environment in {each.digest: each for each in used if each}.values():
        built.ensure(environment, planned.site.root, say)
    kit = code.present(planned.site.root)
    known = {"sweep": planned.name, "parallel": planned.parallel, "cells": len(planned.runs)}
    made: list[Run] = []
    with interrupted_later():
        try:
            for cell, run in zip(planned.sweep.cells, planned.runs, strict=True):
                made.append(record(run, kit, **known, cell=cell.name))
        except BaseException:
            for recorded in made:
                discard(recorded)
            raise
    return made


def start_runs(
    runs: Sequence[Run], executor: Executor, parallel: int, say: Say, again: bool = False
) -> None:
    """Start runs of a sweep, each as a job of its own.

    In Slurm's queue each waits until the job `parallel` places before it has ended. Without a queue
    they run one after the other.

    Args:
        again: they have had jobs, and continue from their checkpoints; see resume().
    """
    jobs: list[str] = []
    for number, run in enumerate(runs, 1):
        after = jobs[-parallel] if executor.queued and len(jobs) >= parallel else ""
        try:
            if not again:
                with directory.locked(run) as lease:
                    start(run, executor, lease, after=after)
            elif not resume(run, executor, say=say, after=after):
                continue
        except SlurmTimeout:
            raise
        except (SlurmFault, RunFault) as fault:
            message = f"then start the remaining runs: cookbook sweep --resume {run.sweep}"
            raise type(fault)([f"{each}; {message}" for each in fault.faults]) from fault
        jobs.append(str(run.job_id))
        if not executor.queued:
            _wait(run, f"{number}/{len(runs)}", say)


def _wait(run: Run, place: str, say: Say) -> None:
    """Wait for the end of a run on this host, and say how it ended."""
    name = run.submission.get("cell")
    say(f"started {run.name}: {name}")
    while not (state := state_of(run)).ended:
        time.sleep(0.5)
    detail = f" ({state.detail})" if state.detail else ""
    say(f"{place} {state.word}: {name}{detail}")


def unfinished(runs: Sequence[Run]) -> list[tuple[Run, State]]:
    """Return the runs that have not come to their end, with their states."""
    known = {run.name: state for run, state in judged(runs)}
    return [(run, known[run.name]) for run in runs if known[run.name].word not in _DONE]


def to_resume(runs: Sequence[Run], say: Say) -> list[Run]:
    """Return the runs of a sweep that have ended, or were never started, and are not done.

    Raises:
        UsageFault: there is none.
    """
    name, cells = runs[0].sweep, runs[0].submission.get("cells")
    if len(runs) != cells:
        say(f"note: {name} has {len(runs)} of its {cells} runs")
    waiting = unfinished(runs)
    if again := [run for run, state in waiting if state.ended]:
        return again
    if not waiting:
        raise UsageFault(f"every run of {name} is done: compare them with: cookbook results {name}")
    raise UsageFault(
        f"{len(waiting)} runs of {name} are pending or running, and the others are done: follow "
        f"them with: cookbook watch {name}"
    )


def cancel_all(runs: Sequence[Run]) -> list[str]:
    """End what waits or runs of these runs, and return a line for each such run."""
    known = {run.name: state for run, state in judged(runs)}
    living = [run for run in runs if not known[run.name].ended]
    if not living:
        raise RunFault("the sweep has no pending or running jobs")
    # From the last one on: a run that ends lets the next one begin.
    return [cancel(run) for run in reversed(living)]
