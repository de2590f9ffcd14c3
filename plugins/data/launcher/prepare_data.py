"""From a data recipe to a training set: here with DuckDB, or in a job with DuckDB or Spark."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from launcher import paths, venv, yamlfile
from launcher.do.submit import asked_of, start_first, submission
from launcher.errors import PreflightFault, UsageFault
from launcher.run import code, directory, provenance
from launcher.run.directory import Run
from launcher.site import Site, with_site_defaults
from launcher.slurm import render
from launcher.slurm.job import Executor
from plugins.data.datarecipe import step_name, step_options
from plugins.data.launcher.recipe import DataRecipe
from runspec import files
from runspec.keys.key import NAME, NAME_RULE

_TEMPLATES = Path(__file__).parents[1] / "templates"
_SETTINGS = "data.yaml"  # of a job
# What every preparation imports.
_PACKAGES = ("ibis-framework", "duckdb", "phonenumberslite", "python-stdnum")


@dataclass(frozen=True)
class Preparation:
    """What would be done, and where."""

    recipe: DataRecipe
    site: Site
    name: str
    # duckdb or spark.
    engine: str
    # Of a job, None for here.
    nodes: int | None
    # What plugins.data.run reads.
    settings: dict[str, Any]

    @property
    def folder(self) -> Path:
        """Where the versions of the set lie."""
        return Path(self.settings["root"]) / "prepared" / self.name


def plan(recipe: DataRecipe, site: Site, name: str | None, nodes: int | None) -> Preparation:
    """Work out what to do without doing it. Spark is used only in a job, or if it is asked for."""
    name = name or recipe.name
    if not NAME.match(name):
        raise UsageFault(f"the name {name!r} may contain only {NAME_RULE}: choose another --name")
    asked = str(recipe.config.get("engine") or "auto")
    engine = asked if asked != "auto" else "spark" if (nodes or 1) > 1 else "duckdb"
    if engine == "duckdb" and (nodes or 1) > 1:
        raise UsageFault(
            f"engine: duckdb runs on one node, and {nodes} are requested: use --nodes 1 or "
            "engine=spark"
        )
    root = site.root / "datasets"
    settings = {
        "name": name,
        "root": str(root),
        "base": str(recipe.base),
        "engine": engine,
        "recipe": recipe.resolved(site.root),
    }
    if faults := _missing(engine):
        raise PreflightFault(faults)
    return Preparation(recipe, site, name, engine, nodes, settings)


def _missing(engine: str) -> list[str]:
    """Say which packages of the engine are not installed, without importing them."""
    have = {name.lower().replace("_", "-") for name in venv.packages()}
    faults = []
    if lacks := [name for name in _PACKAGES if name not in have]:
        faults.append(f"{paths.venv_root()} lacks {', '.join(lacks)}: bash setup.sh --with data")
    if engine == "spark" and "pyspark" not in have:
        faults.append(f"{paths.venv_root()} lacks Spark: bash setup.sh --with spark")
    return faults


def here(planned: Preparation, preview: int | None, as_json: bool) -> NoReturn:
    """Become the process that prepares on this machine, so that a signal reaches it.

    What is typed again after an interruption goes on where it was.
    """
    # A file without a name: whatever ends the process, nothing of it is left.
    settings = os.memfd_create(_SETTINGS, 0)
    os.write(settings, yamlfile.dump(planned.settings).encode())
    argv = [str(venv.python()), "-m", "plugins.data.run", f"/proc/self/fd/{settings}"]
    argv += ["--preview", str(preview)] if preview else []
    argv += ["--json"] if as_json else []
    sys.stdout.flush()
    try:
        os.chdir(paths.REPO_ROOT)
        # -P would hide the kit's own packages from spawned workers.
        os.execve(argv[0], argv, {**venv.environment(), "OMP_NUM_THREADS": "1"})
    except OSError as error:
        raise PreflightFault(
            f"{argv[0]} cannot be started ({error.strerror}): bash setup.sh --with data"
        ) from error


def job_plan(planned: Preparation) -> tuple[Path, dict[str, str]]:
    """Return the directory that a job would have, and the text of each file in it."""
    path = directory.runs_root(planned.site.root) / directory.new_name(planned.name)
    contents = {
        files.RECIPE: yamlfile.dump({"entry": "prepare", **planned.settings["recipe"]}),
        _SETTINGS: yamlfile.dump({**planned.settings, "event_log": str(path / "spark_events")}),
    }
    resources = with_site_defaults(planned.recipe.resources, planned.site)
    template = render.template("job.sbatch.j2", _TEMPLATES, paths.TEMPLATES)
    contents[files.JOB_SCRIPT] = template.render(
        **render.common(planned.site, resources, path, planned.name),
        nodes=planned.nodes or 1,
        engine=planned.engine,
    )
    return path, contents


def submit(
    planned: Preparation, path: Path, contents: Mapping[str, str], executor: Executor
) -> Run:
    """Make the job's directory and start it: afterwards it is queued, or nothing of it is left."""
    kit, site = code.present(planned.site.root), planned.site
    resources = replace(planned.recipe.resources, nodes=planned.nodes or 1, gpus_per_node=1)
    asked = asked_of(site, with_site_defaults(resources, site))
    made_of = submission(path, planned.name, planned.recipe.path, site, asked)
    made_of["command"] = "cookbook prepare"
    made_by = provenance.of_now(kit)
    made_by["config_sha256"] = provenance.text_sha256(contents[_SETTINGS])
    records = {
        files.PROVENANCE: files.json_text(made_by),
        files.SUBMISSION: files.json_text(made_of),
    }
    run = directory.create(path, {**contents, **records}, kit)
    (run.path / "spark_events").mkdir()
    start_first(run, executor)
    return run


def described(planned: Preparation) -> list[str]:
    """Say what a preparation here would do."""
    recipe = planned.settings["recipe"]
    steps: Sequence[Any] = recipe.get("steps") or []
    lines = [f"{planned.name}: {planned.engine} on this machine, into {planned.folder}"]
    for each in recipe["sources"]:
        place = each.get("path") or each.get("repository") or each.get("url")
        lines.append(f"  source  {place} ({each['format']})")
    lines += [f"  step    {step_name(step)}: {step_options(step) or 'as usual'}" for step in steps]
    return lines
