"""From a sweep to its runs: plan every cell, check all, make the runs, start a job of each."""

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
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
from launcher.recipe.override import key_of
from launcher.recipe.sweep import Cell, Sweep
from launcher.run import built, code, directory, sweeps
from launcher.run.directory import Run
from launcher.run.states import State, judged, state_of
from launcher.run.sweeps import SweepDirectory
from launcher.site import Site
from launcher.slurm.executors import Executor

Say = Callable[[str], None]
# A label of a run has this many characters at most; a cell's number is added to the sweep's name.
_LABEL = 58
# Runs that have ended and are not restarted.
_DONE = frozenset({"COMPLETED", "OUT_OF_MEMORY"})


@dataclass(frozen=True)
class PlannedSweep:
    """A sweep that could be started: its future directory and each cell's run."""

    sweep: Sweep
    site: Site
    executor: Executor
    path: Path
    parallel: int
    runs: Mapping[int, PlannedRun]

    @property
    def cells(self) -> list[Cell]:
        """The cells that are to run."""
        return [cell for cell in self.sweep.cells if cell.number in self.runs]


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
    path = sweeps.root(site.root) / directory.new_name(sweep.name[:_LABEL])
    planned: dict[int, PlannedRun] = {}
    faults: dict[str, list[str]] = {}
    for cell in sweep.cells:
        label = f"{sweep.name[:_LABEL]}-{cell.number:02d}"
        try:
            recipe = recipes.load(sweep.recipe, (*cell.overrides, *overrides), options)
            planned[cell.number] = plan(recipe, site, executor, label, sweep_dir=path)
        except RecipeFault as error:
            for fault in error.faults:
                faults.setdefault(fault, []).append(cell.name)
    if faults:
        texts = _with_cells(faults, len(sweep.cells))
        raise RecipeFault([f"{fault}; the sweep is {sweep.path}" for fault in texts])
    return PlannedSweep(sweep, site, executor, path, parallel or sweep.parallel, planned)


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
    contexts = {
        number: replace(context(run), answers=answers) for number, run in planned.runs.items()
    }
    if not skip:
        ask_ahead(contexts.values(), answers)
    for cell in planned.cells:
        run = planned.runs[cell.number]
        failed = [
            finding
            for finding in preflight.check(contexts[cell.number], skip)
            if finding.state == "failed"
        ]
        for finding in failed:
            if finding.subject != "GPU memory":
                by_fault.setdefault(_repeatable(finding.line, run, cell), []).append(cell.name)
    return _with_cells(by_fault, len(planned.cells))


def _repeatable(fault: str, run: PlannedRun, cell: Cell) -> str:
    """Return a fault whose command for the download names the cell's own model and dataset."""
    command = f"cookbook download {run.recipe.given_name}"
    wanted = ("hub", "checkpointer", "dataset")
    own = (text for text in cell.overrides if key_of(text).partition(".")[0] in wanted)
    return fault.replace(command, " ".join([command, *map(shlex.quote, own)]))


def submit_sweep(
    planned: PlannedSweep,
    say: Say,
    skip: bool = False,
) -> SweepDirectory:
    """Check and record a sweep with all its runs, or nothing of it; start_cells() starts them."""
    for each in planned.runs.values():
        prepare(each.recipe, planned.site, say)
    refuse(faults(planned, skip))
    used = (each.recipe.environment for each in planned.runs.values())
    for environment in {each.digest: each for each in used if each}.values():
        built.ensure(environment, planned.site.root, say)
    kit = code.present(planned.site.root)
    made: list[Run] = []
    with interrupted_later():
        try:
            for cell in planned.cells:
                known = {"sweep": planned.path.name, "cell": cell.name}
                made.append(record(planned.runs[cell.number], kit, **known))
            return sweeps.create(planned.path, _record(planned))
        except BaseException:
            for run in made:
                discard(run)
            raise


def _record(planned: PlannedSweep) -> dict[str, Any]:
    sweep, runs = planned.sweep, planned.runs
    cells = [
        {
            "number": cell.number,
            "name": cell.name,
            "overrides": list(cell.overrides),
            "run": runs[cell.number].path.name,
        }
        for cell in planned.cells
    ]
    return {
        "sweep": sweep.name,
        "file": str(sweep.path),
        "recipe": sweep.recipe,
        "site": planned.site.name,
        "parallel": planned.parallel,
        "cells": cells,
    }


def start_cells(
    sweep: SweepDirectory,
    cells: Sequence[Mapping[str, Any]],
    executor: Executor,
    parallel: int,
    say: Say,
    again: bool = False,
) -> None:
    """Start the runs of cells, each as a job of its own.

    In Slurm's queue each waits until the job `parallel` places before it has ended. Without a queue
    they run one after the other.

    Args:
        again: they have had jobs, and continue from their checkpoints; see resume().
    """
    jobs: list[str] = []
    for number, cell in enumerate(cells, 1):
        run = sweep.run_of(cell)
        after = jobs[-parallel] if executor.queued and len(jobs) >= parallel else ""
        try:
            if again:
                resume(run, executor, say=say, after=after)
            else:
                with directory.locked(run) as lease:
                    start(run, executor, lease, after=after)
        except SlurmTimeout:
            raise
        except SlurmFault as fault:
            message = f"then start the remaining runs: cookbook sweep --resume {sweep.name}"
            raise type(fault)([f"{each}; {message}" for each in fault.faults]) from fault
        jobs.append(str(run.job_id))
        if not executor.queued:
            _wait(run, f"{number}/{len(cells)}", str(cell["name"]), say)


def _wait(run: Run, place: str, name: str, say: Say) -> None:
    """Wait for the end of a run on this host, and say how it ended."""
    say(f"started {run.name}: {name}")
    while not (state := state_of(run)).ended:
        time.sleep(0.5)
    detail = f" ({state.detail})" if state.detail else ""
    say(f"{place} {state.word}: {name}{detail}")


def unfinished(sweep: SweepDirectory) -> list[tuple[dict[str, Any], State]]:
    """Return the cells that have not come to their end, with their states."""
    cells = {cell["run"]: cell for cell in sweep.cells}
    known = [(cells[run.name], state) for run, state in judged(sweep.runs)]
    known.sort(key=lambda pair: int(pair[0]["number"]))
    return [(cell, state) for cell, state in known if state.word not in _DONE]


def to_resume(sweep: SweepDirectory) -> list[dict[str, Any]]:
    """Return the cells that have ended, or were never started, and are not done.

    Raises:
        UsageFault: there is none.
    """
    waiting = unfinished(sweep)
    if again := [cell for cell, state in waiting if state.ended]:
        return again
    if not waiting:
        raise UsageFault(
            f"every cell of {sweep.name} is done: compare them with: cookbook results {sweep.name}"
        )
    raise UsageFault(
        f"{len(waiting)} cells of {sweep.name} are pending or running, and the others are done: "
        f"follow them with: cookbook watch {sweep.name}"
    )


def cancel_all(runs: Sequence[Run]) -> list[str]:
    """End what waits or runs of these runs, and return a line for each such run."""
    known = {run.name: state for run, state in judged(runs)}
    living = [run for run in runs if not known[run.name].ended]
    if not living:
        raise RunFault("the sweep has no pending or running jobs")
    # From the last one on: a run that ends lets the next one begin.
    return [cancel(run) for run in reversed(living)]
