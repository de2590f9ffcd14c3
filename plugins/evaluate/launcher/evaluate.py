"""From a model and a suite to an evaluation job: what is evaluated, against what, by which file."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher import paths, yamlfile
from launcher.do import models
from launcher.do.models import Model
from launcher.errors import CookbookError, UsageFault
from launcher.recipe import extend, override
from launcher.recipe import load as recipe_file
from launcher.recipe.model import Recipe
from launcher.site import Site
from plugins.evaluate.launcher import evaluation, suite_data
from runspec import files


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that could be submitted: its recipe, the models it is about, and what is told
    of its samples."""

    recipe: Recipe
    candidate: Model
    against: Model | None
    notes: tuple[str, ...] = ()


def plan(
    site: Site,
    wanted: str,
    suite: str | None,
    against: str | None,
    overrides: Sequence[str] = (),
    resources: Mapping[str, Any] | None = None,
    data: str | None = None,
) -> Evaluation:
    """Work out an evaluation without starting anything.

    Args:
        wanted: a run, a model folder, or models:/NAME@ALIAS.
        suite: its name or file; None for the one that fits the run.
        against: base, or what wanted may be; None for no comparison.
        data: a file of samples for all tasks; None for what the suite names, or the run's
            dataset_val.

    Raises:
        UsageFault, RecipeFault: every fault of what was given.
    """
    faults: list[str] = []
    candidate, other = None, None
    try:
        candidate = models.resolve(site, wanted)
    except CookbookError as error:
        faults += error.faults
    try:
        if against == "base" and candidate is not None:
            other = _base(candidate)
        elif against not in (None, "base"):
            other = models.resolve(site, str(against), ("base",))
    except CookbookError as error:
        faults += error.faults
    run = candidate.run if candidate else None
    recipe: Recipe | None = None
    notes: tuple[str, ...] = ()
    try:
        file = yamlfile.find("suite", suite or suite_data.suite_of(run), paths.EVALS)
        if candidate is not None:
            recipe, notes = _suite(site, file, candidate, overrides, resources, data)
    except CookbookError as error:
        faults += error.faults
    if faults or candidate is None or recipe is None:
        raise UsageFault(list(dict.fromkeys(faults)))
    settings: dict[str, Any] = {"candidate_name": candidate.name}
    tasks = (recipe.config.get("tasks") or {}).items()
    if existing := [(name, task["output"]) for name, task in tasks if _output_exists(task)]:
        again = "choose another file; to continue a job that did not complete: cookbook resume RUN"
        raise UsageFault(
            [f"tasks.{n}.output: {file} already exists: {again}" for n, file in existing]
        )
    if {str(task.get("kind")) for _, task in tasks} == {"batch"}:
        # Answers are no figures of the model.
        return Evaluation(replace(recipe, config={**recipe.config, **settings}), candidate, other)
    settings["results"] = str(results_folder(site, candidate))
    if other is not None:
        settings |= {"against": str(other.folder), "against_name": other.name}
    if run is not None and not recipe.config.get("training_data"):
        settings["training_data"] = suite_data.training_of(run)
    recipe = replace(recipe, config={**recipe.config, **settings})
    return Evaluation(recipe, candidate, other, notes)


def _output_exists(task: Mapping[str, Any]) -> bool:
    """Whether the file of answers of a batch is there already."""
    return task.get("kind") == "batch" and Path(str(task.get("output") or "")).is_file()


def _suite(
    site: Site,
    file: Path,
    candidate: Model,
    overrides: Sequence[str],
    resources: Mapping[str, Any] | None,
    data: str | None,
) -> tuple[Recipe, tuple[str, ...]]:
    """Return a suite for a model, with the samples of its tasks, and notes about these."""
    if "entry" not in extend.read(file)[0]:
        raise UsageFault(f"{file} is not a suite: it has no line `entry: eval`")
    samples, notes = suite_data.overrides(file, overrides, data, candidate.run)
    given = [*overrides, *samples, f"candidate={candidate.folder}"]
    recipe = recipe_file.load(str(file), given, resources)
    if recipe.entry.purpose != "evaluate":
        raise UsageFault(
            f"{recipe.path} is not a suite: its entry is {recipe.entry_name}, not eval"
        )
    config, faults = suite_data.with_absolute_paths(recipe, set(map(override.key_of, given)), site)
    recipe = replace(recipe, config=config)
    if faults := [*faults, *suite_data.missing(recipe, site)]:
        raise UsageFault(list(dict.fromkeys(faults)))
    return recipe, notes


def results_folder(site: Site, model: Model) -> Path:
    """Return where the results about a model lie: beside its run, else under the shared folder."""
    if model.run is not None:
        return model.run.path / files.EVALS
    mark = hashlib.sha256(str(model.folder).encode()).hexdigest()[:8]
    return site.root / files.EVALS / f"{model.folder.name}-{mark}"


def _base(candidate: Model) -> Model:
    """Return the model that a run was trained from."""
    if candidate.run is None:
        raise UsageFault(
            f"--against base: {candidate.folder} belongs to no run, so its base is unknown: give "
            "the folder of the base instead"
        )
    config = yamlfile.load(candidate.run.path / files.RECIPE)
    folder = (config.get("checkpointer") or {}).get("checkpoint_dir")
    if not folder:
        raise UsageFault(f"--against base: the recipe of {candidate.run.name} names no base model")
    return models.of_folder(Path(str(folder)))


def results(site: Site, model: Model) -> list[dict[str, Any]]:
    """Return the evaluations of a model as it is now, newest first."""
    own = str(model.folder.resolve())
    known = evaluation.results_in(results_folder(site, model))
    return [each for each in known if (each.get("candidate") or {}).get("folder") == own]
