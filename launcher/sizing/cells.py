"""What is predicted of each cell of a sweep, as a table: its memory, and the time of its epoch.

Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.errors import CookbookError
from launcher.recipes.recipe import Recipe
from launcher.sizing.epoch import epoch_of
from launcher.sizing.gpus import Gpu
from launcher.sizing.memory import host_bytes
from launcher.sizing.recipe_step import step_of
from launcher.sizing.search import Prediction, Predictor
from launcher.sizing.step_config import FP32, GIB

_HEADS = ("CELL", "GPUS", "PEAK GiB", "VERDICT", "TOK/S/GPU", "EPOCH")
_PUBLISHED = ("MEASURED BY OTHERS: ALLOCATED", "RESERVED", "EPOCH")
_SIZES = ("allocated_gib", "reserved_gib")


@dataclass(frozen=True)
class PredictedCell:
    """A cell and what is predicted of it; fault: why nothing is.

    tokens: of an epoch. epoch: where their number is from.
    """

    number: int
    name: str
    prediction: Prediction | None = None
    tokens: int = 0
    epoch: str = ""
    fault: str = ""
    published: Mapping[str, float] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether it fits, or nobody knows."""
        return self.prediction is None or self.prediction.fits

    @property
    def epoch_s(self) -> float | None:
        """Seconds of an epoch; None if unknown, and for fp32, whose peak no GPU's entry has."""
        prediction = self.prediction
        if prediction is None or prediction.step.element_bytes == FP32:
            return None
        return self.tokens / (prediction.rate * prediction.step.layout.ranks)

    def as_json(self) -> dict[str, Any]:
        """Return the figures; sizes in GiB, times in seconds."""
        cell = {"cell": self.number, "name": self.name}
        if self.prediction is None:
            return {**cell, "fault": self.fault}
        step, epoch_s = self.prediction.step, self.epoch_s
        return {
            **cell,
            "gpus": step.layout.ranks,
            "peak_gib": round(self.prediction.peak_gib, 3),
            "fits": self.fits,
            "host_memory_per_node_gib": round(host_bytes(step) / GIB, 3),
            "tokens_per_second_per_gpu": None if epoch_s is None else self.prediction.rate,
            "epoch_tokens": self.tokens,
            "epoch_s": epoch_s,
            "published": dict(self.published),
        }

    def row(self) -> list[str]:
        """Return its line of the table."""
        if self.prediction is None:
            return [self.name, "-", "-", "not computed", "-", "-"]
        step, epoch_s = self.prediction.step, self.epoch_s
        verdict, host = "fits" if self.fits else "DOES NOT FIT", host_bytes(step) / GIB
        verdict += f", {host:.0f} GiB on the CPU" if host else ""
        rate = "-" if epoch_s is None else f"{self.prediction.rate:,.0f}"
        peak = f"{self.prediction.peak_gib:,.2f}"
        return [self.name, str(step.layout.ranks), peak, verdict, rate, clock(epoch_s)]


class PredictedSweep:
    """The predictions of all cells on one kind of GPU, on nodes of as many as each cell takes."""

    def __init__(
        self, cells: Sequence[tuple[int, str, Recipe, Mapping[str, float]]], root: Path, gpu: Gpu
    ) -> None:
        self.gpu, self.basis = gpu, ""
        self.cells = [self._predicted(root, *cell) for cell in cells]

    def _predicted(
        self, root: Path, number: int, name: str, recipe: Recipe, published: Mapping[str, float]
    ) -> PredictedCell:
        cell = PredictedCell(number, name, published=published)
        resources = recipe.resources
        try:
            if not recipe.entry.can_estimate:
                raise CookbookError(f"{recipe.entry_name} cannot be estimated")
            config = recipe.resolved(root, "run")
            step = step_of(config, resources.nodes, resources.gpus_per_node)
            tokens, epoch, _ = epoch_of(config, step)
        except CookbookError as error:
            return replace(cell, fault=error.faults[0])
        predictor = Predictor(step, self.gpu)
        self.basis = self.basis or predictor.basis
        return replace(cell, prediction=predictor.of(step), tokens=tokens, epoch=epoch)

    def as_json(self) -> dict[str, Any]:
        """Return everything; sizes in GiB, times in seconds."""
        return {
            "basis": "computed, not measured",
            "gpu": {"name": self.gpu.name, "usable_gib": round(self.gpu.usable_gib, 3)},
            "cells": [each.as_json() for each in self.cells],
        }

    def lines(self) -> Iterator[str]:
        """Yield the table as a person reads it."""
        published = any(each.published for each in self.cells)
        rows = [[*_HEADS, *_PUBLISHED * published]]
        for each in self.cells:
            given = each.published
            measured = [f"{given[key]:.2f}" if key in given else "-" for key in _SIZES]
            measured.append(clock(given.get("epoch_s")))
            rows.append(each.row() + measured * published)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (
                f"{cell:<{width}}" if head in ("CELL", "VERDICT") else f"{cell:>{width}}"
                for head, cell, width in zip(rows[0], row, widths, strict=True)
            )
            yield "  ".join(cells).rstrip()
        gpu = self.gpu
        yield (
            f"predicted for {gpu.name}: {gpu.usable_gib:.1f} of {gpu.memory_gib:.1f} GiB usable; "
            "nothing is measured"
        )
        if self.basis:
            epochs = sorted({each.epoch for each in self.cells if each.epoch})
            yield f"times by {self.basis}"
            yield f"EPOCH: the time of {'; or of '.join(epochs)}"
        if any(each.prediction and each.epoch_s is None for each in self.cells):
            yield "-: no time is predicted for fp32, because configs/gpus.yaml has bf16 peaks only"
        yield from (f"{each.name}: {each.fault}" for each in self.cells if each.fault)


def clock(seconds: float | None) -> str:
    """Return a time as 3 min 32 s, or 2 h 05 min."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
