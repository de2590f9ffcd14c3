"""A dataset's tokens on disk: made once by all ranks together, memory-mapped afterwards.

One folder per dataset, named by what its tokens depend on: tokens as int32, of which those that are
not trained have all bits inverted, and a table of the samples, in a part for each rank that made
it. The folder appears under a temporary name and is renamed when all parts are there.
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from runspec import files
from trainer.config import TrainConfig, instantiate
from trainer.data import origin, tokenizers
from trainer.errors import ConfigError
from trainer.layers.batch import IGNORE_INDEX
from trainer.parallel.world import World

FORMAT = 2
META = "meta.json"
TOKENS, SAMPLES = "tokens_{}.bin", "samples_{}.npy"
# What the tokens of a sample depend on besides the config and the data.
PACKAGES = ("torchtune", "tokenizers", "transformers", "datasets")
TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".txt")
PREPARED = "trainer.data.prepared.prepared_dataset"
CHAT = "torchtune.datasets.chat_dataset"
CONVERSATIONS = "trainer.data.conversations.conversation_dataset"
PROGRESS_EVERY_S = 15.0
# Until a folder that another node has renamed is seen here.
SHARED_FOLDER_LIMIT_S = 120.0
LEFT_OVER_S = 24 * 3600.0


class TokenisedDataset:
    """The samples of one dataset, read from its folder.

    lengths: tokens of each sample, int64 [samples]. targets: how many of them are predicted and
    trained. fingerprints: a 64-bit hash of each sample's tokens and mask.

    Raises:
        ConfigError: files are missing or cut short.
    """

    def __init__(self, folder: Path, block: dict[str, Any] | None = None) -> None:
        meta = files.read_json_or_none(folder / META)
        if not isinstance(meta, dict):
            raise ConfigError(f"data_cache_dir: {folder} is damaged; delete it and start again")
        self.folder, self._block = folder, block or {}
        self.highest_token, self.highest_sample = meta["highest"]
        self.split_sizes: dict[str, int] = meta["split_sizes"]
        tables = [np.load(folder / SAMPLES.format(number)) for number in meta["parts"]]
        self._parts = [
            _mapped(folder / TOKENS.format(number), table[:, 0])
            for number, table in zip(meta["parts"], tables, strict=True)
        ]
        self.lengths, self.targets, self.fingerprints = np.concatenate(tables).T.copy()
        self._part_of = np.repeat(np.arange(len(tables)), [len(t) for t in tables])
        self._begins = np.concatenate([np.cumsum(t[:, 0]) - t[:, 0] for t in tables])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32 [n], trained bool [n]) of a sample."""
        begin = int(self._begins[index])
        stored = self._parts[self._part_of[index]][begin : begin + int(self.lengths[index])]
        trained = stored >= 0
        return np.where(trained, stored, ~stored), trained

    def origin(self, index: int) -> str:
        """Where a sample comes from."""
        return origin.of_sample(self._block, index)

    @cached_property
    def sha256(self) -> str:
        """A hash of every sample, the same wherever the data lies."""
        return hashlib.sha256(self.fingerprints.tobytes()).hexdigest()[:16]


def open_dataset(
    key: str, block: dict[str, Any], config: TrainConfig, world: World, tokenizer: Any
) -> TokenisedDataset:
    """The tokenised dataset that `block` names; all ranks call this together.

    Args:
        key: the config's key, for messages.

    Raises:
        ConfigError: the dataset cannot be opened, is empty, or a sample cannot be tokenised.
    """
    block = {k: v for k, v in block.items() if k not in ("packed", "split_across_pack")}
    if block["_component_"] == PREPARED:
        from trainer.data import prepared  # other runs do not pay for it

        block = prepared.by_files(block)

    def find() -> tuple[Path, Any]:
        # Data of the hub changes under one name: only the opened dataset tells its version.
        opened = None if origin.data_files(block) else _opened(key, block, tokenizer)
        return config.data_cache / _name(block, config.tokenizer, opened), opened

    folder, opened = world.on_main(find) or (None, None)
    folder = world.gather(folder)[0]
    if not world.gather((folder / META).is_file())[0]:
        # Rank 0 first, so that one process alone converts the files.
        first = world.on_main(lambda: opened or _opened(key, block, tokenizer))
        samples = world.on_all(lambda: _opened(key, block, tokenizer) if first is None else first)
        make(key, block, folder, samples, tokenizer, world)
    return world.on_all(lambda: TokenisedDataset(_seen(folder), block))


