"""What a model folder holds: its content as one hash, and the size of its weights."""

import hashlib
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runspec import files
from runspec.files import patient_json

# Of what a tokenizer is read from, and of what decides on a model's answers; a README does not.
_OF_TOKENIZER = {".json", ".jinja", ".model", ".txt"}
_SUFFIXES = _OF_TOKENIZER | {".safetensors", ".py"}
# In it transformers keeps chat templates besides the default one, such as that for tools.
CHAT_TEMPLATES = "additional_chat_templates"
_THREADS = 8
# Of a GPU's memory, what a model's weights may take where it answers: the rest is for the keys and
# values of its texts, for activations and for CUDA. An assumption, not a measurement.
WEIGHTS_SHARE = 0.8
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# The key of config.json by which a folder has other names for these.
OTHER_NAME = "transformers_weights"
ADAPTER_CONFIG, _ADAPTER = "adapter_config.json", "adapter_model.safetensors"


class NoWeights(ValueError):
    """A folder does not say which of its files are the model's weights; one line, with a remedy."""


def weight_files(folder: Path) -> list[str]:
    """Return the names of the files of weights that transformers reads of a model's folder.

    They are one whole file, or those that the index names. Other files there belong to another
    model or program: shards of an older revision, Mistral's consolidated.safetensors. An adapter's
    folder has the adapter's file.

    Raises:
        NoWeights: there is neither such a file nor a readable index.
        OSError: the folder cannot be read.
    """
    if (folder / ADAPTER_CONFIG).is_file():
        return [_ADAPTER]
    path = folder / "config.json"
    try:
        named = (patient_json(path) or {}).get(OTHER_NAME)
        if named and not str(named).endswith(".index.json"):
            return [str(named)]
        if not named and (folder / WHOLE).is_file():
            return [WHOLE]
        path = folder / (named or INDEX)
        if (content := patient_json(path)) is not None:
            return sorted(set(map(str, content["weight_map"].values())))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NoWeights(f"{path} cannot be read; download it again") from None
    there = sorted(path.name for path in folder.glob("*.safetensors"))
    held = f"contains {there[0]}, but neither" if there else "has neither"
    raise NoWeights(
        f"{folder} {held} {WHOLE} nor {INDEX}, which say what the model's weights are; "
        "download the model as transformers reads it"
    )


def base_of(folder: Path) -> Path | None:
    """Return the folder of the base model that an adapter names, None for a whole model."""
    adapter = patient_json(folder / ADAPTER_CONFIG)
    return None if adapter is None else Path(str(adapter.get("base_model_name_or_path")))


def gives_scores(folder: Path) -> bool:
    """Whether a folder holds a reward model, or a reward model's adapter."""
    if (adapter := patient_json(folder / ADAPTER_CONFIG)) is not None:
        return adapter.get("task_type") == "SEQ_CLS"
    content = patient_json(folder / "config.json") or {}
    classes = content.get("architectures") or []
    return any(name.endswith("ForSequenceClassification") for name in classes)


def content_files(folder: Path) -> list[Path]:
    """Return the files of a model folder that decide on its answers, an adapter's base included."""
    base = base_of(folder)
    return [*_own_files(folder), *(_own_files(base) if base is not None and base.is_dir() else ())]


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a folder that its tokenizer may be read from, config.json among them."""
    return [path for path in _own_files(folder) if path.suffix in _OF_TOKENIZER]


def _own_files(folder: Path) -> Iterator[Path]:
    for path in (*sorted(folder.iterdir()), *sorted((folder / CHAT_TEMPLATES).glob("*"))):
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

    Only the headers are read, of the files that transformers reads.

    Raises:
        NoWeights: a folder does not say which files these are.
        OSError: one cannot be read.
    """
    base = base_of(folder)
    folders = [folder, *([base] if base is not None and base.is_dir() else ())]
    return sum(_numbers(each / name) for each in folders for name in weight_files(each))


def _numbers(path: Path) -> int:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = files.parse_json(file.read(length))
    return sum(math.prod(each["shape"]) for key, each in header.items() if key != "__metadata__")


def ranks_for(parameters: int, number_bytes: int, memory_bytes: float) -> int:
    """Return over how many GPUs of so much memory a model's layers have to be spread."""
    return max(1, math.ceil(parameters * number_bytes / (memory_bytes * WEIGHTS_SHARE)))
