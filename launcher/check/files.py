"""Whether the files of model, tokenizer and dataset are there, readable and whole."""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from launcher.check import Context, Finding, Skipped, failed, ok, unreadable, warning
from launcher.paths import DOWNLOAD_RECORD
from launcher.recipe import own_data
from launcher.recipe.own import listed
from launcher.run import trust
from runspec import prepared
from runspec.files import SUBMISSION, parse_json, read_object
from runspec.keys.fields import FILE_SOURCES, STREAM, names_no_files
from runspec.weights import NoWeights, weight_files

_AGAIN = "download it again"
# Variables with which the libraries of the Hub do not ask it.
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


def weights(context: Context) -> Iterable[Finding]:
    """Check the model's folder, that of a teacher, and whose run an adapter is of."""
    return [*_weights(context), *_teacher(context), *_adapter(context)]


def _weights(context: Context) -> list[Finding]:
    block = context.config.get("checkpointer")
    checkpointer = block if isinstance(block, dict) else {}
    if not checkpointer.get("checkpoint_dir"):
        raise Skipped("the recipe names no model folder")
    folder = Path(str(checkpointer["checkpoint_dir"]))
    if not context.prepared:
        raise Skipped(f"{folder} is made at submission")
    if not context.here(folder):
        raise Skipped(f"{folder} is only on the nodes")
    if why := unreadable(folder):
        remedy = f"{_download(context)}, or set checkpointer.checkpoint_dir="
        return [failed("model", f"checkpointer.checkpoint_dir {folder} {why}", remedy)]
    if context.config.get("from_scratch"):
        if why := unreadable(folder / "config.json"):
            remedy = "put the config.json of the model there, or set checkpointer.checkpoint_dir="
            return [failed("model", f"{folder / 'config.json'} {why}", remedy)]
        return [ok("model", f"{folder}: config.json; its weights are drawn by the seed")]
    complete = context.recipe.entry.method is not None
    names = checkpoint_files(checkpointer)
    if not names:
        if not (complete or any(folder.glob("*.safetensors"))):
            raise Skipped(f"{folder} has no safetensors, and no other weights are looked at")
        return _of_folder(folder)
    pickles = [name for name in names if not name.endswith(".safetensors")]
    if pickles and complete:
        message = f"checkpointer.checkpoint_files names {pickles[0]}, a pickle, which can run code"
        remedy = "download the model's *.safetensors and name those"
        return [failed("model", f"{message} when it is opened", remedy)]
    if missing := [name for name in names if unreadable(folder / name)]:
        message = f"lacks {len(missing)} of the recipe's checkpoint_files, first {missing[0]}"
        remedy = f"{_download(context)}, or set checkpointer.checkpoint_files="
        return [failed("model", f"checkpointer.checkpoint_dir {folder} {message}", remedy)]
    return whole(folder, [name for name in names if name not in pickles])


def _teacher(context: Context) -> list[Finding]:
    method = context.recipe.entry.method
    key = "" if method is None else method.teacher_key
    folder = Path(str(context.config.get(key) or ""))
    if not (key and context.config.get(key) and context.here(folder)):
        return []
    if why := unreadable(folder):
        remedy = f"{_download(context, 'teacher')}, or set {key}="
        return [failed("model", f"{key} {folder} {why}", remedy)]
    return _of_folder(folder)


def _adapter(context: Context) -> Iterator[Finding]:
    checkpointer = context.config.get("checkpointer")
    named = checkpointer.get("adapter_checkpoint") if isinstance(checkpointer, dict) else None
    path = Path(str(named or "")).expanduser().absolute()
    run = next((each for each in path.parents if os.path.isfile(each / SUBMISSION)), None)
    trusted = context.cluster.trusted_users
    if named and run and (text := trust.fault(run, trusted)):
        remedy = trust.remedy(run, context.cluster.name, trusted)
        message = f"checkpointer.adapter_checkpoint is in a run that others can change: {text}"
        yield failed("model", message, f"{remedy}, or copy the adapter to a folder of yours")


def _of_folder(folder: Path) -> list[Finding]:
    try:
        return whole(folder, weight_files(folder))
    except NoWeights as error:
        return [failed("model", str(error))]


def _download(context: Context, key: str = "model") -> str:
    """Say how the model, or another one that hub names, comes to its folder."""
    if (context.config.get("hub") or {}).get(key):
        return f"cookbook download {context.recipe.given_name}"
    return "download the model there"


