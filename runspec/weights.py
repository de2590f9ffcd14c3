"""What a model folder holds: its content as one hash, and the size of its weights."""

import hashlib
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from runspec import files

# What decides on a model's answers; a README does not.
_SUFFIXES = {".safetensors", ".json", ".jinja", ".model", ".txt", ".py"}
_THREADS = 8
# Of a GPU's memory, what a model's weights may take where it answers: the rest is for the keys and
# values of its texts, for activations and for CUDA. An assumption, not a measurement.
WEIGHTS_SHARE = 0.8


def base_of(folder: Path) -> Path | None:
    """Return the folder of the base model that an adapter names, None for a whole model."""
    adapter = files.read_json_or_none(folder / "adapter_config.json")
    return Path(str(adapter.get("base_model_name_or_path"))) if isinstance(adapter, dict) else None


def gives_scores(folder: Path) -> bool:
    """Whether a folder holds a reward model, or a reward model's adapter."""
    adapter = files.read_json_or_none(folder / "adapter_config.json")
    if isinstance(adapter, dict):
        return adapter.get("task_type") == "SEQ_CLS"
    content = files.read_json_or_none(folder / "config.json") or {}
    classes = content.get("architectures") or []
    return any(name.endswith("ForSequenceClassification") for name in classes)


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


def parameter_count(folder: Path) -> int:
    """Return how many numbers a model folder's safetensors hold, an adapter's base included.

    Only the headers are read, of the files that transformers loads: Mistral's folders hold the
    weights once more, as consolidated.safetensors.
    """
    base = base_of(folder)
    parts = [_weights(folder), _weights(base) if base is not None and base.is_dir() else []]
    return sum(map(_numbers, chain(*parts)))


def _weights(folder: Path) -> list[Path]:
    index = files.read_json_or_none(folder / "model.safetensors.index.json")
    if isinstance(index, dict):
        return [folder / name for name in sorted(set(index["weight_map"].values()))]
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


def _numbers(path: Path) -> int:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return sum(math.prod(each["shape"]) for key, each in header.items() if key != "__metadata__")


def ranks_for(parameters: int, number_bytes: int, memory_bytes: float) -> int:
    """Return over how many GPUs of so much memory a model's layers have to be spread."""
    return max(1, math.ceil(parameters * number_bytes / (memory_bytes * WEIGHTS_SHARE)))
