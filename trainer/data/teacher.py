"""A teacher's stored distributions, beside a dataset's tokens, memory-mapped.

One folder per teacher, named by what the numbers depend on. It holds parts of consecutive samples,
a record for each trained token of each sample in turn, and appears complete once META is there:
part by part it is made by `entry: teach`, which goes on with the parts that are missing. Beside a
part is a sum of each sample's records, which is checked whenever these are read: to read all of
them at each start would take minutes.
"""

import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from runspec import files
from runspec.files import patient_json
from runspec.storage import patiently
from trainer.errors import ConfigError, cache_written
from trainer.layers.batch import TopK

FORMAT = 2
META = "meta.json"
PART, FIGURES = "part_{:05d}.bin", "part_{:05d}.json"
# CRC-32 of the records of each sample.
SUMS = "part_{:05d}.sums"
# Tokens of a part. Within these limits a dataset has about PARTS parts, which ranks share.
SMALLEST_PART, LARGEST_PART, PARTS = 2**12, 2**20, 256


def record(k: int) -> np.dtype[Any]:
    """The record of one token: 8 k + 4 bytes."""
    columns = [("ids", np.int32, (k,)), ("log_probs", np.float32, (k,)), ("tail", np.float32)]
    return np.dtype(columns)


class Part(NamedTuple):
    """A part by its number: the samples from `begin` to `end`, and their trained tokens."""

    number: int
    begin: int
    end: int
    tokens: int


def parts_of(lengths: np.ndarray, targets: np.ndarray) -> list[Part]:
    """The parts of a dataset, which depend on the dataset alone.

    Args:
        lengths: tokens of each sample, [samples]. targets: how many of them are trained.
    """
    total = int(lengths.sum())
    size = min(max(total // PARTS, SMALLEST_PART), LARGEST_PART)
    number = (np.cumsum(lengths) - lengths) // size
    begins = [*np.flatnonzero(np.diff(number, prepend=-1)).tolist(), len(lengths)]
    return [
        Part(index, begin, end, int(targets[begin:end].sum()))
        for index, (begin, end) in enumerate(pairwise(begins))
    ]


class KeptTeacher:
    """The records of a dataset's trained tokens, read from their folder.

    vocabulary: how many tokens counted, from the first on.

    Raises:
        ConfigError: files are missing or cut short.
    """

    def __init__(self, folder: Path, lengths: np.ndarray, targets: np.ndarray) -> None:
        parts = parts_of(lengths, targets)
        try:
            meta = patient_json(folder / META)
        except files.DamagedFile:
            raise _damaged(folder, folder) from None
        if meta is None or meta["parts"] != len(parts):
            raise _damaged(folder, folder)
        self.folder = folder
        self.vocabulary: int = meta["vocabulary"]
        self._record, self._targets = record(meta["k"]), targets
        self._parts = [self._mapped(folder, part) for part in parts]
        self._first = [part.begin for part in parts]
        # Read when a sample of the part is.
        self._sums: dict[int, np.ndarray] = {}
        self._part_of = np.repeat(np.arange(len(parts)), [part.end - part.begin for part in parts])
        first = np.cumsum([0, *(part.tokens for part in parts)])[:-1]
        self._begins = np.cumsum(targets) - targets - first[self._part_of]

    def of(self, samples: np.ndarray) -> TopK:
        """The records of the trained tokens of some samples, in order.

        Raises:
            ConfigError: it is not what was written.
        """
        records = [np.zeros(0, self._record)]
        for sample in samples.tolist():
            begin, number = int(self._begins[sample]), int(self._part_of[sample])
            own = self._parts[number][begin : begin + int(self._targets[sample])]
            if number not in self._sums:
                file = self.folder / SUMS.format(number)
                self._sums[number] = patiently(lambda path: np.fromfile(path, np.uint32), file)
            if zlib.crc32(own.tobytes()) != self._sums[number][sample - self._first[number]]:
                raise _damaged(self.folder / PART.format(number), self.folder)
            records.append(own)
        whole = np.concatenate(records)
        return TopK(*(torch.from_numpy(whole[name].copy()) for name in TopK._fields))

    def _mapped(self, folder: Path, part: Part) -> np.ndarray:
        path = folder / PART.format(part.number)
        if not is_whole(folder, part, self._record):
            raise _damaged(path, folder)
        if not part.tokens:
            return np.zeros(0, self._record)  # an empty file cannot be mapped
        return np.asarray(np.memmap(path, dtype=self._record, mode="r"))


def _damaged(path: Path, folder: Path) -> ConfigError:
    return ConfigError(f"{path} is damaged: delete {folder}, and run entry: teach again")


def is_whole(folder: Path, part: Part, kind: np.dtype[Any]) -> bool:
    """Whether a part's files have the sizes that they must have."""
    sizes = {PART: part.tokens * kind.itemsize, SUMS: 4 * (part.end - part.begin)}
    paths = {folder / name.format(part.number): size for name, size in sizes.items()}
    return all(path.is_file() and path.stat().st_size == size for path, size in paths.items())


def write_part(
    folder: Path, part: Part, records: np.ndarray, targets: np.ndarray, figures: list[float]
) -> None:
    """Write a part's files under temporary names, and move each to its own; then its figures.

    Args:
        targets: how many records each of its samples has.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    pieces = np.split(records, np.cumsum(targets)[:-1])
    sums = np.array([zlib.crc32(piece.tobytes()) for piece in pieces], np.uint32)
    with cache_written(folder):
        for name, content in ((PART, records), (SUMS, sums)):
            with files.replacing(folder / name.format(part.number)) as temporary:
                temporary.write_bytes(content.tobytes())
        files.write_json(folder / FIGURES.format(part.number), figures)


def missing_parts(folder: Path, parts: list[Part], kind: np.dtype[Any]) -> list[Part]:
    """The parts that are not there yet, or not as a whole."""
    return [
        part
        for part in parts
        if not (folder / FIGURES.format(part.number)).is_file() or not is_whole(folder, part, kind)
    ]
