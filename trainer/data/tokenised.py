"""A dataset's tokens on disk: made once by all ranks together, memory-mapped afterwards.

One folder per dataset, named by what its tokens depend on: tokens as int32, of which those that are
not trained have all bits inverted, and a table of the samples. Each rank that makes it writes a
file of tokens; no more than WRITERS do, so that a rank opens few files whatever their number was.
The folder appears under a temporary name and is renamed when it is complete.
"""

import hashlib
import importlib.metadata
import json
import shutil
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from runspec import files, publish, tables, weights
from runspec.files import patient_json
from runspec.storage import patiently
from trainer.config import TrainConfig
from trainer.data import origin
from trainer.data.source import Piece, Source, omission_notes
from trainer.errors import ConfigError
from trainer.parallel.world import World

FORMAT = 6
META = "meta.json"
# Of a table of samples, int64; beside them the lengths of the documents, and a number.
COLUMNS = ("length", "targets", "fingerprint", "source", "left_out")
TOKENS, SAMPLES = "tokens_{}.bin", "samples.npy"
# A rank's part of the table, until all parts are put together.
PART = "samples_{}.npy"
# The maximum number of ranks that tokenise.
WRITERS = 64
# What the tokens of a sample depend on besides the config and the data.
PACKAGES = ("torchtune", "tokenizers", "transformers", "datasets")
# The modules beside this one that decide on a sample's tokens.
MAKERS = tuple(
    f"{name}.py"
    for name in (
        "source",
        "form",
        "rows",
        "instructions",
        "conversations",
        "preferences",
        "prompts",
        "tokenizers",
        "folder",
        "spans",
        "marks",
    )
)
PROGRESS_EVERY_S = 15.0
# Until a folder that another node has renamed is seen here.
SHARED_FOLDER_LIMIT_S = 120.0


class Part(NamedTuple):
    """What one rank has made: the highest token and its sample, and the number of samples."""

    highest: tuple[int, int]
    samples: int


