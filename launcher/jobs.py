"""Submitting, resuming and cancelling runs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import paths, preflight, provenance, render, runs, slurm, yamlfile
from launcher.checks import Context
from launcher.cluster import Cluster
from launcher.errors import (
    PreflightFault,
    RecipeFault,
    RunFault,
    SlurmFault,
    SlurmTimeout,
    UsageFault,
)
from launcher.recipe import NAME, NAME_RULE, Recipe
from launcher.runs import Run

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """A run that could be submitted: its future folder and the files that go into it."""

    recipe: Recipe
    cluster: Cluster
    path: Path
    files: dict[str, str]

    @property
    def script(self) -> str:
        return self.files["job.sbatch"]


def plan(recipe: Recipe, cluster: Cluster, label: str | None = None) -> Plan:
    """Work out a run without writing anything: what submit sends and --dry-run prints."""
    label = label or recipe.name
    if not NAME.match(label):
        raise UsageFault(f"the name {label!r} may hold only {NAME_RULE}: choose another --name")
    path = runs.runs_root(cluster.root) / runs.new_name(label)
    config = recipe.resolved(cluster.root, str(path))
    if recipe.script:
        given = {"parameters.yaml": recipe.parameters(cluster.root, str(path))}
    else:
        given = {"train.yaml": recipe.train_config(cluster.root, str(path))}
    files = {
        **{name: yamlfile.dump(content) for name, content in given.items()},
        "recipe.yaml": yamlfile.dump(config),
        "job.sbatch": render.job_script(recipe, cluster, path, label),
    }
    return Plan(recipe, cluster, path, files)


def context(planned: Plan, local: bool = False, elsewhere: tuple[str, ...] = ()) -> Context:
    """What there is to check of a plan as things stand now."""
    recipe, cluster = planned.recipe, planned.cluster
    prepared = preparation(recipe, cluster) is None
    return Context(recipe, cluster, local, prepared, elsewhere)


def submit(planned: Plan, checked: Context, say: Say, skip: bool = False) -> Run:
    """Check, record and start a run: afterwards it is queued, or there is no trace of it.

    skip leaves out the checks that may be left out.
    """
    recipe, cluster, local = planned.recipe, planned.cluster, checked.local
    _refuse(preflight.faults(checked, skip))
    missing = preparation(recipe, cluster)
    if missing is not None:
        prepare(missing, say)
        _refuse(preflight.faults(context(planned, local, checked.elsewhere), skip))
    run = runs.create(planned.path.parent, planned.path.name, planned.files, recipe.code_root)
    try:
        made = provenance.of(recipe, cluster, planned.files)
        paths.write_json(run.path / "provenance.json", made)
        token = render.token(run.name)
        _record(run, {"run": run.name, "recipe": recipe.name, "token": token, "jobs": []})
    except BaseException:
        discard(run)
        raise
    try:
        _start(run, local)
    except SlurmTimeout:
        raise  # a job may exist, as after Ctrl-C: the run directory is what finds it again
    except (SlurmFault, OSError):
        discard(run)
        raise
    return run


def _refuse(faults: list[str]) -> None:
    if faults:
        raise PreflightFault(faults)


def _record(run: Run, submission: dict[str, Any]) -> None:
    paths.write_json(run.path / "submission.json", submission)


def _start(run: Run, local: bool) -> None:
    """Hand the run's script to Slurm, or to bash on this host, and write down under which id."""
    script = run.path / "job.sbatch"
    if local:
        with open(run.path / "logs" / "job.log", "ab") as log:
            process = subprocess.Popen(
                ["bash", str(script)],
                cwd=run.path,
                env=slurm.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        job = {
            "job_id": f"local-{process.pid}",
            "process_start": runs.process_start(process.pid),
            "host": socket.gethostname(),
        }
    else:
        job = {"job_id": slurm.submit(script, render.token(run.name))}
    submission = run.submission
    submission["jobs"] = [*submission.get("jobs", []), {**job, "submitted": time.time()}]
    _record(run, submission)


def discard(run: Run) -> None:
    """Remove a run that never came into being."""
    shutil.rmtree(run.path, ignore_errors=True)


@dataclass(frozen=True)
class Preparation:
    """A module of the trainer that makes what a recipe needs, and a file that it then has made."""

    module: str
    arguments: list[str]
    creates: Path


def preparation(recipe: Recipe, cluster: Cluster) -> Preparation | None:
    """Return what has to be made on this machine before the recipe can run, None for nothing."""
    block = recipe.resolved(cluster.root, "run").get("prepare")
    if not block:
        return None
    module, creates = str(block.get("module", "")), Path(str(block.get("creates", "")))
    if not re.fullmatch(r"trainer(\.[a-z_]+)+", module):
        raise RecipeFault(f"prepare.module {module!r} in {recipe.path} must be a module of trainer")
    arguments = [str(argument) for argument in block.get("args") or []]
    return None if creates.exists() else Preparation(module, arguments, creates)


def prepare(missing: Preparation, say: Say) -> None:
    """Run the module that makes what is missing."""
    module, creates = missing.module, missing.creates
    say(f"preparing {creates.parent} (python -m {module}); this is done once")
    try:
        creates.parent.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [str(paths.venv_root() / "bin" / "python"), "-m", module, *missing.arguments],
            cwd=paths.REPO_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        raise PreflightFault(
            f"cannot prepare {creates.parent}: {error}: set up the environment with: bash setup.sh"
        ) from error
    if done.returncode != 0:
        words = done.stdout.decode(errors="replace").strip().splitlines() or ["no message"]
        raise PreflightFault(
            f"python -m {module} failed with status {done.returncode}: {words[-1]}"
        )


# After submission ---------------------------------------------------------------------------


def resume(run: Run, local: bool = False) -> None:
    """Start a run again from its last complete checkpoint; refuses while a job of it is there."""
    with runs.locked(run):
        state = runs.states([run])[run.name]
        if state.word == "COMPLETED":
            raise UsageFault(f"{run.name} is finished: its model is in {run.path / 'export'}")
        if not state.final and state.word not in ("UNKNOWN", "INTERRUPTED"):
            raise UsageFault(
                f"{run.name} is {state.word} as {run.job_id}: follow it with: cookbook watch "
                f"{run.name}"
            )
        _start(run, local or run.is_local)


def cancel(run: Run) -> str:
    """Cancel a run and return what was done."""
    with runs.locked(run):
        state = runs.states([run])[run.name]
        if state.final:
            return f"{run.name} has ended already: {state.word}"
        job_id = run.job_id or _job_by_token(run)
        if job_id is None:
            return f"{run.name} has no job"
        # Written first: the job must not take its end for a fault and try again.
        paths.write_json(run.path / "cancelled.json", {"job_id": job_id, "time": time.time()})
        if run.is_local:
            _cancel_local(run)
        else:
            slurm.cancel(job_id)
            _write_cancelled(run, job_id)
    return f"cancelled {run.name} (job {job_id}); go on later with: cookbook resume {run.name}"


def _job_by_token(run: Run) -> str | None:
    return next(
        (job.job_id for job in slurm.queue() if job.comment == render.token(run.name)), None
    )


def _write_cancelled(run: Run, job_id: str) -> None:
    """Say CANCELLED for a job that never started: it has nobody else to say so."""
    if not run.status:
        paths.write_json(
            run.path / "status.json",
            {
                "state": "CANCELLED",
                "job_id": job_id,
                "attempt": -1,
                "updated": time.time(),
                "message": "before it started",
            },
        )


def _cancel_local(run: Run) -> None:
    process = run.submission["jobs"][-1]
    pid = int(str(process["job_id"]).removeprefix("local-"))
    if process.get("host") != socket.gethostname():
        raise RunFault(f"{run.name} runs on {process.get('host')}: cancel it there")
    deadline = time.monotonic() + 40
    asked = signal.SIGTERM
    while runs.process_start(pid) == process["process_start"]:
        try:
            if asked == signal.SIGTERM:
                os.kill(pid, asked)
            elif time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        asked = signal.SIGCONT  # once is enough; then wait
        time.sleep(0.2)
        runs.reap(pid)
