"""Whether model, tokenizer and data are there, readable and whole."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, BinaryIO

from launcher import paths
from launcher.checks import Context, Skipped, unreadable
from launcher.errors import RunFault


def model(context: Context) -> list[str] | str:
    checkpointer = context.config.get("checkpointer")
    folder = checkpointer.get("checkpoint_dir") if isinstance(checkpointer, dict) else None
    if not isinstance(checkpointer, dict) or not folder:
        raise Skipped("the recipe names no model folder")
    folder = Path(str(folder))
    if not context.prepared:
        raise Skipped(f"{folder} is made at submission")
    if not context.here(folder):
        raise Skipped(f"{folder} is only on the nodes")
    why = unreadable(folder)
    if why:
        return [
            f"checkpointer.checkpoint_dir {folder} {why}: {_fetch(context)}, or set "
            "checkpointer.checkpoint_dir="
        ]
    names = checkpoint_files(checkpointer)
    names = names or sorted(path.name for path in folder.glob("*.safetensors"))
    pickled = [name for name in names if not name.endswith(".safetensors")]
    if pickled and context.recipe.entry == "sft":
        return [
            f"checkpointer.checkpoint_files names {pickled[0]}, a pickle, which can run code when "
            "it is opened: download the model's *.safetensors and give those"
        ]
    missing = [name for name in names if unreadable(folder / name)]
    if missing:
        return [
            f"checkpointer.checkpoint_dir {folder} lacks {len(missing)} of the recipe's "
            f"checkpoint_files, first {missing[0]}: {_fetch(context)}, or set "
            "checkpointer.checkpoint_files="
        ]
    return _weights(folder, [name for name in names if name not in pickled])


def _fetch(context: Context) -> str:
    """Say how the model comes to its folder."""
    if (context.config.get("hub") or {}).get("model"):
        return f"cookbook download {context.recipe.typed}"
    return "download the model there"


def _weights(folder: Path, names: list[str]) -> list[str] | str:
    """Whether the files are whole: each as long as its header says, all that the index names."""
    found: list[str] = []
    total = 0
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError):
            return [f"{index} cannot be read: download it again"]
        found += [
            f"{folder} lacks {name}, which {index.name} names: finish the download"
            for name in sorted(named - set(names))
            if not (folder / name).is_file()
        ]
    for name in names:
        size, promised = (folder / name).stat().st_size, _promised_bytes(folder / name)
        total += size
        if promised is None:
            found.append(f"{folder / name} is no safetensors file: download it again")
        elif promised != size:
            found.append(f"{folder / name} holds {size:,} bytes of {promised:,}: download it again")
    record = _record(folder)
    found += _differences(folder, record)
    files = f"{len(names)} file{'s' if len(names) != 1 else ''}"
    known = f", as downloaded from {record['repo']} at {record['revision'][:12]}" if record else ""
    return found or f"{folder}: {files}, {total / 2**30:.1f} GiB{known}"


def _record(folder: Path) -> dict[str, Any]:
    """What cookbook download noted of the hub's index; {} where something else put the files."""
    try:
        return paths.read_json(folder / paths.DOWNLOAD_RECORD) or {}
    except RunFault:
        return {}


def _differences(folder: Path, record: dict[str, Any]) -> list[str]:
    """Files that are not what the hub's index says; one that was touched since is hashed again."""
    found = []
    for name, noted in record.get("files", {}).items():
        path = folder / name
        if not path.is_file():
            found.append(f"{path} is gone since the download: download it again")
            continue
        facts = path.stat()
        same = facts.st_size == noted["size"]
        if same and facts.st_mtime_ns != noted.get("mtime_ns"):
            with path.open("rb") as file:
                same = _sha256(file) == noted["sha256"]
        if not same:
            found.append(f"{path} differs from the hub's index: download it again")
    return found


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(2**22):
        digest.update(block)
    return digest.hexdigest()


