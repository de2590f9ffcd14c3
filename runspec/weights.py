"""The content of a model folder as one hash, the same wherever a copy of it lies."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runspec import files

# What decides on a model's answers; a README does not.
_SUFFIXES = {".safetensors", ".json", ".jinja", ".model", ".txt", ".py"}
_THREADS = 8


def base_of(folder: Path) -> Path | None:
    """Return the folder of the base model that an adapter names, None for a whole model."""
    adapter = files.read_json_or_none(folder / "adapter_config.json")
    return Path(str(adapter.get("base_model_name_or_path"))) if isinstance(adapter, dict) else None


def content_files(folder: Path) -> list[Path]:
    """Return the files of a model folder that decide on its answers, an adapter's base included."""
    base = base_of(folder)
    return [*_own_files(folder), *(_own_files(base) if base is not None and base.is_dir() else ())]


def _own_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.suffix in _SUFFIXES and path.is_file():
            yield path


def content_sha256(folder: Path) -> str:
    """Return the SHA-256 of the names and contents of a model's files, read in parallel.

    An adapter's base counts, too. Sizes and times of files do not: a copy has the same hash.
    """
    paths = content_files(folder)
    # hashlib lets other threads run while it reads a large block.
    with ThreadPoolExecutor(_THREADS) as pool:
        hashes = list(pool.map(files.sha256, paths))
    lines = [f"{path.name} {sha256}\n" for path, sha256 in zip(paths, hashes, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