def _opened(key: str, block: dict[str, Any], tokenizer: Any) -> Any:
    from datasets import disable_progress_bars
    from datasets.exceptions import DatasetGenerationError

    disable_progress_bars()
    try:
        samples = instantiate(key, _with_own_template(block, tokenizer), tokenizer)
    except StopIteration:
        # So datasets answers to a file of no line.
        raise ConfigError(f"{key}: holds no sample") from None
    except DatasetGenerationError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ConfigError(
            f"{key}: {origin.broken_line(block) or f'cannot be read: {reason}'}"
        ) from None
    except (OSError, ConnectionError) as error:
        raise ConfigError(f"{key}: cannot be opened: {str(error).splitlines()[0]}") from None
    if len(samples) == 0:
        split = f" (split {block['split']})" if "split" in block else ""
        raise ConfigError(f"{key}: holds no sample{split}")
    return samples


def _with_own_template(block: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """torchtune's chat_dataset in OpenAI's form as ours, if the tokenizer has the chat template.

    torchtune's knows no tool calls: for a message without content it takes the one before it.
    """
    style = block.get("conversation_style") == "openai"
    if not (style and block["_component_"] == CHAT and not block.get("train_on_input")):
        return block
    if not isinstance(tokenizer, tokenizers.HuggingFaceTokenizer):
        return block
    others = {k: v for k, v in block.items() if k not in ("conversation_style", "train_on_input")}
    return others | {"_component_": CONVERSATIONS}


def _name(block: dict[str, Any], tokenizer_block: dict[str, Any], opened: Any) -> str:
    """The folder's name: a hash of all that the tokens depend on."""
    info = getattr(getattr(opened, "_data", None), "info", None)
    content = {
        "format": FORMAT,
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "code": [files.sha256(Path(__file__).with_name(name)) for name in _makers(block)],
        "dataset": block,
        "tokenizer": tokenizer_block,
        "data": [files.sha256(path) for path in origin.data_files(block)],
        "tokenizer_files": [files.sha256(path) for path in _tokenizer_files(tokenizer_block)],
        # The addresses of files on the hub hold the commit.
        "addresses": sorted(getattr(info, "download_checksums", None) or {}),
    }
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _makers(block: dict[str, Any]) -> tuple[str, ...]:
    """The modules beside this one that decide on a sample's tokens."""
    conversations = block["_component_"] in (CHAT, CONVERSATIONS)
    return ("tokenizers.py", *(("conversations.py",) if conversations else ()))


def _tokenizer_files(block: dict[str, Any]) -> list[Path]:
    found: set[Path] = set()
    for name in origin.texts(list(block.values())):
        path = Path(name)
        if path.is_dir():
            found |= {p for p in path.iterdir() if p.suffix in TOKENIZER_SUFFIXES}
        elif path.is_file():
            found.add(path)
    return sorted(found)


def make(
    key: str, block: dict[str, Any], folder: Path, samples: Any, tokenizer: Any, world: World
) -> None:
    """Tokenise on all ranks, a range of samples each, and give the folder its name.

    Args:
        key, block: of the config, for messages.
        samples: by index, mappings with the `tokens` and the `labels` of a sample.
        tokenizer: its `max_seq_len` cuts samples, if it has one.

    Raises:
        ConfigError: the folder cannot be written to, or a sample cannot be tokenised.
    """
    temporary = world.gather(folder.with_name(f".tmp_{folder.name}.{os.urandom(4).hex()}"))[0]
    world.on_main(lambda: _begin(temporary))
    limit = getattr(tokenizer, "max_seq_len", None)
    try:
        highest = world.on_all(
            lambda: _write_part(key, block, _seen(temporary), samples, limit, world)
        )
        parts = [part for part in enumerate(world.gather(highest)) if part[1] is not None]
        world.on_main(lambda: _publish(temporary, folder, parts, samples))
    except Exception:
        if world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _begin(temporary: Path) -> None:
    """Make the folder, and remove what starts left behind that were killed at this point."""
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"data_cache_dir: {temporary.parent} cannot be written to: {error.strerror}; "
            "set data_cache_dir to a folder that all nodes share"
        ) from None
    for path in temporary.parent.glob(".tmp_*"):
        # Another start may remove it at the same time.
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > LEFT_OVER_S:
                shutil.rmtree(path, ignore_errors=True)


def _publish(
    temporary: Path, folder: Path, parts: list[tuple[int, tuple[int, int]]], samples: Any
) -> None:
    splits = getattr(getattr(getattr(samples, "_data", None), "info", None), "splits", None) or {}
    meta = {
        "parts": [number for number, _ in parts],
        "highest": max((highest for _, highest in parts), key=lambda pair: pair[0]),
        "split_sizes": {name: split.num_examples for name, split in splits.items()},
    }
    files.write_json(temporary / META, meta)
    try:
        os.rename(temporary, folder)
    except OSError:
        if not (folder / META).is_file():
            raise
        # Another run was quicker, and its folder holds the same.
        shutil.rmtree(temporary, ignore_errors=True)
    else:
        files.fsync_path(folder.parent)