def whole(folder: Path, names: list[str]) -> list[Finding]:
    """Check the weights against their headers; cookbook download checks them against the hub.

    Args:
        names: of the files that hold them.
    """
    findings = [
        failed("model", f"{folder} lacks {name}, a file of the model's weights", _AGAIN)
        for name in names
        if not (folder / name).is_file()
    ]
    names = [name for name in names if (folder / name).is_file()]
    sizes = {folder / name: (folder / name).stat().st_size for name in names}
    for path, size in sizes.items():
        promised = _promised_bytes(path)
        if promised is None:
            findings.append(failed("model", f"{path} is no safetensors file", _AGAIN))
        elif promised != size:
            findings.append(failed("model", f"{path} has {size:,} of {promised:,} bytes", _AGAIN))
    record = read_object(folder / DOWNLOAD_RECORD) or {}
    count = f"{len(names)} file{'s' * (len(names) != 1)}"
    message = f"{folder}: {count}, {sum(sizes.values()) / 2**30:.1f} GiB"
    if record:
        message += f", as downloaded from {record['repo']} at {record['revision'][:12]}"
    return findings or [ok("model", message)]


def _promised_bytes(path: Path) -> int | None:
    """Return the length that a safetensors file's header promises, None if it is none.

    It begins with the length of its header, 8 bytes little-endian; the header is JSON with each
    tensor's offsets, which count from the header's end.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= 2**27:
                return None
            header = parse_json(file.read(length))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    return 8 + length + max(ends, default=0)


def tokenizer(context: Context) -> Iterable[Finding]:
    files = {key: p for key, p in tokenizer_files(context.config).items() if context.here(p)}
    if not files:
        raise Skipped("the recipe names no tokenizer file on this machine")
    if not context.prepared:
        raise Skipped("it is made at submission")
    remedy = "it comes with the model's download, or set tokenizer."
    findings = [
        failed("tokenizer", f"tokenizer.{key} {path} {why}", f"{remedy}{key}=")
        for key, path in files.items()
        if (why := unreadable(path))
    ]
    return findings or [ok("tokenizer", ", ".join(map(str, files.values())))]


def tokenizer_files(config: dict[str, Any]) -> dict[str, Path]:
    """Return the files that the recipe's tokenizer reads, by the key that names them."""
    block, keys = config.get("tokenizer"), ("path", "vocab_path", "merges_file")
    given = block if isinstance(block, dict) else {}
    return {key: Path(str(given[key])) for key in keys if given.get(key)}


def checkpoint_files(checkpointer: dict[str, Any]) -> list[str]:
    """Return the names that torchtune's checkpoint_files stands for: a list or a pattern."""
    files = checkpointer.get("checkpoint_files")
    if isinstance(files, dict):
        pattern, last = str(files.get("filename_format", "")), str(files.get("max_filename", ""))
        if not last.isdigit() or pattern.count("{}") != 2:
            return []
        return [pattern.format(str(k).zfill(len(last)), last) for k in range(1, int(last) + 1)]
    return [str(name) for name in files] if isinstance(files, list) else []


def dataset(context: Context) -> Iterable[Finding]:
    findings: list[Finding] = []
    seen: list[Path] = []
    for key, block, whole in dataset_blocks(context.config):
        # A stream's source has no component; the trainer names it.
        if "_component_" in whole and (why := names_no_files(whole)):
            findings.append(failed("dataset", f"{key}.{why}", f"set {key}.data_files="))
        named = data_files({**whole, "data_files": block.get("data_files")})
        for path in filter(context.here, named):
            if context.made_later(path):
                continue
            seen.append(path)
            if why := unreadable(path) or _unfit(path, whole):
                remedy = f"fix the path or the file, or set {key}.data_files="
                findings.append(failed("dataset", f"{key}.data_files {path} {why}", remedy))
        if block.get("_component_") == prepared.COMPONENT:
            folder = Path(str(block.get("data_dir")))
            seen.append(folder)
            if context.here(folder):
                findings += _prepared(key, folder)
        source = block.get("source")
        if isinstance(source, str) and source.startswith(("/", "./", "../", "~")):
            folder = Path(source).expanduser()
            seen.append(folder)
            if context.here(folder) and (why := unreadable(folder)):
                remedy = f"fix the path, or set {key}.source="
                findings.append(failed("dataset", f"{key}.source {source} {why}", remedy))
    findings += _not_downloaded(context)
    if not seen and not findings:
        raise Skipped("the data come from the hub, are made at submission, or only on the nodes")
    return findings or [ok("dataset", ", ".join(map(str, seen)))]


