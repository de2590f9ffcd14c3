"""What a user may name where a model is wanted: a run, a folder, or models:/NAME@ALIAS.

The hook "registered_model" of a plug-in with a registry takes the site and models:/NAME@ALIAS, and
returns a Model, whose folder nobody has looked into; UsageFault if there is none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.check.files import whole
from launcher.errors import UnknownRun, UsageFault, nearest
from launcher.plugins import hook
from launcher.recipe.model import Recipe
from launcher.run import directory
from launcher.run.directory import Run
from launcher.run.find import every, find
from launcher.site import Site
from runspec import files
from runspec.weights import NoWeights, weight_files

_URI = "models:/"


@dataclass(frozen=True)
class Model:
    """A model folder and what it belongs to."""

    folder: Path
    # How people call it: of a run, of a folder, or NAME vVERSION in a registry.
    name: str
    # The run that exported it.
    run: Run | None = None
    # Its name in a registry, without a version; "" without one.
    registered_as: str = ""

    @property
    def is_adapter(self) -> bool:
        return (self.folder / "adapter_config.json").is_file()


def resolve(site: Site, wanted: str, also: Sequence[str] = ()) -> Model:
    """Return the model that a user names.

    Args:
        also: what the caller takes besides, for the message.

    Raises:
        UsageFault: there is no such model, or the folder is not complete.
        StoreFault: the registry cannot be read.
    """
    if wanted.startswith(_URI):
        model = registered(site, wanted)
        return _complete(replace(model, run=_run_of(model.folder)))
    if not wanted:
        raise UsageFault("the model's name is empty: is a variable of your shell not set?")
    path = Path(wanted).expanduser()
    if "/" in wanted or path.is_dir():
        return of_folder(path.absolute())
    run = _run(site, wanted, also)
    export = run.path / files.EXPORT
    if not export.is_dir():
        raise UsageFault(
            f"{run.name} has exported no model yet: see cookbook status {run.name}, and wait for "
            f"its end or continue it with: cookbook resume {run.name}"
        )
    merged = (export / "config.json").is_file() and any(export.glob("*.safetensors"))
    return _complete(Model(export if merged else export / files.ADAPTER, run.name, run))


def _run(site: Site, wanted: str, also: Sequence[str]) -> Run:
    """Return a run by its name; UsageFault says what a model may be called, and the nearest."""
    root = directory.runs_root(site.root)
    try:
        return find(root, wanted)
    except UnknownRun as error:
        if wanted == "last" or any(wanted in run.name for run in every(root)):
            raise
        hint = nearest(wanted, [*also, *(run.name for run in every(root))])
        raise UsageFault(
            f"there is no run or model {wanted!r}{hint}: give {', '.join((*also, 'a run'))}, a "
            "folder (with a /), or models:/NAME@ALIAS; see cookbook status and cookbook registry"
        ) from error


def of_folder(folder: Path) -> Model:
    """Return the model in a folder; UsageFault if it is not there or not complete."""
    if not folder.is_dir():
        raise UsageFault(
            f"there is no model folder {folder}: give a run, a folder, or models:/NAME@ALIAS"
        )
    run = _run_of(folder)
    return _complete(Model(folder, run.name if run else folder.name, run))


def registered(site: Site, uri: str) -> Model:
    """Return what models:/NAME@ALIAS or models:/NAME/VERSION names; its folder may be damaged.

    Raises:
        UsageFault: there is no such model, or no plug-in has a registry.
        StoreFault: the registry cannot be read.
    """
    find_registered = hook("registered_model")
    if find_registered is None:
        raise UsageFault(f"{uri}: no plug-in with a registry of models is installed")
    model: Model = find_registered(site, uri)
    return model


def in_recipe(recipe: Recipe, site: Site) -> Recipe:
    """Return a recipe whose checkpoint_dir is a folder if it is models:/NAME@ALIAS; UsageFault."""
    block = recipe.config.get("checkpointer")
    given = block.get("checkpoint_dir") if isinstance(block, dict) else None
    if not (isinstance(block, dict) and isinstance(given, str) and given.startswith(_URI)):
        return recipe
    model = resolve(site, given)
    if model.is_adapter:
        raise UsageFault(
            f"checkpointer.checkpoint_dir: {given} is an adapter ({model.folder}), but a run "
            "starts from full weights: give a version whose run exported merged weights"
        )
    config = {**recipe.config, "checkpointer": {**block, "checkpoint_dir": str(model.folder)}}
    return replace(recipe, config=config)


def _run_of(folder: Path) -> Run | None:
    """Return the run whose export a folder is, None if it is none."""
    folder = folder.resolve()
    for above in (folder.parent, folder.parent.parent):
        if (above / files.SUBMISSION).is_file():
            return Run(above)
    return None


def _complete(model: Model) -> Model:
    """Return the model; UsageFault lists what is missing or cut short in its folder."""
    folder = model.folder
    config = "adapter_config.json" if model.is_adapter else "config.json"
    faults = []
    if not (folder / config).is_file():
        faults.append(f"{folder} is not a model folder: it has no {config}")
    try:
        faults += [f.line for f in whole(folder, weight_files(folder)) if f.state == "failed"]
    except NoWeights as error:
        faults.append(str(error))
    if not model.is_adapter and not any(folder.glob("tokenizer*")):
        faults.append(f"{folder} has no tokenizer: copy the base model's tokenizer files there")
    if faults:
        raise UsageFault(faults)
    return model