def _promised_bytes(path: Path) -> int | None:
    """How long a safetensors file says that it is, None where it is none.

    It begins with the length of its header, 8 bytes little-endian; the header is JSON with the
    place of each tensor counted from its end.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= 2**27:
                return None
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    return 8 + length + max(ends, default=0)


def tokenizer(context: Context) -> list[str] | str:
    tokenizer = context.config.get("tokenizer")
    given = tokenizer if isinstance(tokenizer, dict) else {}
    files = {key: Path(str(given[key])) for key in _TOKENIZER_FILES if given.get(key)}
    files = {key: path for key, path in files.items() if context.here(path)}
    if not files:
        raise Skipped("the recipe names no tokenizer file on this machine")
    if not context.prepared:
        raise Skipped("it is made at submission")
    found = [
        f"tokenizer.{key} {path} {why}: it comes with the model's download, or set tokenizer.{key}="
        for key, path in files.items()
        for why in [unreadable(path)]
        if why
    ]
    return found or ", ".join(map(str, files.values()))


_TOKENIZER_FILES = ("path", "vocab_path", "merges_file")


def checkpoint_files(checkpointer: dict[str, Any]) -> list[str]:
    """Return the names that torchtune's checkpoint_files stands for: a list or a pattern."""
    files = checkpointer.get("checkpoint_files")
    if isinstance(files, dict):
        pattern, last = str(files.get("filename_format", "")), str(files.get("max_filename", ""))
        if not last.isdigit() or pattern.count("{}") != 2:
            return []
        return [pattern.format(str(k).zfill(len(last)), last) for k in range(1, int(last) + 1)]
    return [str(name) for name in files] if isinstance(files, list) else []


# What datasets.load_dataset takes as a source where the data are files.
_FILE_SOURCES = {"json", "csv", "parquet", "text", "arrow"}


def data(context: Context) -> list[str] | str:
    blocks = [
        (key, block)
        for key in ("dataset", "dataset_val")
        for value in [context.config.get(key)]
        for block in (value if isinstance(value, list) else [value])
        if isinstance(block, dict)
    ]
    found: list[str] = []
    files: list[str] = []
    for key, block in blocks:
        # What a validation set leaves out is the training set's.
        whole = {**blocks[0][1], **block} if key == "dataset_val" else block
        for path in _data_files({**whole, "data_files": block.get("data_files")}):
            if not context.here(path):
                continue
            files.append(str(path))
            why = unreadable(path) or _unfit(path, whole)
            if why:
                found.append(
                    f"{key}.data_files {path} {why}: mend the path, or set {key}.data_files="
                )
        source = block.get("source")
        if isinstance(source, str) and source.startswith(("/", "./", "../", "~")):
            folder = Path(source).expanduser()
            files.append(str(folder))
            why = unreadable(folder) if context.here(folder) else None
            if why:
                found.append(f"{key}.source {source} {why}: mend the path, or set {key}.source=")
    if not found and not files:
        raise Skipped("the data come from the hub, or are only on the nodes")
    return found or ", ".join(files)


def _data_files(block: dict[str, Any]) -> list[Path]:
    """The files that a dataset names; wildcards and addresses are the library's to open."""
    if block.get("source") not in _FILE_SOURCES:
        return []
    files = block.get("data_files")
    values = list(files.values()) if isinstance(files, dict) else [files]
    names = [name for value in values for name in (value if isinstance(value, list) else [value])]
    return [
        Path(str(name))
        for name in names
        if name and "://" not in str(name) and not re.search(r"[*?\[]", str(name))
    ]


def _unfit(path: Path, dataset: dict[str, Any]) -> str | None:
    """Say why a file of JSON lines cannot hold the samples, judged by its first line."""
    if path.suffix != ".jsonl":
        return None
    with path.open(encoding="utf-8", errors="replace") as file:
        first = next((line for line in file if line.strip()), None)
    if first is None:
        return "is empty"
    try:
        sample = json.loads(first)
    except ValueError:
        sample = None
    if not isinstance(sample, dict):
        return "cannot be used: its first line is no JSON object"
    columns = dataset.get("column_map")
    for column in columns.values() if isinstance(columns, dict) else ():
        if column not in sample:
            return f"has no column {column!r} of dataset.column_map, only {', '.join(sample)}"
    return None