class TokenisedDataset:
    """The samples of one dataset, read from its folder.

    lengths: tokens of each sample, int64 [samples]. targets: how many of them are predicted and
    trained. fingerprints: a 64-bit hash of each sample's tokens and mask. sources: the index of
    each in the dataset, of which a long text has several. left_out: how many tokens were cut off
    behind it. documents: tokens of each document of each sample, int64 [samples, documents].
    numbers: of each sample, float64 [samples]; see SampleForm. omissions: see Source.

    Args:
        meta: what the folder says of itself, if it has been read.
        block: the dataset's keys, for messages.

    Raises:
        ConfigError: files are missing or cut short.
    """

    def __init__(
        self,
        folder: Path,
        meta: dict[str, Any] | None = None,
        block: dict[str, Any] | None = None,
    ) -> None:
        meta = meta or _meta(folder)
        if meta is None:
            raise _damaged(folder)
        self.folder, self._block = folder, block or {}
        self.highest_token, self._highest_source = meta["highest"]
        self.omissions: dict[str, tuple[int, str]] = meta["omissions"]
        self._read: int = meta["read"]
        try:
            whole = np.load(folder / SAMPLES)
        except (FileNotFoundError, EOFError, ValueError):
            raise _damaged(folder / SAMPLES, "its folder") from None
        tables = np.split(whole, np.cumsum([count for _, count in meta["files"]])[:-1])
        self._files = [
            _mapped(folder / TOKENS.format(number), table["length"])
            for (number, _), table in zip(meta["files"], tables, strict=True)
        ]
        self.lengths, self.targets, self.fingerprints, self.sources, self.left_out = (
            whole[name].copy() for name in COLUMNS
        )
        self.documents, self.numbers = whole["documents"].copy(), whole["number"].copy()
        self._file_of = np.repeat(np.arange(len(tables)), [len(t) for t in tables])
        self._begins = np.concatenate([np.cumsum(t["length"]) - t["length"] for t in tables])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32 [n], trained bool [n]) of a sample."""
        begin = int(self._begins[index])
        stored = self._files[self._file_of[index]][begin : begin + int(self.lengths[index])]
        trained = stored >= 0
        return np.where(trained, stored, ~stored), trained

    def origin(self, index: int) -> str:
        """Where a sample comes from."""
        return origin.of_sample(self._block, int(self.sources[index]))

    @property
    def highest_origin(self) -> str:
        """Where the sample with the highest token comes from."""
        return origin.of_sample(self._block, self._highest_source)

    def notes(self, limit: int | None) -> Iterator[str]:
        """What of the samples is not in the tokens, in words."""
        yield from omission_notes(self.omissions, self._read)
        longer = f"longer than tokenizer.max_seq_len={limit}"
        parts = np.bincount(self.sources)
        count = np.count_nonzero(parts)
        if len(several := parts[parts > 1]):
            yield (
                f"{len(several):,} of {count:,} texts are {longer}: they go on in "
                f"{several.sum() - len(several):,} further samples, and no token is left out"
            )
        if cut := np.count_nonzero(self.left_out):
            whole = self.lengths.sum() + self.left_out.sum()
            yield (
                f"{cut:,} of {count:,} samples are {longer}: they are cut there, and "
                f"{self.left_out.sum():,} of {whole:,} tokens are left out"
            )

    @cached_property
    def sha256(self) -> str:
        """A hash of every sample, the same wherever the data is."""
        return hashlib.sha256(self.fingerprints.tobytes()).hexdigest()[:16]


def open_dataset(source: Source, config: TrainConfig, world: World) -> TokenisedDataset:
    """The tokenised samples of a dataset; all ranks call this together.

    Raises:
        ConfigError: the dataset cannot be opened, is empty, or a sample cannot be tokenised.
    """

    def find() -> tuple[Path, Any]:
        folder = config.data_cache / _name(source, config.tokenizer)
        return folder, _meta(folder)

    folder, meta = world.from_main(find)
    if meta is None:
        # Rank 0 first, so that one process alone converts the files.
        world.on_main(lambda: len(source))
        world.on_all(lambda: len(source))
        make(source, folder, world)
        meta = world.from_main(lambda: _meta(folder))
    return world.on_all(
        lambda: patiently(lambda path: TokenisedDataset(path, meta, source.block), _seen(folder))
    )


def _meta(folder: Path) -> Any:
    """What a dataset's folder says of itself; None if there is no such folder yet."""
    try:
        return patient_json(folder / META)
    except NotADirectoryError:
        return None  # what makes the folder will say so
    except ValueError:
        raise _damaged(folder) from None


def _damaged(path: Path, folder: str = "it") -> ConfigError:
    return ConfigError(f"data_cache_dir: {path} is damaged; delete {folder} and start again")


def _name(source: Source, tokenizer_block: dict[str, Any]) -> str:
    """The folder's name: a hash of all that the tokens depend on."""
    files_here = origin.data_files(source.block)
    # Data of the hub changes under one name: only the opened dataset tells its version.
    info = None if files_here else source.info
    content = {
        "format": FORMAT,
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "code": [files.sha256(Path(__file__).with_name(name)) for name in MAKERS],
        "tables": files.sha256(Path(tables.__file__)),
        "dataset": source.block,
        "tokenizer": tokenizer_block,
        "form": [source.form.documents, source.form.number, source.shares_limit],
        "data": [patiently(files.sha256, path) for path in files_here],
        "tokenizer_files": [
            patiently(files.sha256, path) for path in tokenizer_files(tokenizer_block)
        ],
        # The addresses of files on the hub hold the commit.
        "addresses": sorted(getattr(info, "download_checksums", None) or {}),
    }
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def tokenizer_files(block: dict[str, Any]) -> list[Path]:
    """The files that a `tokenizer` block names, and those of folders that it names."""
    paths: set[Path] = set()
    for name in origin.texts(list(block.values())):
        if "{" in name:
            continue  # the text of a chat template
        path = Path(name)
        if path.is_dir():
            paths |= {*weights.tokenizer_files(path)}
        elif path.is_file():
            paths.add(path)
    return sorted(paths)


