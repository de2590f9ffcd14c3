"""From a recipe to a run that is queued: plan it, check it, make its directory, start its job."""

import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from launcher import paths, venv, yamlfile
from launcher.check import Context, preflight
from launcher.do import models
from launcher.do.prepare import missing, prepare
from launcher.errors import PreflightFault, RunFault, SlurmFault, SlurmTimeout, UsageFault
from launcher.recipe import functions
from launcher.recipe.model import Recipe, Resources
from launcher.run import built, code, directory, provenance
from launcher.run.directory import Run
from launcher.site import Site, complete, with_site_defaults
from launcher.slurm import render
from launcher.slurm.job import Executor, token
from runspec import files
from runspec.keys.key import NAME, NAME_RULE


@dataclass(frozen=True)
class PlannedRun:
    """A run that could be submitted: its future directory and the text of each file in it."""

    recipe: Recipe
    cluster: Site
    executor: Executor
    path: Path
    contents: dict[str, str]

    @property
    def script(self) -> str:
        return self.contents[files.JOB_SCRIPT]

    @property
    def asked(self) -> dict[str, Any]:
        """What the run's record says of what its jobs ask Slurm for; see Run.asked."""
        return asked_of(self.cluster, with_site_defaults(self.recipe.resources, self.cluster))


def asked_of(cluster: Site, resources: Resources) -> dict[str, Any]:
    """Return what a run's record says of what its jobs ask Slurm for."""
    return {
        "nodes": resources.nodes,
        "gpus_per_node": resources.gpus_per_node,
        "time": resources.time,
        "signal_lead_s": render.signal_lead_s(cluster, resources),
    }


def plan(
    recipe: Recipe,
    cluster: Site,
    executor: Executor,
    label: str | None = None,
    path: Path | None = None,
    sweep: str = "",
    templates: Path = paths.TEMPLATES,
) -> PlannedRun:
    """Work out a run without writing anything: what submit sends and --dry-run prints.

    What the recipe leaves open, the site's file says, and its registry.

    path: the run's directory; None for one with a new name. sweep: the name of the sweep that it is
    part of. templates: of the code that the run uses.
    """
    recipe = models.in_recipe(complete(recipe, cluster, executor), cluster)
    label = label or recipe.name
    if not NAME.match(label):
        raise UsageFault(f"the name {label!r} may contain only {NAME_RULE}: choose another --name")
    path = path or directory.runs_root(cluster.root) / directory.new_name(label)
    if recipe.entry.own_code:
        given = {files.PARAMETERS: recipe.parameters(cluster.root, str(path))}
    else:
        given = {files.TRAIN: recipe.train_config(cluster.root, str(path))}
    given[files.RECIPE] = recipe.resolved(cluster.root, str(path))
    copies = functions.copied(list(given.values()), recipe.entry.method, path)
    contents = {name: yamlfile.dump(content) for name, content in given.items()} | copies
    if recipe.entry.own_code and recipe.entry.engine:
        # DeepSpeed reads JSON, and JSON is YAML.
        contents[files.PARAMETERS] = files.json_text(given[files.PARAMETERS])
    if recipe.records is not None:
        contents[files.ENGINE] = files.json_text(recipe.records.as_json())
    contents[files.JOB_SCRIPT] = render.job_script(recipe, cluster, path, label, sweep, templates)
    return PlannedRun(recipe, cluster, executor, path, contents)


def context(planned: PlannedRun) -> Context:
    """Return what there is to check of a planned run now."""
    recipe, cluster = planned.recipe, planned.cluster
    return Context(recipe, cluster, planned.executor, not missing(recipe, cluster))


def submit(planned: PlannedRun, say: Callable[[str], None], skip: bool = False) -> Run:
    """Check, record and start a run: afterwards it is queued, or nothing of it is left.

    skip: leave out the checks that may be left out.
    """
    recipe, cluster = planned.recipe, planned.cluster
    checked = context(planned)
    refuse(preflight.faults(checked, skip))
    if prepare(recipe, cluster, say):
        refuse(preflight.faults(context(planned), skip))
    built.ensure(recipe.environment, cluster.root, say)
    if recipe.environment and recipe.environment.dependencies and not skip:
        refuse(preflight.faults_after_build(checked))
    run = record(planned, code.present(cluster.root))
    start_first(run, planned.executor)
    return run


