"""Loading a recipe: its file is found and read, changed by options and overrides, and checked."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from launcher import paths, venv, yamlfile
from launcher.errors import RecipeFault, UsageFault, nearest
from launcher.recipe import (
    absent,
    entries,
    extend,
    functions,
    override,
    own,
    torchtune,
    validate,
)
from launcher.recipe.model import Content, Entry, Inputs, Recipe, Resources, method_of
from runspec import prepared
from runspec.keys.common import COMMON
from runspec.keys.key import NAME, Fault
from runspec.keys.model import FOLDERS_TOKENIZER, TRANSFORMERS
from runspec.keys.train import TrainConfig, with_train_on_input

# One of these is in every recipe of the kit's trainer, and in none of another tool's files.
_OF_RECIPES = ("batch_size", "checkpointer", "dataset", "optimizer", "resources", "tokenizer")


def names() -> list[str]:
    """Return the names of the recipes that the kit ships, sorted."""
    return yamlfile.names(paths.RECIPES)


def find(name: str) -> Path:
    """Return the file of a recipe, given its name, torchtune's of a config, or a file's path."""
    is_kits = NAME.match(name) and (paths.RECIPES / f"{name}.yaml").is_file()
    if not is_kits and not name.endswith((".yaml", ".yml")):
        of_torchtune = torchtune.configs()
        if name in of_torchtune:
            return of_torchtune[name]
        if other := absent.file(name):
            raise RecipeFault(other)
        if hint := nearest(name, of_torchtune) if "/" in name else "":
            raise RecipeFault(f"torchtune has no config {name!r}{hint}: list them with: tune ls")
    return yamlfile.find(
        "recipe",
        name,
        paths.RECIPES,
        "list them with: cookbook recipes; your own is a path that ends in .yaml",
    )


def _split(name: str) -> tuple[str, str]:
    """Return the entry and the file of trl:FILE, another trainer's config; "" for no entry."""
    prefix, colon, file = name.partition(":")
    row = entries.rows().get(prefix + colon)
    if not colon or row is None:
        if colon and Path(file).is_file():
            entries.find(f"{prefix}:{file}")
        return "", name
    if row.recognises and file.endswith((".yaml", ".yml")):
        return f"{prefix}:", file
    raise RecipeFault(f"{name} is an entry, and no file: write entry: {name} in a recipe")


def _as_recipe(config: dict[str, Any], path: Path, prefix: str) -> dict[str, Any]:
    """Return the recipe that a file without `entry` means: its own content, or one around it.

    Args:
        prefix: the engine that was typed before the file's name, as in trl:FILE; "" for none.

    Raises:
        RecipeFault: it is a recipe with an entry of its own, or nobody's whom the kit knows.
    """
    if prefix and "entry" in config:
        raise RecipeFault(f"{path} has its own entry: name the file without {prefix}")
    if row := prefix or entries.recognised(config):
        # Unchanged: the kit's launch around it. Beside `config`, `entry` may name a program.
        return {"entry": f"{row}{path.name}", "config": path.name}
    if not any(key in config for key in _OF_RECIPES):
        raise RecipeFault(_nobodys(config, path))
    return config


def _nobodys(config: Content, path: Path) -> str:
    if {"compute_environment", "distributed_type"} & config.keys():
        return (
            f"{path} has settings of accelerate launch: here the nodes and GPUs are --nodes and "
            "--gpus-per-node, and FSDP is the default; submit a recipe, or a config of your trainer"
        )
    known = {name: row.title for name, row in entries.rows().items() if row.recognises}
    titles = ", ".join([*known.values(), "torchtune"])
    named = [f", or name its trainer: cookbook submit {name}{path.name}" for name in known][:1]
    return (
        f"{path} is no recipe, and not known as a config of {titles}: write entry: and extends: "
        f"(docs/models.md){''.join(named)}"
    )


def load(
    name: str,
    overrides: Iterable[str] = (),
    resources: Mapping[str, Any] | None = None,
    data: str | None = None,
    model: str | None = None,
) -> Recipe:
    """Return the recipe with its overrides; RecipeFault lists every fault found in it.

    overrides are 'key.path=value' (the key must exist or be known), '+key.path=value' (adds a
    key) or '~key.path' (removes one). resources are those given by options such as --nodes. data
    and model take the place of the recipe's own: see `launcher.recipe.own`.
    """
    prefix, file = _split(name)
    path = find(file)
    config, files = extend.read(path)
    if prefix or not {"entry", "checkpointer"} & config.keys():
        config = _as_recipe(config, path, prefix)
    for key in prepared.BLOCKS:
        if key in config:
            config[key] = prepared.expanded(config[key], config.get("dataset"))
    overrides = tuple(overrides)
    options = {key: value for key, value in (resources or {}).items() if value is not None}
    early = [text for text in overrides if override.key_of(text) in ("entry", "config")]
    texts = override.apply(config, early)
    if (row := _row(config)) and row.read:
        row.read(config, path)
    inputs, more = _own_inputs(config, path, overrides, data, model)
    texts += [*more, *override.apply(config, overrides)]
    own.use_whole_paths(config, overrides, files)
    _complete(config, path, options)
    resolved, faults = extend.resolve(
        {**config, "output_dir": "unset"}, extend.folders(paths.REPO_ROOT)
    )
    entry = None
    try:
        entry = entries.of(config)
        faults += [*validate.faults(resolved, entry), *own.mixes(resolved)]
    except UsageFault as fault:
        faults += [Fault("entry", text) for text in fault.faults]
    texts += [
        f"{fault.text}, in {_place(fault.key, files, overrides, options)}" for fault in faults
    ]
    if texts or entry is None:
        raise RecipeFault(list(dict.fromkeys(texts)))
    asked = Resources.of(resolved["resources"])
    return Recipe(path.stem, path, config, entry, asked, overrides, inputs)