def make(samples: Source, folder: Path, world: World) -> None:
    """Tokenise on all ranks, a range of samples each, and give the folder its name.

    Raises:
        ConfigError: the folder cannot be written to, or a sample cannot be tokenised.
    """
    temporary = world.from_main(lambda: _begin(folder))
    try:
        written = world.gather(world.on_all(lambda: _write_part(_seen(temporary), samples, world)))
        parts = {number: part for number, part in enumerate(written) if part is not None}
        omissions = _merged(world.gather(samples.omissions))
        if not parts:
            reasons = "; ".join(omission_notes(omissions, len(samples)))
            raise ConfigError(f"{samples.key}: no sample can be trained: {reasons}")
        world.on_main(lambda: _publish(temporary, folder, parts, samples, omissions))
    except Exception:
        if world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _begin(folder: Path) -> Path:
    try:
        return publish.begin(folder)
    except OSError as error:
        raise ConfigError(
            f"data_cache_dir: {folder.parent} cannot be written to: {error.strerror}; set "
            "data_cache_dir to a folder of your own that all nodes share"
        ) from None


def _publish(
    temporary: Path,
    folder: Path,
    parts: dict[int, Part],
    samples: Source,
    omissions: dict[str, tuple[int, str]],
) -> None:
    tables = [temporary / PART.format(number) for number in parts]
    np.save(temporary / SAMPLES, np.concatenate([np.load(table) for table in tables]))
    for table in tables:
        table.unlink()
    meta = {
        # Each file of tokens by its number, and its samples.
        "files": [(number, part.samples) for number, part in parts.items()],
        "highest": max((part.highest for part in parts.values()), key=lambda pair: pair[0]),
        "omissions": omissions,
        "read": len(samples),
    }
    files.write_json(temporary / META, meta)
    # Another run may have been quicker, and its folder holds the same.
    publish.finish(temporary, folder, "keep", flush=True)


def _merged(of_ranks: list[dict[str, tuple[int, str]]]) -> dict[str, tuple[int, str]]:
    """The omissions of all ranks, each with the place that the lowest rank has."""
    merged: dict[str, tuple[int, str]] = {}
    for omissions in of_ranks:
        for what, (count, first) in omissions.items():
            before, place = merged.get(what, (0, first))
            merged[what] = before + count, place
    return merged


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


def _write_part(folder: Path, samples: Source, world: World) -> Part | None:
    """Tokenise this rank's range; None if the range is empty."""
    count, rank, ranks = len(samples), world.rank, min(world.size, WRITERS)
    indices = range(count * rank // ranks, count * (rank + 1) // ranks) if rank < ranks else ()
    if not indices:
        return None
    table: list[tuple[Any, ...]] = []
    highest = (-1, 0)
    last_said = time.monotonic()
    paths = [folder / name.format(rank) for name in (TOKENS, PART)]
    with open(paths[0], "wb") as file:
        for done, index in enumerate(indices, 1):
            for piece in samples.pieces(index):
                tokens, targets = piece.tokens, piece.targets.sum()
                facts = (len(tokens), targets, _fingerprint(piece), index, piece.left_out)
                table.append((*facts, piece.lengths, piece.number))
                highest = max(highest, (int(tokens.max()), index), key=lambda pair: pair[0])
                file.write(np.where(piece.trained, tokens, ~tokens).tobytes())
            if time.monotonic() - last_said > PROGRESS_EVERY_S:
                last_said = time.monotonic()
                world.say(
                    f"tokenising {samples.key}: {done:,} of {len(indices):,} samples of this rank"
                )
    if not table:
        return None
    columns = [
        *((name, np.int64) for name in COLUMNS),
        ("documents", np.int64, (samples.form.count,)),
    ]
    np.save(paths[1], np.array(table, dtype=[*columns, ("number", np.float64)]))
    for path in paths:
        files.fsync_path(path)
    return Part(highest, len(table))


def _fingerprint(piece: Piece) -> int:
    content = piece.tokens.tobytes() + piece.trained.tobytes()
    if len(piece.lengths) > 1 or piece.number:
        content += repr((piece.lengths, piece.number)).encode()
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _mapped(path: Path, lengths: np.ndarray) -> np.ndarray:
    if not path.is_file() or path.stat().st_size != 4 * lengths.sum():
        raise _damaged(path, "its folder")
    # A plain array: each slice of a memmap, and each operation on it, runs Python code of its own.
    return np.asarray(np.memmap(path, dtype=np.int32, mode="r"))