def record(planned: PlannedRun, kit: code.Code, **more: Any) -> Run:
    """Make the directory of a planned run, or nothing.

    Args:
        kit: the copy of the kit's code that it uses.
        more: fields of its submission.json.
    """
    recipe, cluster = planned.recipe, planned.cluster
    made_by = provenance.of(recipe, cluster, planned.contents, kit)
    made_of = submission(planned.path, recipe.name, recipe.path, cluster, planned.asked) | more
    contents = {
        **planned.contents,
        files.PROVENANCE: files.json_text(made_by),
        files.SUBMISSION: files.json_text(made_of),
    }
    own_code = {".": recipe.code_root} if recipe.code_root else venv.own_packages()
    return directory.create(planned.path, contents, kit, own_code, int(recipe.umask, 8))


def submission(
    path: Path, recipe: str, file: Path, cluster: Site, asked: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the submission.json of a run in path that has no job yet.

    A plug-in's command that renders a job script of its own adds `command`, its name.

    Args:
        recipe, file: the recipe's name and file.
        asked: as asked_of returns it.
    """
    made_of = {"recipe": recipe, "recipe_file": str(file), "site": cluster.name, "asked": asked}
    return {"run": path.name, **made_of, "token": token(path.name), "jobs": []}


def start_first(run: Run, executor: Executor) -> None:
    """Start the first job of a run; if there is none nothing of the run is left."""
    try:
        with directory.locked(run) as lease:
            start(run, executor, lease)
    except SlurmTimeout:
        raise  # a job may exist, as after Ctrl-C: the run directory is what finds it again
    except (SlurmFault, RunFault, OSError):
        if not run.starting:
            discard(run)
        raise


def start(
    run: Run,
    executor: Executor,
    lease: int,
    changes: Sequence[str] = (),
    after: str = "",
) -> None:
    """Give the run's job script to an executor, and record the job. lease is that of locked().

    A killed command leaves "starting" in the record: there may be a job, which its comment finds.
    changes: how the recipe was changed for this job, for the record. after: the id of a job that
    has to end before it begins.
    """
    before = {**run.submission, "jobs": run.all_jobs}
    before.pop("starting", None)
    known = submitted_now(run)
    if (kit := code.of_run(run.path)) is not None:
        known["code"] = kit.sha256
    if changes:
        known["changes"] = list(changes)
    with interrupted_later():
        run.write(files.SUBMISSION, {**before, "starting": known})
        try:
            earlier = {str(job.get("job_id")) for job in before["jobs"]}
            script = run.path / files.JOB_SCRIPT
            job = executor.start(script, token(run.name), lease, earlier, after)
        except SlurmTimeout:
            raise
        except (SlurmFault, OSError):
            run.write(files.SUBMISSION, before)
            raise
        run.write(files.SUBMISSION, {**before, "jobs": [*before["jobs"], {**job, **known}]})


def submitted_now(run: Run) -> dict[str, Any]:
    """Return what a job's record says of now: the time, and where its part of job.log begins."""
    log = run.path / files.JOB_LOG
    size = log.stat().st_size if log.exists() else 0
    return {"submitted": time.time(), "log_bytes": size}


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Hold Ctrl-C back until the block has ended; a second one interrupts it."""
    handler = signal.getsignal(signal.SIGINT)
    # Only the main thread may set one; in the background a shell turns Ctrl-C off.
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pressed = False

    def hold_back(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    signal.signal(signal.SIGINT, hold_back)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pressed:
        raise KeyboardInterrupt


def refuse(faults: list[str]) -> None:
    """Raise a PreflightFault if there are faults."""
    if faults:
        raise PreflightFault(faults)


def discard(run: Run) -> None:
    """Remove a run that was never started."""
    shutil.rmtree(run.path, ignore_errors=True)