def hub_name(config: dict[str, Any], block: dict[str, Any]) -> str | None:
    """Return the name on the Hub of a dataset, None if it does not come from there."""
    name = block.get("source") or (config.get("hub") or {}).get("dataset")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@\S+)?", name):
        return None
    return name.partition("@")[0] if on_hub(block) else None


def _not_downloaded(context: Context) -> Iterator[Finding]:
    """Name the datasets of the Hub that are not in the folder where jobs look."""
    variables = {**context.cluster.environment, **(context.config.get("env") or {})}
    offline = any(
        str(variables.get(name, "")).lower() in ("1", "on", "yes", "true") for name in _OFFLINE
    )
    home = context.cluster.root / "hf"
    hub = context.config.get("hub")
    named = (hub if isinstance(hub, dict) else {}).get("dataset")
    blocks = dataset_blocks(context.config)
    for name in dict.fromkeys(hub_name(context.config, whole) for _, _, whole in blocks):
        if name is None or any(home.glob(f"hub/datasets--{name.replace('/', '--')}/snapshots/*")):
            continue
        if any(home.glob(f"datasets/{name.replace('/', '___')}/*")):
            continue
        message = f"{name} of the Hub is not in the cache ({home})"
        download = f"cookbook download {context.recipe.given_name}"
        if str(named).partition("@")[0] != name:
            download += f" +hub.dataset={name}" if named is None else f" hub.dataset={name}"
        if offline:
            yield failed("dataset", f"{message}, and jobs of this site are offline", download)
        else:
            remedy = f"{download}, or let the job download it, if the nodes have internet access"
            yield warning("dataset", message, remedy)


def dataset_blocks(config: dict[str, Any]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return each dataset: its key, its block, and the block with what it leaves out.

    What a validation set leaves out is the training set's.
    """
    blocks = [
        (key, block)
        for key in prepared.BLOCKS
        for block in listed(config.get(key))
        if isinstance(block, dict)
    ]
    candidates = [
        (key, block, {**blocks[0][1], **block} if key == "dataset_val" else block)
        for key, block in blocks
    ]
    # A stream's sources are Parquet.
    return [
        (key, each, {"source": "parquet", **each} if each is not block else whole)
        for key, block, whole in candidates
        for each in _sources(block)
    ]


def _sources(block: dict[str, Any]) -> list[dict[str, Any]]:
    sources = block.get("sources")
    if block.get("_component_") != STREAM or not isinstance(sources, list):
        return [block]
    return [source for source in sources if isinstance(source, dict)]


def _prepared(key: str, folder: Path) -> Iterator[Finding]:
    """Check a split of a prepared set: it is there, and as it was when it was made."""
    name = folder.parent.parent.parent.name
    if why := unreadable(folder):
        there = sorted(path.name for path in folder.parent.glob("[!_]*/"))
        remedy = f"it has {', '.join(there)}" if there else f"cookbook prepare {name}"
        yield failed("dataset", f"{key}: prepared:{name}@{folder.name} {why}", remedy)
        return
    if changed := prepared.changes(folder):
        message = f"{key}: prepared:{name}@{folder.name} has changed since it was prepared"
        yield failed("dataset", f"{message} ({changed[0]})", "prepare it again: cookbook prepare")


def data_files(block: dict[str, Any]) -> list[Path]:
    """Return the files that a dataset names; wildcards and addresses are the library's to open."""
    if block.get("source") not in FILE_SOURCES:
        return []
    named = block.get("data_files")
    values = named.values() if isinstance(named, dict) else [named]
    names = [str(name) for value in values for name in listed(value) if name]
    return [Path(name) for name in names if not re.search(r"://|[*?\[]", name)]


def on_hub(block: dict[str, Any]) -> bool:
    """Whether a dataset comes from the hub, and not from files."""
    source = block.get("source")
    is_files = source in FILE_SOURCES or block.get("_component_") == prepared.COMPONENT
    return not (is_files or (source and Path(str(source)).expanduser().exists()))


def _unfit(path: Path, block: dict[str, Any]) -> str | None:
    """Say why a file of JSON lines cannot hold the samples, from its first line that has text."""
    if path.suffix != ".jsonl":
        return None
    try:
        sample = next(own_data.records_of(path, "json"), None)
    except ValueError as error:
        return f"cannot be used: {error}"
    if sample is None:
        return "is empty"
    columns = block.get("column_map")
    for column in columns.values() if isinstance(columns, dict) else ():
        if column not in sample:
            only = ", ".join(sample)
            return f"has no column {column!r} of column_map, only {only}"
    return None
