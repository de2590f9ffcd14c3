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
from typing import Any

import numpy as np

from runspec import files, publish, tables, weights
from runspec.files import patient_json
from runspec.storage import patiently
from trainer.config import TrainConfig
from trainer.data import origin
from trainer.data.source import Piece, Source, omission_notes
from trainer.errors import ConfigError
from trainer.parallel.world import World

FORMAT = 7
META = "meta.json"
# Of a table of samples, int64; beside them the lengths of the documents, and a number. A sample's
# tokens are in the file of the rank that made it, from `begin` on; `highest` is one of them.
COLUMNS = (
    *("length", "targets", "fingerprint", "source", "left_out"),
    *("rank", "begin", "highest"),
)
TOKENS, SAMPLES = "tokens_{}.bin", "samples.npy"
# A rank's part of the table, until all parts are put together.
PART = "samples_{}.npy"
# The maximum number of ranks that tokenise.
WRITERS = 64
# What the tokens of a sample depend on besides the config, the data and the modules beside this.
PACKAGES = ("tokenizers", "transformers", "datasets")
PROGRESS_EVERY_S = 15.0
# Until a folder that another node has renamed is seen here.
SHARED_FOLDER_LIMIT_S = 120.0


class TokenisedDataset:
    """The samples of one dataset, read from its folder.

    lengths: tokens of each sample, int64 [samples]. targets: how many of them are predicted and
    trained. fingerprints: a 64-bit hash of each sample's tokens and mask. sources: the index of
    each in the dataset, of which a long text has several. left_out: how many tokens were cut off
    behind it. highest: its highest token. documents: tokens of each document of each sample, int64
    [samples, documents]. numbers: of each sample, float64 [samples]; see SampleForm. omissions: see
    Source.

    Args:
        meta: what the folder says of itself.
        block: the dataset's keys, for messages.

    Raises:
        ConfigError: files are missing or cut short.
    """

    def __init__(self, folder: Path, meta: dict[str, Any], block: dict[str, Any]) -> None:
        self.folder, self._block = folder, block
        self.omissions: dict[str, tuple[int, str]] = meta["omissions"]
        self._read: int = meta["read"]
        try:
            whole = np.load(folder / SAMPLES)
        except (FileNotFoundError, EOFError, ValueError):
            raise _damaged(folder / SAMPLES, "its folder") from None
        self.lengths, self.targets, self.fingerprints, self.sources, self.left_out = (
            whole[name].copy() for name in COLUMNS[:5]
        )
        self._rank, self._begin, self.highest = (whole[name].copy() for name in COLUMNS[5:])
        self.documents, self.numbers = whole["documents"].copy(), whole["number"].copy()
        self._files = {
            rank: _mapped(folder / TOKENS.format(rank), self.lengths[self._rank == rank].sum())
            for rank in np.unique(self._rank).tolist()
        }

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32 [n], trained bool [n]) of a sample."""
        begin = int(self._begin[index])
        stored = self._files[int(self._rank[index])][begin : begin + int(self.lengths[index])]
        trained = stored >= 0
        return np.where(trained, stored, ~stored), trained

    def origin(self, index: int) -> str:
        """Where a sample comes from."""
        return origin.of_sample(self._block, int(self.sources[index]))

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
        "code": [files.sha256(path) for path in sorted(Path(__file__).parent.glob("*.py"))],
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
        parts = [rank for rank, made in enumerate(written) if made]
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
    parts: list[int],
    samples: Source,
    omissions: dict[str, tuple[int, str]],
) -> None:
    tables = [temporary / PART.format(rank) for rank in parts]
    np.save(temporary / SAMPLES, np.concatenate([np.load(table) for table in tables]))
    for table in tables:
        table.unlink()
    files.write_json(temporary / META, {"omissions": omissions, "read": len(samples)})
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


def _write_part(folder: Path, samples: Source, world: World) -> bool:
    """Tokenise this rank's range; whether it has any sample."""
    count, rank, ranks = len(samples), world.rank, min(world.size, WRITERS)
    indices = range(count * rank // ranks, count * (rank + 1) // ranks) if rank < ranks else ()
    if not indices:
        return False
    table: list[tuple[Any, ...]] = []
    begin = 0
    last_said = time.monotonic()
    paths = [folder / name.format(rank) for name in (TOKENS, PART)]
    with open(paths[0], "wb") as file:
        for done, index in enumerate(indices, 1):
            for piece in samples.pieces(index):
                tokens, targets = piece.tokens, piece.targets.sum()
                facts = (len(tokens), targets, _fingerprint(piece), index, piece.left_out)
                place = (rank, begin, tokens.max())
                table.append((*facts, *place, piece.lengths, piece.number))
                begin += len(tokens)
                file.write(np.where(piece.trained, tokens, ~tokens).tobytes())
            if time.monotonic() - last_said > PROGRESS_EVERY_S:
                last_said = time.monotonic()
                world.say(
                    f"tokenising {samples.key}: {done:,} of {len(indices):,} samples of this rank"
                )
    if not table:
        return False
    columns = [
        *((name, np.int64) for name in COLUMNS),
        ("documents", np.int64, (samples.form.count,)),
    ]
    np.save(paths[1], np.array(table, dtype=[*columns, ("number", np.float64)]))
    for path in paths:
        files.fsync_path(path)
    return True


def _fingerprint(piece: Piece) -> int:
    content = piece.tokens.tobytes() + piece.trained.tobytes()
    if len(piece.lengths) > 1 or piece.number:
        content += repr((piece.lengths, piece.number)).encode()
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _mapped(path: Path, tokens: int) -> np.ndarray:
    if not path.is_file() or path.stat().st_size != 4 * tokens:
        raise _damaged(path, "its folder")
    # A plain array: each slice of a memmap, and each operation on it, runs Python code of its own.
    return np.asarray(np.memmap(path, dtype=np.int32, mode="r"))
