"""Whether the model's weights and its tokenizer are there, readable and whole."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from launcher.checks import Context, Finding, Skipped, failed, ok, unreadable
from launcher.paths import DOWNLOAD_RECORD
from runspec.files import read_json_or_none, sha256

_AGAIN = "download it again"


def weights(context: Context) -> Iterable[Finding]:
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
        remedy = f"{_download(context)}, or set checkpointer.checkpoint_dir="
        return [failed("model", f"checkpointer.checkpoint_dir {folder} {why}", remedy)]
    names = checkpoint_files(checkpointer)
    names = names or sorted(path.name for path in folder.glob("*.safetensors"))
    pickles = [name for name in names if not name.endswith(".safetensors")]
    if pickles and context.recipe.entry.checked == "complete":
        words = f"checkpointer.checkpoint_files names {pickles[0]}, a pickle, which can run code"
        remedy = "download the model's *.safetensors and name those"
        return [failed("model", f"{words} when it is opened", remedy)]
    missing = [name for name in names if unreadable(folder / name)]
    if missing:
        words = (
            f"checkpointer.checkpoint_dir {folder} lacks {len(missing)} of the recipe's "
            f"checkpoint_files, first {missing[0]}"
        )
        remedy = f"{_download(context)}, or set checkpointer.checkpoint_files="
        return [failed("model", words, remedy)]
    return _whole(folder, [name for name in names if name not in pickles])


def _download(context: Context) -> str:
    """Say how the model comes to its folder."""
    if (context.config.get("hub") or {}).get("model"):
        return f"cookbook download {context.recipe.given_name}"
    return "download the model there"


def _whole(folder: Path, names: list[str]) -> list[Finding]:
    """Check the weights against their headers, the model's index and the download's record."""
    found: list[Finding] = []
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError):
            return [failed("model", f"{index} cannot be read", _AGAIN)]
        found += [
            failed("model", f"{folder} lacks {name}, which {index.name} names", _AGAIN)
            for name in sorted(named - set(names))
            if not (folder / name).is_file()
        ]
    sizes = {name: (folder / name).stat().st_size for name in names}
    for name, size in sizes.items():
        promised = _promised_bytes(folder / name)
        if promised is None:
            found.append(failed("model", f"{folder / name} is no safetensors file", _AGAIN))
        elif promised != size:
            words = f"{folder / name} has {size:,} of {promised:,} bytes"
            found.append(failed("model", words, _AGAIN))
    record = read_json_or_none(folder / DOWNLOAD_RECORD)
    record = record if isinstance(record, dict) else {}
    found += _differences(folder, record)
    count = f"{len(names)} file{'s' * (len(names) != 1)}"
    words = f"{folder}: {count}, {sum(sizes.values()) / 2**30:.1f} GiB"
    if record:
        words += f", as downloaded from {record['repo']} at {record['revision'][:12]}"
    return found or [ok("model", words)]


def _differences(folder: Path, record: dict[str, Any]) -> Iterator[Finding]:
    """Check files against what cookbook download recorded; a touched file is hashed again."""
    for name, noted in record.get("files", {}).items():
        path = folder / name
        if not path.is_file():
            yield failed("model", f"{path} was downloaded and is gone", _AGAIN)
            continue
        facts = path.stat()
        same = facts.st_size == noted["size"]
        if same and facts.st_mtime_ns != noted.get("mtime_ns"):
            same = sha256(path) == noted["sha256"]
        if not same:
            yield failed("model", f"{path} differs from the hub's index", _AGAIN)


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
            header = json.loads(file.read(length))
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
    found = [
        failed("tokenizer", f"tokenizer.{key} {path} {why}", f"{remedy}{key}=")
        for key, path in files.items()
        if (why := unreadable(path))
    ]
    return found or [ok("tokenizer", ", ".join(map(str, files.values())))]


def tokenizer_files(config: dict[str, Any]) -> dict[str, Path]:
    """Return the files that the recipe's tokenizer reads, by the key that names them."""
    block = config.get("tokenizer")
    block = block if isinstance(block, dict) else {}
    keys = ("path", "vocab_path", "merges_file")
    return {key: Path(str(block[key])) for key in keys if block.get(key)}


def checkpoint_files(checkpointer: dict[str, Any]) -> list[str]:
    """Return the names that torchtune's checkpoint_files stands for: a list or a pattern."""
    files = checkpointer.get("checkpoint_files")
    if isinstance(files, dict):
        pattern, last = str(files.get("filename_format", "")), str(files.get("max_filename", ""))
        if not last.isdigit() or pattern.count("{}") != 2:
            return []
        return [pattern.format(str(k).zfill(len(last)), last) for k in range(1, int(last) + 1)]
    return [str(name) for name in files] if isinstance(files, list) else []