def _seen(folder: Path) -> Path:
    """`folder`, once this node sees it."""
    deadline = time.monotonic() + SHARED_FOLDER_LIMIT_S
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"data_cache_dir: {folder} was made on another node and is not seen here; "
                "set data_cache_dir to a folder that all nodes share"
            )
        time.sleep(0.2)
    return folder


def _write_part(
    key: str, block: dict[str, Any], folder: Path, samples: Any, limit: int | None, world: World
) -> tuple[int, int] | None:
    """Tokenise this rank's range; (highest token, its sample), None if the range is empty."""
    count, rank = len(samples), world.rank
    indices = range(count * rank // world.size, count * (rank + 1) // world.size)
    if not indices:
        return None
    table = np.zeros((len(indices), 3), dtype=np.int64)
    highest = (-1, 0)
    last_said = time.monotonic()
    paths = [folder / name.format(rank) for name in (TOKENS, SAMPLES)]
    with open(paths[0], "wb") as file:
        for row, index in enumerate(indices):
            try:
                tokens, trained = _sample(samples, index, limit)
            except ConfigError as error:
                where = origin.of_sample(block, index, _row(samples, index))
                raise ConfigError(f"{key}: {where}: {error}") from error
            table[row] = len(tokens), trained[1:].sum(), _fingerprint(tokens, trained)
            highest = max(highest, (int(tokens.max()), index), key=lambda pair: pair[0])
            file.write(np.where(trained, tokens, ~tokens).tobytes())
            if time.monotonic() - last_said > PROGRESS_EVERY_S:
                last_said = time.monotonic()
                world.say(f"tokenising {key}: {row + 1:,} of {len(indices):,} samples of this rank")
    np.save(paths[1], table)
    for path in paths:
        files.fsync_path(path)
    return highest


def _sample(samples: Any, index: int, limit: int | None) -> tuple[Any, Any]:
    """(tokens int32 [n], trained bool [n]) of a sample."""
    try:
        _check_contents(samples, index)
        sample = samples[index]
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        raise ConfigError(_reason(samples, index, error)) from error
    tokens = np.asarray(sample["tokens"], dtype=np.int32)[:limit]
    labels = np.asarray(sample["labels"], dtype=np.int64)[:limit]
    trained = labels != IGNORE_INDEX
    if tokens.ndim != 1 or not len(tokens) or tokens.shape != labels.shape:
        raise ConfigError("holds no tokens, or not as many labels as tokens")
    if not np.array_equal(labels[trained], tokens[trained]):
        raise ConfigError("its labels are not its tokens; only these can be trained")
    return tokens, trained


def _check_contents(samples: Any, index: int) -> None:
    """Refuse a message without content where torchtune would repeat the one before it."""
    transform = getattr(samples, "_message_transform", None)
    if type(transform).__name__ != "OpenAIToMessages":
        return
    messages = (_row(samples, index) or {}).get(transform._column_map["messages"]) or []
    for number, message in enumerate(messages, 1):
        if not isinstance(message["content"], str | list):
            raise ConfigError(
                f"message {number} ({message['role']}) has no content, and torchtune's tokenizers "
                "know no tool calls; leave the tokenizer block out, so that the model folder's "
                "chat template is used"
            )


def _row(samples: Any, index: int) -> dict[str, Any] | None:
    """The columns of a sample before they become messages; None if the dataset keeps none."""
    try:
        row = samples._data[index]
    except (AttributeError, TypeError, KeyError):
        return None
    return dict(row) if isinstance(row, Mapping) else None


def _reason(samples: Any, index: int, error: Exception) -> str:
    """Why a sample cannot be tokenised; names the missing column if the dataset tells which."""
    if isinstance(error, KeyError):
        return f"there is no column {error}"
    transform = getattr(samples, "_message_transform", None)
    columns = getattr(transform, "column_map", None) or getattr(transform, "_column_map", None)
    used = list((columns or {}).values()) or [getattr(samples, "_column", None)]
    row = _row(samples, index)
    missing = [] if row is None else [repr(name) for name in used if name and row.get(name) is None]
    return f"there is no {' and no '.join(missing)}" if missing else str(error)


def _fingerprint(tokens: np.ndarray, trained: np.ndarray) -> int:
    digest = hashlib.blake2b(tokens.tobytes() + trained.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _mapped(path: Path, lengths: np.ndarray) -> np.ndarray:
    if not path.is_file() or path.stat().st_size != 4 * lengths.sum():
        raise ConfigError(f"data_cache_dir: {path} is damaged; delete its folder and start again")
    # A plain array: each slice of a memmap, and each operation on it, runs Python code of its own.
    return np.asarray(np.memmap(path, dtype=np.int32, mode="r"))
