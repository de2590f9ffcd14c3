"""Rows packed with documents of different lengths, as fine-tuning data has them."""

import numpy as np
import torch

from benchmarks.parts.measure import Size
from trainer.layers.batch import Documents

# Document lengths are log-normal. The median is an eighth of a row (512 of 4,096 tokens), so about
# one document in 50 is longer than a row and is truncated.
MEDIAN_SHARE, SIGMA, MIN_TOKENS = 1 / 8, 1.0, 8
DISTRIBUTION = "document lengths log-normal, median 1/8 of a row, sigma 1"


def lengths(size: Size, seed: int) -> list[list[int]]:
    """Length in tokens of each document of each row; every row is full."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(size.batch):
        row: list[int] = []
        while (left := size.sequence - sum(row)) > 0:
            drawn = random.lognormal(np.log(size.sequence * MEDIAN_SHARE), SIGMA)
            row.append(min(left, max(MIN_TOKENS, round(drawn))))
        rows.append(row)
    return rows


def documents(rows: list[list[int]], device: torch.device) -> tuple[Documents, torch.Tensor]:
    """Documents and positions as the trainer's data loader returns them for full rows."""
    numbers = [np.repeat(np.arange(len(row)), row) for row in rows]
    positions = [np.concatenate([np.arange(length) for length in row]) for row in rows]
    ends = np.cumsum([length for row in rows for length in row])
    return (
        Documents(
            torch.from_numpy(np.stack(numbers)).to(device, torch.int32),
            torch.from_numpy(np.concatenate([[0], ends])).to(device, torch.int32),
        ),
        torch.from_numpy(np.stack(positions)).to(device),
    )


def pairs(rows: list[list[int]], window: int | None = None) -> int:
    """Query-key pairs of causal attention within the documents, with an optional sliding window."""
    total = 0
    for length in (length for row in rows for length in row):
        reach = min(length, window or length)
        total += reach * (reach + 1) // 2 + (length - reach) * reach
    return total
