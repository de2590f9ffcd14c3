"""Renders a recipe for a cluster as the text of its job script."""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from launcher import paths, slurm
from launcher.errors import RecipeFault, RunFault
from launcher.plugins import hook
from launcher.recipe.environment import Environment
from launcher.recipe.model import Recipe, Resources
from launcher.site import Site, with_site_defaults
from launcher.slurm.job import token
from runspec import files

# The trainer may need the cluster's signal_lead_s to finish a step and write a checkpoint; a short
# job gives it this part of its time limit at most.
_MAX_LEAD_SHARE = 4

_DIRECTIVE = re.compile(r"[A-Za-z0-9_.,:=@+/&|*()\[\]-]+\Z")


def _directive(value: Any) -> str:
    """Check a value of an #SBATCH line, which knows no quoting: a newline would add a directive."""
    text = str(value)
    if not _DIRECTIVE.match(text):
        raise RecipeFault(
            f"the value {text!r} cannot be used in an #SBATCH line: use letters, digits and . _ -"
        )
    return text


@cache
def _environment(folders: Sequence[Path]) -> jinja2.Environment:
    """Return the environment of folders of templates; a sweep renders many scripts of one."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["q"] = lambda value: shlex.quote(str(value))
    environment.filters["directive"] = _directive
    # YAML reads JSON; jinja's own tojson escapes what HTML may not hold.
    environment.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.filters["secret_lines"] = lambda secrets: "\n".join(
        f"{name}={path}" for name, path in secrets.items()
    )
    return environment


def template(name: str, *folders: Path) -> jinja2.Template:
    """Return a template by the name of its file, of the first folder that has it."""
    return _environment(folders or (paths.TEMPLATES,)).get_template(name)


def job_script(
    recipe: Recipe,
    cluster: Site,
    run_dir: Path,
    job_name: str,
    sweep: str = "",
    templates: Path = paths.TEMPLATES,
) -> str:
    """Return the whole job script of a run whose directory is run_dir.

    Args:
        sweep: the name of its sweep.
        templates: those that belong to the code that the run uses.

    Raises:
        RunFault: the run's copy of the templates asks for what this version does not say.
    """
    resources = with_site_defaults(recipe.resources, cluster)
    gpus = f"{resources.gpus_per_node}"
    if resources.gpu_type:
        gpus = f"{resources.gpu_type}:{gpus}"
    config, inside = recipe.resolved(cluster.root, str(run_dir)), recipe.environment
    interpreter = inside.interpreter(cluster.root) if inside else None
    values = dict(
        **common(cluster, resources, run_dir, job_name)
        | {"setup_lines": enter(inside, interpreter) if inside else []},
        recipe=recipe,
        sweep=sweep,
        gpus=gpus,
        cpus_per_task=(resources.cpus_per_gpu or 0) * resources.gpus_per_node,
        signal_lead_s=signal_lead_s(cluster, resources),
        rollout_gpus=int(config.get("rollout_gpus") or 1),
        own_environment=config.get("env") or {},
        own_packages=os.environ.get("COOKBOOK_COMPONENTS", ""),
        files=files,
        command=recipe.entry.command(recipe, config),
        inside=inside,
        python='"$VENV/bin/python"' if recipe.starts_backend else python(inside, interpreter),
        engine=python(inside, interpreter),
        # What the engine runs in is not what the ranks run in.
        on_host=recipe.starts_backend and not recipe.entry.on_host,
        within=within(inside),
        tracked_run=tracked_run() if recipe.entry.per_node and recipe.tracking_address else "",
    )
    try:
        return template("job.sbatch.j2", templates).render(values)
    except jinja2.UndefinedError as error:
        if templates == paths.TEMPLATES:
            raise
        raise RunFault(
            f"the run's copy of the kit is of an older version ({templates}: {error}): cookbook "
            "resume RUN --code current takes the present one"
        ) from None


def tracked_run() -> str:
    """Return the program, as shell text, that prints the id of a run's own run in the tracking
    store; "" if no plug-in has one.
    """
    program = hook("tracked_run")
    return program() if program else ""


def python(inside: Environment | None, interpreter: str | None) -> str:
    """Return what starts the ranks' Python on a node, as shell text."""
    return within(inside) + ('"$ENV_PYTHON"' if interpreter else "python")


def within(inside: Environment | None) -> str:
    """Return what comes before a command that runs in an environment, as shell text."""
    if inside is None:
        return ""
    command = ['"${INSIDE[@]}"'] if inside.is_container else []
    command += [shlex.quote(word) for word in inside.prefix]
    return "".join(f"{word} " for word in command)


def enter(environment: Environment, interpreter: str | None) -> list[str]:
    """Return the shell lines with which a job enters an environment, checked by bash."""
    if faults := _setup_faults(environment.lines, environment.place, "setup"):
        raise RecipeFault(faults)
    lines = environment.lines
    if environment.is_container:
        lines += [f"export ENV_IN_IMAGE=yes ENV_PYTHON={shlex.quote(str(interpreter))}"]
    elif interpreter and "/" in interpreter:
        lines += [f"export ENV_PYTHON={shlex.quote(str(interpreter))}"]
    elif interpreter:
        lines += [f"find_python {shlex.quote(interpreter)}"]
    return lines


def signal_lead_s(cluster: Site, resources: Resources) -> int:
    """Return how many seconds before the time limit Slurm warns a job."""
    if not resources.time_s:
        return cluster.signal_lead_s
    return max(1, min(cluster.signal_lead_s, resources.time_s // _MAX_LEAD_SHARE))


def common(cluster: Site, resources: Resources, run_dir: Path, job_name: str) -> dict[str, object]:
    """Return what the template of every job script of a run needs."""
    site_file = f"configs/clusters/{cluster.name}.yaml"
    if faults := _setup_faults(cluster.job_setup, site_file):
        raise RecipeFault(faults)
    return {
        "site": cluster,
        "setup_places": [site_file] * len(cluster.job_setup),
        "setup_lines": [],
        "resources": resources,
        "run_dir": run_dir,
        "script": run_dir / files.JOB_SCRIPT,
        "job_name": job_name,
        "token": token(run_dir.name),
        "export": slurm.EXPORT,
        "venv": paths.venv_root(),
    }


def _setup_faults(lines: Sequence[str], origin: str, kind: str = "job_setup") -> list[str]:
    """Return the lines of job_setup, or of an environment's setup, that bash cannot read."""
    faults = []
    for line in lines:
        done = subprocess.run(
            ["bash", "-n", "-c", line], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode:
            reason = done.stderr.partition("\n")[0].rpartition(": ")[2]
            faults.append(f"bash cannot read the {kind} line {line!r} in {origin}: {reason}")
    return faults
