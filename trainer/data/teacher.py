"""What is kept of a teacher's distributions beside a dataset's tokens, memory-mapped.

One folder per teacher, named by what the numbers depend on. It holds parts of consecutive samples,
a record for each trained token of each sample in turn, and appears complete once META is there:
part by part it is made by `entry: teach`, which goes on with the parts that are missing.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from runspec import files
from runspec.storage import patient_json
from trainer.errors import ConfigError
from trainer.layers.batch import TopK

FORMAT = 1
META = "meta.json"
PART, FIGURES = "part_{:05d}.bin", "part_{:05d}.json"
# Tokens of a part; within these a dataset has so many parts, that many ranks have one each.
SMALLEST_PART, LARGEST_PART, PARTS = 2**12, 2**20, 256


def record(k: int) -> np.dtype[Any]:
    """What is kept of one token: 8 k + 4 bytes."""
    columns = [("ids", np.int32, (k,)), ("log_probs", np.float32, (k,)), ("tail", np.float32)]
    return np.dtype(columns)


class Part(NamedTuple):
    """A part by its number: the samples from `begin` to `end`, with so many trained tokens."""

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
        parts, damaged = parts_of(lengths, targets), f"{folder} is damaged: delete it, and run"
        try:
            meta = patient_json(folder / META)
        except files.DamagedFile:
            raise ConfigError(f"{damaged} entry: teach again") from None
        if meta is None or meta["parts"] != len(parts):
            raise ConfigError(f"{damaged} entry: teach again")
        self.folder = folder
        self.vocabulary: int = meta["vocabulary"]
        self._record, self._targets = record(meta["k"]), targets
        self._parts = [self._mapped(folder, part) for part in parts]
        self._part_of = np.repeat(np.arange(len(parts)), [part.end - part.begin for part in parts])
        first = np.cumsum([0, *(part.tokens for part in parts)])[:-1]
        self._begins = np.cumsum(targets) - targets - first[self._part_of]

    def of(self, samples: np.ndarray) -> TopK:
        """What is kept of the trained tokens of some samples in turn."""
        records = [np.zeros(0, self._record)]
        for sample in samples.tolist():
            begin = int(self._begins[sample])
            part = self._parts[self._part_of[sample]]
            records.append(part[begin : begin + int(self._targets[sample])])
        whole = np.concatenate(records)
        return TopK(*(torch.from_numpy(whole[name].copy()) for name in TopK._fields))

    def _mapped(self, folder: Path, part: Part) -> np.ndarray:
        path = folder / PART.format(part.number)
        if not is_whole(path, part, self._record):
            raise ConfigError(f"{path} is damaged: delete its folder, and run entry: teach again")
        if not part.tokens:
            return np.zeros(0, self._record)  # an empty file cannot be mapped
        return np.asarray(np.memmap(path, dtype=self._record, mode="r"))


def is_whole(path: Path, part: Part, kind: np.dtype[Any]) -> bool:
    """Whether a part's file has the size that it must have."""
    return path.is_file() and path.stat().st_size == part.tokens * kind.itemsize


def write_part(folder: Path, part: Part, records: np.ndarray, figures: list[float]) -> None:
    """Write a part under a temporary name, and move it to its own; then its figures.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    path = folder / PART.format(part.number)
    try:
        with files.replacing(path) as temporary:
            temporary.write_bytes(records.tobytes())
        files.write_json(folder / FIGURES.format(part.number), figures)
    except OSError as error:
        raise ConfigError(
            f"data_cache_dir: {folder} cannot be written to: {error.strerror}; set "
            "data_cache_dir to a folder of your own with enough space"
        ) from None


def missing_parts(folder: Path, parts: list[Part], kind: np.dtype[Any]) -> list[Part]:
    """The parts that are not there yet, or not as a whole."""
    return [
        part
        for part in parts
        if not (folder / FIGURES.format(part.number)).is_file()
        or not is_whole(folder / PART.format(part.number), part, kind)
    ]
