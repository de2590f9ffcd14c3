"""What a user may name where a model is wanted: a run, a folder, or models:/NAME@ALIAS."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from launcher.check.files import whole
from launcher.errors import CookbookError, UnknownRun, UsageFault
from launcher.run import directory
from launcher.run.directory import Run
from launcher.run.find import every, find
from launcher.site import Site
from plugins.registry.launcher import registry
from plugins.registry.launcher import store as stores
from runspec import files
from runspec.weights import NoWeights, weight_files

_REGISTERED = re.compile(r"models:/([^@/]+)(?:@([^@/]+)|/(\d+))\Z")


@dataclass(frozen=True)
class Model:
    """A model folder, how people call it, and the run or registered version that it belongs to."""

    folder: Path
    name: str
    run: Run | None = None
    version: registry.Version | None = None

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
    if wanted.startswith("models:/"):
        version = registered(site, wanted)
        return _complete(
            Model(
                version.folder,
                f"{version.name} v{version.number}",
                _run_of(version.folder),
                version,
            )
        )
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
        known = {name: name for name in (*also, *(run.name for run in every(root)))}
        with suppress(CookbookError), stores.opened(_store(site), write=False) as client:
            for name in registry.names(client):
                uris = [f"models:/{name}@{alias}" for alias in registry.aliases_of(client, name)]
                known |= {name: uris[0]} if uris else {}
        nearest_name = next(iter(get_close_matches(wanted, known, n=1)), None)
        hint = f" (did you mean {known[nearest_name]}?)" if nearest_name else ""
        raise UsageFault(
            f"there is no run or model {wanted!r}{hint}: give {', '.join((*also, 'a run'))}, a "
            "folder (with a /), or models:/NAME@ALIAS; see cookbook status and cookbook registry"
        ) from error


def _store(site: Site) -> stores.Store:
    return stores.at(site.root, site.tracking)


def of_folder(folder: Path) -> Model:
    """Return the model in a folder; UsageFault if it is not there or not complete."""
    if not folder.is_dir():
        raise UsageFault(
            f"there is no model folder {folder}: give a run, a folder, or models:/NAME@ALIAS"
        )
    run = _run_of(folder)
    return _complete(Model(folder, run.name if run else folder.name, run))


def registered(site: Site, uri: str) -> registry.Version:
    """Return the version that models:/NAME@ALIAS or models:/NAME/VERSION names."""
    match = _REGISTERED.match(uri)
    if match is None:
        raise UsageFault(f"{uri!r} is not models:/NAME@ALIAS or models:/NAME/VERSION")
    name, alias, number = match.groups()
    with stores.opened(_store(site), write=False) as client:
        return registry.version(client, name, alias or number)


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
