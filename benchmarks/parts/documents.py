"""Packed rows of documents of uneven length, as fine-tuning data has them."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.parts.measure import Size
from trainer.attention import Documents

# Lengths are log-normal. With the row eight times the median, about one document in 50 is longer
# than a row and is cut; at 4,096 tokens the median is 512.
MEDIAN_SHARE, SIGMA, SHORTEST = 1 / 8, 1.0, 8
WORDS = "documents log-normal, median an eighth of a row, sigma 1"


def lengths(size: Size, seed: int) -> list[list[int]]:
    """Tokens of each document of each row; every row is full."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(size.batch):
        row: list[int] = []
        while (left := size.sequence - sum(row)) > 0:
            drawn = random.lognormal(np.log(size.sequence * MEDIAN_SHARE), SIGMA)
            row.append(min(left, max(SHORTEST, round(drawn))))
        rows.append(row)
    return rows


def documents(rows: list[list[int]], device: torch.device) -> tuple[Documents, torch.Tensor]:
    """What the trainer's loader gives with full rows: the documents, and the positions in them."""
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
    """Query-key pairs of causal attention within each document, of the window's keys at most."""
    total = 0
    for length in (length for row in rows for length in row):
        near = min(length, window or length)
        total += near * (near + 1) // 2 + (length - near) * near
    return total
