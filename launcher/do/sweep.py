"""From a sweep to runs in a job array: plan every cell, check all, make the runs, start them."""

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
from launcher.do.resume import script_of_today
from launcher.do.submit import (
    PlannedRun,
    context,
    discard,
    interrupted_later,
    plan,
    record,
    refuse,
    start,
    submitted_now,
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
from launcher.slurm import executors, jobs, render
from launcher.slurm.executor import living_tasks, start_array
from launcher.slurm.executors import Executor
from runspec import files

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

    @property
    def arrays(self) -> list[list[int]]:
        """The cells' numbers, those together that ask Slurm for the same: a job array each."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for number, planned in self.runs.items():
            groups.setdefault(render.asks_slurm_for(planned.script), []).append(number)
        return list(groups.values())

    @property
    def named_arrays(self) -> list[tuple[str, list[int]]]:
        """The arrays, each with the name of its script."""
        return [(files.ARRAY_SCRIPT.format(k), tasks) for k, tasks in enumerate(self.arrays)]

    @property
    def scripts(self) -> dict[str, str]:
        """The script of each job array by its file's name."""
        return {
            name: render.array_script(
                self.path / name,
                self.runs[tasks[0]].script,
                len(tasks),
                jobs.task_list(tasks),
                self.parallel,
            )
            for name, tasks in self.named_arrays
        }


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
    """Check, record and start a sweep: afterwards its runs are queued, or nothing of it is left.

    Without job arrays the runs are recorded and not started; run_here() does that.
    """
    for each in planned.runs.values():
        prepare(each.recipe, planned.site, say)
    refuse(faults(planned, skip))
    used = (each.recipe.environment for each in planned.runs.values())
    for environment in {each.digest: each for each in used if each}.values():
        built.ensure(environment, planned.site.root, say)
    kit = code.present(planned.site.root)
    made: list[Run] = []
    token, arrays = executors.token(planned.path.name), planned.executor.queued
    with interrupted_later():
        try:
            for cell in planned.cells:
                known: dict[str, Any] = {"sweep": planned.path.name, "cell": cell.name}
                known |= {"array": token, "task": cell.number} if arrays else {}
                # A run that says which sweep it is of must not be seen before the sweep is.
                made.append(record(planned.runs[cell.number], kit, named=False, **known))
            sweep = sweeps.create(planned.path, _record(planned, token), planned.scripts)
        except BaseException:
            for run in made:
                discard(run)
            raise
        sweep.name_runs()
        if arrays:
            _start_arrays(sweep, planned.arrays, planned.parallel)
    return sweep


def _record(planned: PlannedSweep, token: str) -> dict[str, Any]:
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
        "token": token,
        "cells": cells,
        "arrays": planned.arrays,
        "jobs": [],
    }


def _start_arrays(sweep: SweepDirectory, arrays: Sequence[Sequence[int]], parallel: int) -> None:
    """Start these tasks of a sweep's arrays; each array begins when the one before it has ended.

    So the limit on parallel runs holds for all of them together.
    """
    record = sweep.record
    cells = {cell["number"]: cell for cell in sweep.cells}
    after = ""
    with directory.locked(Run(sweep.path)) as lease:
        for place, tasks in enumerate(arrays):
            if not tasks:
                continue
            script, known = sweep.path / files.ARRAY_SCRIPT.format(place), {"tasks": list(tasks)}
            try:
                earlier = {str(job["job_id"]) for job in sweep.record["jobs"]}
                job = start_array(script, record["token"], lease, earlier, tasks, parallel, after)
            except SlurmTimeout:
                raise
            except SlurmFault as fault:
                message = f"then start the remaining runs: cookbook sweep --resume {sweep.name}"
                raise type(fault)([f"{each}; {message}" for each in fault.faults]) from fault
            after = job["job_id"]
            sweep.write({"jobs": [*sweep.record["jobs"], {**job, **known}]})
            for task in tasks:
                _record_job(sweep.run_of(cells[task]), {**job, "job_id": f"{after}_{task}"})


def _record_job(run: Run, job: Mapping[str, Any]) -> None:
    """Record the task of an array that runs a run."""
    jobs = [*run.all_jobs, {**job, **submitted_now(run)}]
    run.write(files.SUBMISSION, {**run.submission, "jobs": jobs})


def unfinished(sweep: SweepDirectory) -> list[tuple[dict[str, Any], State]]:
    """Return the cells that have not come to their end, with their states."""
    cells = {cell["run"]: cell for cell in sweep.cells}
    known = [(cells[run.name], state) for run, state in judged(sweep.runs)]
    known.sort(key=lambda pair: int(pair[0]["number"]))
    return [(cell, state) for cell, state in known if state.word not in _DONE]


def resume_sweep(
    sweep: SweepDirectory, say: Say, parallel: int | None = None
) -> list[dict[str, Any]]:
    """Start again the cells that have ended and are not done, each from its checkpoint.

    Their job scripts follow the site's file.

    Returns:
        Those cells; a cell that waits or runs is left alone.

    Raises:
        UsageFault: there is none.
    """
    record = sweep.record
    sweep.name_runs()
    alive = living_tasks(record["token"])
    again = [
        cell for cell, state in unfinished(sweep) if state.ended and cell["number"] not in alive
    ]
    if not again:
        raise UsageFault(_nothing_left(sweep))
    chosen = {cell["number"] for cell in again}
    for cell in again:
        run = sweep.run_of(cell)
        with directory.locked(run), script_of_today(run, executors.choose(False), say):
            pass
        if not run.submission.get("array"):
            # It ran on a host without Slurm until now.
            run.write(
                files.SUBMISSION,
                {**run.submission, "array": record["token"], "task": cell["number"]},
            )
    arrays = [[task for task in tasks if task in chosen] for tasks in record["arrays"]]
    _start_arrays(sweep, arrays, parallel or int(record["parallel"]))
    return again


def _nothing_left(sweep: SweepDirectory) -> str:
    waiting = unfinished(sweep)
    if not waiting:
        return (
            f"every cell of {sweep.name} is done: compare them with: cookbook results {sweep.name}"
        )
    return (
        f"{len(waiting)} cells of {sweep.name} are pending or running, and the others are done: "
        f"follow them with: cookbook watch {sweep.name}"
    )


def run_here(sweep: SweepDirectory, executor: Executor, say: Say) -> None:
    """Run the cells that are not done as jobs of their own, one after the other.

    Raises:
        UsageFault: there is none.
        RunFault: another command starts one of them.
    """
    sweep.name_runs()
    left = [cell for cell, state in unfinished(sweep) if state.ended]
    if not left:
        raise UsageFault(_nothing_left(sweep))
    for number, cell in enumerate(left, 1):
        run = sweep.run_of(cell)
        with directory.locked(run) as lease, script_of_today(run, executor, say) as changes:
            start(run, executor, lease, changes)
        say(f"started {run.name}: {cell['name']}")
        while not (state := state_of(run)).ended:
            time.sleep(0.5)
        detail = f" ({state.detail})" if state.detail else ""
        say(f"{number}/{len(left)} {state.word}: {cell['name']}{detail}")


def cancel_all(runs: Sequence[Run]) -> list[str]:
    """End what waits or runs of these runs, and return a line for each such run."""
    known = {run.name: state for run, state in judged(runs)}
    living = [run for run in runs if not known[run.name].ended]
    if not living:
        raise RunFault("the sweep has no pending or running jobs")
    # From the last one on: a run that ends lets the next one begin.
    return [cancel(run) for run in reversed(living)]
