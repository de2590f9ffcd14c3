"""From a model and a suite to an evaluation job: what is evaluated, against what, by which file."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

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

T = TypeVar("T")


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that could be submitted."""

    recipe: Recipe
    # Lines about its samples, for the user.
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
    candidate = _tried(faults, lambda: models.resolve(site, wanted))
    other = None
    if against == "base":
        other = _tried(faults, lambda: _base(candidate)) if candidate else None
    elif against is not None:
        other = _tried(faults, lambda: models.resolve(site, against, ("base",)))
    name = suite or suite_data.suite_of(candidate.run if candidate else None)
    file = _tried(faults, lambda: yamlfile.find("suite", name, paths.EVALS))
    found = None
    if candidate and file:
        found = _tried(faults, lambda: _suite(site, file, candidate, overrides, resources, data))
    if faults or candidate is None or found is None:
        raise UsageFault(list(dict.fromkeys(faults)))
    recipe, notes = found
    settings: dict[str, Any] = {"candidate_name": candidate.name}
    settings["results"] = str(results_folder(site, candidate))
    if other is not None:
        settings |= {"against": str(other.folder), "against_name": other.name}
    if candidate.run is not None and not recipe.config.get("training_data"):
        settings["training_data"] = suite_data.training_of(candidate.run)
    return Evaluation(replace(recipe, config={**recipe.config, **settings}), notes)


def _tried(faults: list[str], make: Callable[[], T]) -> T | None:
    """Return what is made, None if that raises faults, which are added to the list."""
    try:
        return make()
    except CookbookError as error:
        faults += error.faults
        return None


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
    if faults:
        raise UsageFault(list(dict.fromkeys(faults)))
    return replace(recipe, config=config), notes


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
