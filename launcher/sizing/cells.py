"""What is predicted of each cell of a sweep, as a table: its memory, and the time of its epoch.

Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import CookbookError
from launcher.recipes.recipe import Recipe
from launcher.sizing.epoch import duration, epoch_of
from launcher.sizing.gpus import Gpu
from launcher.sizing.memory import host_bytes
from launcher.sizing.recipe_step import step_of
from launcher.sizing.search import Prediction, Predictor
from launcher.sizing.step_config import FP32, GIB

_HEADS = ("CELL", "GPUS", "PEAK GiB", "VERDICT", "TOK/S/GPU", "EPOCH")


@dataclass(frozen=True)
class PredictedCell:
    """A cell and what is predicted of it; fault: why nothing is. tokens: of an epoch."""

    number: int
    name: str
    prediction: Prediction | None = None
    tokens: int = 0
    fault: str = ""

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
        }

    def row(self) -> tuple[str, ...]:
        """Return its line of the table."""
        if self.prediction is None:
            return self.name, "-", "-", self.fault, "-", "-"
        step, epoch_s = self.prediction.step, self.epoch_s
        verdict, host = "fits" if self.fits else "DOES NOT FIT", host_bytes(step) / GIB
        verdict += f", {host:.0f} GiB on the CPU" if host else ""
        times = ("-", "-")
        if epoch_s is not None:
            times = f"{self.prediction.rate:,.0f}", duration(epoch_s)
        peak = f"{self.prediction.peak_gib:,.2f}"
        return self.name, str(step.layout.ranks), peak, verdict, *times


class PredictedSweep:
    """The predictions of all cells on one kind of GPU, on nodes of as many as each cell takes."""

    def __init__(self, cells: Sequence[tuple[int, str, Recipe]], root: Path, gpu: Gpu) -> None:
        self.gpu = gpu
        self.cells = [self._predicted(root, *cell) for cell in cells]

    def _predicted(self, root: Path, number: int, name: str, recipe: Recipe) -> PredictedCell:
        resources = recipe.resources
        try:
            if not recipe.entry.can_estimate:
                raise CookbookError(f"{recipe.entry_name} cannot be estimated")
            config = recipe.resolved(root, "run")
            step = step_of(config, resources.nodes, resources.gpus_per_node)
            tokens = epoch_of(config, step)[0]
        except CookbookError as error:
            return PredictedCell(number, name, fault=f"not computed: {error.faults[0]}")
        return PredictedCell(number, name, Predictor(step, self.gpu).of(step), tokens)

    def as_json(self) -> dict[str, Any]:
        """Return everything; sizes in GiB, times in seconds."""
        return {
            "basis": "computed, not measured",
            "gpu": {"name": self.gpu.name, "usable_gib": round(self.gpu.usable_gib, 3)},
            "cells": [each.as_json() for each in self.cells],
        }

    def lines(self) -> Iterator[str]:
        """Yield the table as a person reads it."""
        rows = [_HEADS, *(each.row() for each in self.cells)]
        # The verdict's column is as wide as verdicts are: a fault may be long.
        widths = [max(len(row[n]) for row in rows if n != 3 or row[1] != "-") for n in range(6)]
        for name, gpus, peak, verdict, *times in rows:
            yield (
                f"{name:<{widths[0]}}  {gpus:>{widths[1]}}  {peak:>{widths[2]}}  "
                f"{verdict:<{widths[3]}}  {times[0]:>{widths[4]}}  {times[1]:>{widths[5]}}"
            )
        yield (
            f"predicted for {self.gpu.name}: {self.gpu.usable_gib:.1f} of "
            f"{self.gpu.memory_gib:.1f} GiB usable; nothing is measured. Times are of an epoch; "
            "of fp32 none is predicted (docs/estimates.md)"
        )