def _complete(config: dict[str, Any], path: Path, options: Mapping[str, Any]) -> None:
    """Put into config what options ask for, and what follows from its entry and its place."""
    asked = config.get("resources")
    if asked is None or isinstance(asked, dict):
        given = {key: value for key, value in options.items() if key != "environment"}
        config["resources"] = (asked or {}) | given
    if named := options.get("environment"):
        config["environment"] = named
    if row := _row(config):
        _add_dependencies(config, row)
    if not config.get("entry"):
        config["entry"] = (
            torchtune.entry_of(path, config, entries.like_torchtune) or COMMON["entry"].default
        )
    if _method(config):
        torchtune.normalise(config)
    functions.use_whole_paths(config, _method(config), path.parent)
    if torchtune.config_name(path):
        # It means what torchtune says, wherever the kit's own default is another.
        for key in ("dataset", "dataset_val"):
            if key in config:
                config[key] = with_train_on_input(config[key], True)
    model = config.get("model")
    builder = model.get("_component_") if isinstance(model, dict) else None
    if _method(config) and builder in (None, "", TRANSFORMERS):
        # A model folder has its tokenizer.
        config.setdefault("tokenizer", dict(FOLDERS_TOKENIZER))


def _own_inputs(
    config: dict[str, Any],
    path: Path,
    overrides: tuple[str, ...],
    data: str | None,
    model: str | None,
) -> tuple[Inputs, list[str]]:
    """Put the user's data and model into config; return what was found, and the faults."""
    entry = (
        config.get("entry")
        or torchtune.entry_of(path, config, entries.like_torchtune)
        or COMMON["entry"].default
    )
    if not _method({"entry": entry}):
        named = [option for option, name in (("--data", data), ("--model", model)) if name]
        message = f"{path.name} starts {entry}, which has keys of its own: leave it out"
        return Inputs(), [f"{each}: {message}" for each in named]
    block = config.get("model")
    before = torchtune.normalised_model(block if isinstance(block, dict) else {})
    return own.use(config, overrides, data, model, method_of(before))


def _method(config: Content) -> type[TrainConfig] | None:
    """Return the method of the kit's trainer that reads it; `validate` reports a wrong entry."""
    try:
        return entries.of(config).method
    except RecipeFault:
        return None


def _row(config: Content) -> Entry | None:
    """Return the entry of a recipe, None for a wrong one, which `validate` reports."""
    prefix, colon, _ = str(config.get("entry") or "").partition(":")
    return entries.rows().get(prefix + colon)


def _add_dependencies(config: dict[str, Any], entry: Entry) -> None:
    """Give a recipe the packages of its entry, unless they are installed.

    Dependencies that the recipe names are built beside them; another environment is used as it is.
    """
    given = config.get("environment") or {}
    own = given.get("dependencies") if isinstance(given, dict) else None
    # What says only how packages are chosen names no other environment.
    other = not isinstance(given, dict) or (own is None and given.keys() - {"pins"})
    if not entry.dependencies or other or not isinstance(own, list | None):
        return
    named = {venv.required(str(each)) for each in own or []}
    missing = [each for each in entry.dependencies if venv.required(each) not in named]
    shared = not given or given.get("pins", entry.pins)
    if not (shared and all(map(venv.has, missing))):
        wanted = [*missing, *(own or [])]
        config["environment"] = {"pins": entry.pins, **given, "dependencies": wanted}


def _place(
    key: str, files: list[Path], overrides: tuple[str, ...], options: Mapping[str, Any]
) -> str:
    """Say where the value of a key was given: an option, an override, or a line of a file."""
    if key.startswith("resources.") and key.removeprefix("resources.") in options:
        return f"the option --{key.removeprefix('resources.').replace('_', '-')}"
    theirs = torchtune.SPELLINGS.get(key, ())
    for text in reversed(overrides):
        if f"{key}.".startswith(f"{override.key_of(text)}.") or override.key_of(text) in theirs:
            return f"the override {text!r}"
    while key:
        for file in files:
            lines = (yamlfile.line_of(file, name) for name in (key, *theirs))
            if line := next(filter(None, lines), None):
                return f"{file}, line {line}"
        key = key.rpartition(".")[0]  # a key that is missing: the block that lacks it
    return str(files[0])
