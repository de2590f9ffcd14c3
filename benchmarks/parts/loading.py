"""Batches from the tokenised dataset with different numbers of workers, and packing."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.parts import documents
from benchmarks.parts.measure import Case, Runnable, Setting, Size, Tensors, Variant
from trainer.data import tokenised
from trainer.data.batches import (
    WORKERS_ON_GPU,
    Batches,
    MicroBatch,
    Rows,
)
from trainer.data.packing import pack
from trainer.data.source import Source
from trainer.data.tokenised import TokenisedDataset
from trainer.layers.batch import IGNORE_INDEX
from trainer.parallel import world as distributed
from trainer.parallel.world import World

# Micro-batches per timed call, many more than the workers prefetch; and those that are compared.
TIMED_BATCHES, COMPARED_BATCHES = 48, 4
# The fastest training in the targets, Llama 3.2 1B on one GPU; micro-batches timed at that pace.
TRAINING_TOKENS_PER_S, PACED_BATCHES = 42_000, 16
WORKERS = (0, 1, 2, 4)
# Documents in the dataset: at most this many, and at most 16 per token of a row.
MAX_DOCUMENTS, DOCUMENTS_PER_TOKEN = 8192, 16
VOCABULARY = 128_256
# The share of a document that is the prompt, which is not trained.
PROMPT_SHARE = 0.3


def cases(setting: Setting) -> Iterator[Case]:
    """Packed batches, and the packing itself."""
    world = distributed.start(setting.device.type)
    try:
        with tempfile.TemporaryDirectory(prefix="levers-") as folder:
            raw = _Raw(setting.size)
            tokenised.make(Source("dataset", {}, raw, None), Path(folder) / "data", world)
            yield _loader(setting, world, raw, TokenisedDataset(Path(folder) / "data"))
            yield _packing(setting, raw)
    finally:
        distributed.stop()


class _Raw:
    """Documents whose first token is the index of the document."""

    def __init__(self, size: Size) -> None:
        count = min(MAX_DOCUMENTS, DOCUMENTS_PER_TOKEN * size.sequence)
        drawn = np.random.default_rng(1).lognormal(
            np.log(size.sequence * documents.MEDIAN_SHARE), documents.SIGMA, count
        )
        self.lengths = drawn.round().astype(int).clip(documents.MIN_TOKENS, size.sequence)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(index)
        tokens = random.integers(0, VOCABULARY, self.lengths[index], dtype=np.int64)
        tokens[0] = index
        labels = tokens.copy()
        labels[: int(PROMPT_SHARE * len(tokens))] = IGNORE_INDEX
        return {"tokens": tokens, "labels": labels}


def _loader(setting: Setting, world: World, raw: _Raw, samples: TokenisedDataset) -> Case:
    size = setting.size
    rows = Rows(samples, pad_id=0, row_length=size.sequence, seed=0)
    default = WORKERS_ON_GPU if setting.device.type == "cuda" else 0

    def batches(workers: int) -> Iterator[list[MicroBatch]]:
        # More epochs than are ever used.
        return Batches(
            rows, world, size.batch, seed=0, epochs=1_000_000, workers=workers
        ).from_step(0)

    def variant(workers: int) -> Variant:
        name = f"{workers} worker{'' if workers == 1 else 's'}"
        mark = (
            f" (the trainer's default on {'GPU' if default else 'CPU'})"
            if workers == default
            else ""
        )
        return Variant(name + mark, lambda: _load(setting, batches, workers))

    others = [variant(workers) for workers in WORKERS if workers != default]
    return Case(
        name="loader",
        what=(
            f"{TIMED_BATCHES} micro-batches of {size.batch} x {size.sequence} tokens to the "
            f"device, from {len(raw):,} documents, {documents.DISTRIBUTION}, "
            f"{100 * rows.filled:.1f} % real tokens; "
            f"training uses at most {TRAINING_TOKENS_PER_S:,} tokens/s per GPU"
        ),
        variants=[variant(default), *others],
        reference=lambda: _rebuilt(batches(0), raw, size),
        tolerance=0.0,
        rate=("tokens/s", TIMED_BATCHES * size.tokens * rows.filled),
        blocking=True,
    )


def _load(
    setting: Setting, batches: Callable[[int], Iterator[list[MicroBatch]]], workers: int
) -> Runnable:
    loader = batches(workers)

    def run() -> None:
        for _ in range(TIMED_BATCHES):
            for batch in next(loader):
                batch.to(setting.device)

    def figures() -> dict[str, Any]:
        # As in training: while the device works on a micro-batch, the next one is loaded.
        waited = []
        for _ in range(PACED_BATCHES):
            time.sleep(setting.size.tokens / TRAINING_TOKENS_PER_S)
            began = time.perf_counter()
            next(loader)
            waited.append(time.perf_counter() - began)
        return {"wait per micro-batch in training, ms": round(1e3 * statistics.median(waited), 2)}

    return Runnable(run, results=lambda: _compared(batches(workers)), figures=figures)


def _compared(batches: Iterator[list[MicroBatch]]) -> Tensors:
    taken = [next(batches)[0] for _ in range(COMPARED_BATCHES)]
    return {
        "tokens": torch.stack([batch.tokens for batch in taken]).double(),
        "labels": torch.stack([batch.labels for batch in taken]).double(),
        "positions": torch.stack([batch.positions for batch in taken]).double(),
    }


def _rebuilt(batches: Iterator[list[MicroBatch]], raw: _Raw, size: Size) -> Tensors:
    """The same rows, built in plain Python token by token from the documents."""
    parts: dict[str, list[Any]] = {"tokens": [], "labels": [], "positions": []}
    for _ in range(COMPARED_BATCHES):
        [batch] = next(batches)
        for row in batch.tokens.tolist():
            tokens: list[int] = []
            labels: list[int] = []
            positions: list[int] = []
            while len(tokens) < size.sequence:
                # A document ends where the next one or the padding begins.
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
    shape = COMPARED_BATCHES, size.batch, size.sequence
    return {n: torch.tensor(v, dtype=torch.float64).view(shape) for n, v in parts.items()}


def _packing(setting: Setting, raw: _Raw) -> Case:
    row = setting.size.sequence
    packed: dict[str, list[list[int]]] = {}

    def ours() -> None:
        packed["rows"] = pack(raw.lengths, row, seed=0)

    def our_lengths() -> Tensors:
        rows = packed["rows"]
        if any(raw.lengths[members].sum() > row for members in rows):
            raise ValueError("a packed row is longer than the row length")
        members = [member for members in rows for member in members]
        return {"lengths": _sorted(raw.lengths[members])}

    return Case(
        name="packing",
        what=f"{len(raw):,} documents, {documents.DISTRIBUTION}, into rows of {row}",
        variants=[
            Variant(
                "trainer, best-fit",
                lambda: Runnable(
                    ours,
                    results=our_lengths,
                    figures=lambda: _filled(len(packed["rows"]), raw, row),
                ),
            ),
            Variant("torchtune, in order", lambda: _torchtune(raw, row)),
        ],
        reference=lambda: {"lengths": _sorted(raw.lengths)},
        tolerance=0.0,
        rate=("documents/s", len(raw)),
        blocking=True,
    )


def _torchtune(raw: _Raw, row: int) -> Runnable:
    from torchtune.datasets import PackedDataset

    samples = [{name: part.tolist() for name, part in raw[i].items()} for i in range(len(raw))]
    result: list[PackedDataset] = []

    def run() -> None:
        result[:] = [PackedDataset(samples, max_seq_len=row)]

    def packed_lengths() -> Tensors:
        lengths = []
        for packed in result[0].packs:
            # Padding has no token with position 0.
            count = int((packed["input_pos"] == 0).sum())
            lengths += packed["seq_lens"][:count].tolist()
        return {"lengths": _sorted(np.asarray(lengths))}

    return Runnable(run, results=packed_lengths, figures=lambda: _filled(len(result[0]), raw, row))


def _sorted(lengths: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.sort(lengths)).double()


def _filled(rows: int, raw: _Raw, row: int) -> dict[str, Any]:
    return {"rows": rows, "real tokens, %": round(100 * float(raw.lengths.sum()) / (rows * row), 2)}
