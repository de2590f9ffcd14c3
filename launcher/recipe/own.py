"""The user's own data and model in any recipe: --data and --model."""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import UsageFault
from launcher.recipe import override, torchtune
from launcher.recipe.model import Inputs
from runspec import prepared
from runspec.adapters import KINDS, LORA
from runspec.keys.fields import FILE_SOURCES
from runspec.keys.key import Fault
from runspec.keys.model import FOLDERS_TOKENIZER, TRANSFORMERS

_HUB_NAME = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?"
# What a dataset block says of rows, wherever these come from.
_OF_ROWS = ("packed", "split_across_pack")


def use(
    config: dict[str, Any],
    overrides: Sequence[str],
    data: str | None,
    model: str | None,
    method: str,
) -> tuple[Inputs, list[str]]:
    """Put data and model into config; return what was found, and the faults.

    Args:
        overrides: of the recipe, which are applied later.
        method: the recipe's: full, lora, dora, qlora or qdora; it stays.
    """
    given = _by_key(overrides)
    tasks: list[Callable[[], str]] = []
    if data:
        tasks.append(lambda: _use_data(config, data, given))
    if model:
        tasks.append(lambda: f"the model is {_use_model(config, model, method)}")
    notes, faults = [], []
    for task in tasks:
        try:
            notes.append(task())
        except UsageFault as fault:
            faults += fault.faults
    named = [(each, name) for each, name in (("--model", model), ("--data", data)) if name]
    return Inputs(tuple(_option(*each) for each in named), tuple(notes)), faults


def _option(name: str, value: str) -> str:
    return f"{name} {shlex.quote(value)}"


def use_whole_paths(
    config: dict[str, Any], overrides: Sequence[str], files: Sequence[Path]
) -> None:
    """Let a path that was typed count from the shell's folder, and one that a recipe names from
    that recipe's: a job runs in another.

    Args:
        files: the recipe, and those that it extends.
    """
    if "work_dir" in _by_key(overrides) and isinstance(folder := config.get("work_dir"), str):
        config["work_dir"] = str(Path(folder).expanduser().absolute())
    for key in prepared.BLOCKS:
        block = config.get(key)
        if not isinstance(block, dict) or not block.get("data_files"):
            continue
        names = block["data_files"]
        typed = f"{key}.data_files" in _by_key(overrides)
        source = {**_block(config, "dataset"), **block}.get("source")
        if not (is_local(names) if typed else source in FILE_SOURCES):
            continue
        for folder in [Path.cwd()] if typed else [file.parent.absolute() for file in files]:
            places = [folder / Path(str(name)).expanduser() for name in listed(names)]
            if typed or all(map(_exists, places)):
                whole = [str(place) for place in places]
                block["data_files"] = whole if isinstance(names, list) else whole[0]
                break


def _exists(path: Path) -> bool:
    """Whether there is such a file; a name may have wildcards."""
    return path.is_file() or any(path.parent.glob(path.name))


def _use_data(config: dict[str, Any], name: str, overrides: Mapping[str, str]) -> str:
    """Put a file, or prepared:NAME@SPLIT, in the place of the recipe's dataset; return its form."""
    if other := [key for key in overrides if key in ("dataset", "dataset.data_files")]:
        raise UsageFault(f"--data and {other[0]}= both name the data: leave one out")
    changed = any(key.split(".")[0] == "dataset_val" for key in overrides)
    if config.get("dataset_val") and not changed:
        raise UsageFault(
            f"--data {name}: the recipe's dataset_val is of its own dataset: give "
            "dataset_val.split=train[95%:] with dataset.split=train[:95%], or leave it out with "
            "~dataset_val"
        )
    before = _block(config, "dataset")
    if prepared.reference(name):
        config["dataset"] = prepared.expanded(name, before)
        form = f"{name}, made by cookbook prepare"
    else:
        text = overrides.get("dataset.column_map", "")
        columns = override.value_of(text) if text else None
        # Imported late: hardly any command reads data.
        from launcher.recipe import entries, own_data

        method = entries.of(config).method
        pairs = method.pairs if method else ""
        samples_answers = method is not None and method.samples_answers
        form = "{input: A, output: B}"
        if samples_answers or pairs:
            form = "{prompt: A}" if samples_answers else "{chosen: A, rejected: B}"
        wanted = {"prompt"} if samples_answers else set() if pairs else {"input", "output"}
        if columns and not (isinstance(columns, dict) and wanted <= columns.keys()):
            raise UsageFault(f"{text!r}: write dataset.column_map='{form}'")
        if samples_answers:
            data = own_data.prompts(name, columns)
        else:
            data = own_data.read(name, columns, pairs)
        config["dataset"] = {**data.block, **{k: before[k] for k in _OF_ROWS if k in before}}
        form = data.summary
    _leave_out(config, "dataset")
    return form


