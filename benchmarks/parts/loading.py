"""Batches from the tokenised dataset by several numbers of workers, and packing."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.parts import documents
from benchmarks.parts.measure import Case, Ready, Setting, Size, Tensors, Variant
from trainer import distributed, tokenised
from trainer.data import WORKERS_ON_GPU, Batches, MicroBatch, Rows
from trainer.distributed import World
from trainer.packing import pack
from trainer.tokenised import IGNORE_INDEX, TokenisedDataset

# Micro-batches of one timed call, many more than the workers keep ready.
TAKEN, COMPARED = 48, 4
# The quickest training that the targets name: Llama 3.2 1B on one GPU.
NEED_TOKENS_S, PACED = 42_000, 16
WORKERS = (0, 1, 2, 4)
# Documents of the dataset: so many, fewer where rows are short.
MOST_DOCUMENTS, DOCUMENTS_A_TOKEN = 8192, 16
VOCABULARY = 128_256
# The share of a document that is a question, on which nothing is trained.
QUESTION_SHARE = 0.3


def cases(setting: Setting) -> Iterator[Case]:
    """Packed batches, and the packing before them."""
    world = distributed.start(setting.device.type)
    try:
        with tempfile.TemporaryDirectory(prefix="levers-") as folder:
            raw = _Raw(setting.size)
            tokenised.make("dataset", Path(folder) / "data", raw, None, world, lambda text: None)
            yield _loader(setting, world, raw, TokenisedDataset(Path(folder) / "data"))
            yield _packing(setting, raw)
    finally:
        distributed.stop()


class _Raw:
    """Documents whose first token tells which one it is."""

    def __init__(self, size: Size) -> None:
        count = min(MOST_DOCUMENTS, DOCUMENTS_A_TOKEN * size.sequence)
        drawn = np.random.default_rng(1).lognormal(
            np.log(size.sequence * documents.MEDIAN_SHARE), documents.SIGMA, count
        )
        self.lengths = drawn.round().astype(int).clip(documents.SHORTEST, size.sequence)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(index)
        tokens = random.integers(0, VOCABULARY, self.lengths[index], dtype=np.int64)
        tokens[0] = index
        labels = tokens.copy()
        labels[: int(QUESTION_SHARE * len(tokens))] = IGNORE_INDEX
        return {"tokens": tokens, "labels": labels}


def _loader(setting: Setting, world: World, raw: _Raw, samples: TokenisedDataset) -> Case:
    size = setting.size
    rows = Rows(samples, pad_id=0, row_length=size.sequence, seed=0)
    default = WORKERS_ON_GPU if setting.device.type == "cuda" else 0

    def batches(workers: int) -> Iterator[list[MicroBatch]]:
        # More epochs than anyone takes.
        return Batches(
            rows, world, size.batch, seed=0, epochs=1_000_000, workers=workers
        ).from_step(0)

    def variant(workers: int) -> Variant:
        name = f"{workers} worker{'' if workers == 1 else 's'}"
        mark = f" (the trainer's on a {'GPU' if default else 'CPU'})" if workers == default else ""
        return Variant(name + mark, lambda: _taking(setting, batches, workers))

    others = [variant(workers) for workers in WORKERS if workers != default]
    return Case(
        name="loader",
        what=(
            f"{TAKEN} micro-batches of {size.batch} x {size.sequence} tokens to the device, from "
            f"{len(raw):,} documents, {documents.WORDS}, {100 * rows.filled:.1f} % filled; "
            f"training takes at most {NEED_TOKENS_S:,} tokens/s a GPU"
        ),
        variants=[variant(default), *others],
        reference=lambda: _rebuilt(batches(0), raw, size),
        tolerance=0.0,
        rate=("tokens/s", TAKEN * size.tokens * rows.filled),
        blocking=True,
    )


def _taking(
    setting: Setting, batches: Callable[[int], Iterator[list[MicroBatch]]], workers: int
) -> Ready:
    endless = batches(workers)

    def run() -> None:
        for _ in range(TAKEN):
            for batch in next(endless):
                batch.to(setting.device)

    def figures() -> dict[str, Any]:
        # As in training: the device is busy with one micro-batch while the next one is made.
        waited = []
        for _ in range(PACED):
            time.sleep(setting.size.tokens / NEED_TOKENS_S)
            began = time.perf_counter()
            next(endless)
            waited.append(time.perf_counter() - began)
        return {"wait a micro-batch in training, ms": round(1e3 * statistics.median(waited), 2)}

    return Ready(run, results=lambda: _numbers(batches(workers)), figures=figures)


def _numbers(batches: Iterator[list[MicroBatch]]) -> Tensors:
    taken = [next(batches)[0] for _ in range(COMPARED)]
    return {
        "tokens": torch.stack([batch.tokens for batch in taken]).double(),
        "labels": torch.stack([batch.labels for batch in taken]).double(),
        "positions": torch.stack([batch.positions for batch in taken]).double(),
    }


def _rebuilt(batches: Iterator[list[MicroBatch]], raw: _Raw, size: Size) -> Tensors:
    """The same rows token by token from the documents, in plain Python."""
    parts: dict[str, list[Any]] = {"tokens": [], "labels": [], "positions": []}
    for _ in range(COMPARED):
        [batch] = next(batches)
        for row in batch.tokens.tolist():
            tokens: list[int] = []
            labels: list[int] = []
            positions: list[int] = []
            while len(tokens) < size.sequence:
                # Where a document ends another one or the padding begins.
                sample = raw[row[len(tokens)]]
                if row[len(tokens)] == 0 and sum(row[len(tokens) :]) == 0:
                    left = size.sequence - len(tokens)
                    tokens += [0] * left
                    labels += [IGNORE_INDEX] * left
                    positions += range(left)
                    break
                positions += range(len(sample["tokens"]))
                tokens += sample["tokens"].tolist()
                labels += [*sample["labels"].tolist()[1:], IGNORE_INDEX]
            for name, values in zip(parts, (tokens, labels, positions), strict=True):
                parts[name].append(values)
    shape = COMPARED, size.batch, size.sequence
    return {n: torch.tensor(v, dtype=torch.float64).view(shape) for n, v in parts.items()}


def _packing(setting: Setting, raw: _Raw) -> Case:
    row = setting.size.sequence
    best: dict[str, list[list[int]]] = {}

    def ours() -> None:
        best["rows"] = pack(raw.lengths, row, seed=0)

    def our_lengths() -> Tensors:
        rows = best["rows"]
        if any(raw.lengths[members].sum() > row for members in rows):
            raise ValueError("a row is too full")
        members = [member for members in rows for member in members]
        return {"lengths": _sorted(raw.lengths[members])}

    return Case(
        name="packing",
        what=f"{len(raw):,} documents, {documents.WORDS}, into rows of {row}",
        variants=[
            Variant(
                "trainer, best fit",
                lambda: Ready(
                    ours, results=our_lengths, figures=lambda: _filled(len(best["rows"]), raw, row)
                ),
            ),
            Variant("torchtune, in order", lambda: _torchtune(raw, row)),
        ],
        reference=lambda: {"lengths": _sorted(raw.lengths)},
        tolerance=0.0,
        rate=("documents/s", len(raw)),
        blocking=True,
    )


def _torchtune(raw: _Raw, row: int) -> Ready:
    from torchtune.datasets import PackedDataset

    samples = [{name: part.tolist() for name, part in raw[i].items()} for i in range(len(raw))]
    made: list[PackedDataset] = []

    def run() -> None:
        made[:] = [PackedDataset(samples, max_seq_len=row)]

    def lengths() -> Tensors:
        found = []
        for packed in made[0].packs:
            # What has no first position is the padding.
            count = int((packed["input_pos"] == 0).sum())
            found += packed["seq_lens"][:count].tolist()
        return {"lengths": _sorted(np.asarray(found))}

    return Ready(run, results=lengths, figures=lambda: _filled(len(made[0]), raw, row))


def _sorted(lengths: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.sort(lengths)).double()


def _filled(rows: int, raw: _Raw, row: int) -> dict[str, Any]:
    return {"rows": rows, "filled, %": round(100 * float(raw.lengths.sum()) / (rows * row), 2)}