def _use_model(config: dict[str, Any], name: str, method: str) -> str:
    """Put a model folder, or a model of the hub, in the place of the recipe's; return its name.

    Args:
        method: the recipe's: full, lora, dora, qlora, qdora or another kind; it stays.

    Raises:
        UsageFault: it is neither a folder with a config.json nor a name of the hub.
    """
    folder = Path(name).expanduser()
    checkpointer = {
        key: value for key, value in _block(config, "checkpointer").items() if key == "_component_"
    }
    _leave_out(config, "model")
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UsageFault(f"--model {name} has no config.json: give a model's folder")
        checkpointer["checkpoint_dir"] = str(folder.absolute())
        shown = folder.absolute().name
    elif re.fullmatch(_HUB_NAME, name) and not name.startswith((".", "/", "~")):
        shown = name.partition("@")[0].rpartition("/")[2]
        config["hub"] = {**_block(config, "hub"), "model": name}
        checkpointer["checkpoint_dir"] = f"${{models_root}}/{shown}"
    else:
        raise UsageFault(
            f"--model {name} is no folder, and no ORGANISATION/NAME of the Hugging Face Hub: give "
            "one of these, such as Qwen/Qwen3-8B"
        )
    before = torchtune.normalised_model(_block(config, "model"))
    kept = ("adapter", "quantize_base", *KINDS.get(method.removeprefix("q"), LORA).keys)
    # lora_modules has names of the other model's layers.
    named = {k: before[k] for k in kept if k in before and k != "lora_modules"}
    model = {"_component_": TRANSFORMERS, **(named if method != "full" else {})}
    length = _block(config, "tokenizer").get("max_seq_len")
    config["model"], config["checkpointer"] = model, checkpointer
    config["tokenizer"] = FOLDERS_TOKENIZER | ({"max_seq_len": length} if length else {})
    # It makes the recipe's own model.
    config.pop("prepare", None)
    return shown


def mixes(config: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the faults of datasets that name the user's files and a dataset of the hub at once."""
    for key in prepared.BLOCKS:
        own = _block(config, key)
        block = {**_block(config, "dataset"), **own}
        source, files = block.get("source"), block.get("data_files")
        if source is None and str(block.get("_component_")).startswith("torchtune."):
            source = "of its component"
        if (
            not {"source", "data_files"} & own.keys()
            or not isinstance(source, str)
            or not is_local(files)
        ):
            continue
        if source not in FILE_SOURCES and not Path(source).expanduser().exists():
            yield Fault(
                f"{key}.data_files",
                f"{key}.data_files names your file {files}, and {key}.source the hub's dataset "
                f"{source}: give --data FILE in its place, set {key}.source=json (or csv, "
                "parquet), or leave data_files out",
            )


def _leave_out(config: dict[str, Any], key: str) -> None:
    """Fetch no model, or no dataset, from the hub."""
    config["hub"] = {k: v for k, v in _block(config, "hub").items() if k != key}
    if not config["hub"]:
        del config["hub"]


def _block(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    return dict(value) if isinstance(value, dict) else {}


def _by_key(overrides: Sequence[str]) -> dict[str, str]:
    """Return the texts of overrides by the key that they set or remove."""
    return {override.key_of(text): text for text in overrides}


def is_local(value: Any) -> bool:
    """Whether data_files names files of a filesystem, and not those of a dataset of the hub."""
    return bool(value) and all(
        isinstance(name, str)
        and "://" not in name
        and (name.startswith(("/", "~", "./", "../")) or Path(name).exists())
        for name in listed(value)
    )


def listed(value: Any) -> list[Any]:
    """Return data_files as a list."""
    return value if isinstance(value, list) else [value]
