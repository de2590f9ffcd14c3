"""What is predicted of each cell of a sweep, as a table: its memory, and the time of its epoch.

Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher.errors import CookbookError
from launcher.recipes.recipe import Recipe
from launcher.sizing.epoch import epoch_of
from launcher.sizing.gpus import Gpu
from launcher.sizing.memory import host_bytes
from launcher.sizing.recipe_step import step_of
from launcher.sizing.search import Prediction, Predictor
from launcher.sizing.step_config import FP32, GIB, StepConfig

_HEADS = ("CELL", "GPUS", "PEAK GiB", "VERDICT", "TOK/S/GPU", "EPOCH")


@dataclass(frozen=True)
class PredictedCell:
    """A cell and what is predicted of it; fault: why nothing is."""

    number: int
    name: str
    prediction: Prediction | None
    tokens: int = 0
    fault: str = ""
    published: Mapping[str, float] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether it fits, or nobody knows."""
        return self.prediction is None or self.prediction.fits

    @cached_property
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
            "fits": self.prediction.fits,
            "host_memory_per_node_gib": round(host_bytes(step) / GIB, 3),
            "tokens_per_second_per_gpu": None if epoch_s is None else self.prediction.rate,
            "epoch_tokens": self.tokens,
            "epoch_s": epoch_s,
            "published": dict(self.published),
        }


class PredictedSweep:
    """The predictions of all cells on one kind of GPU."""

    def __init__(
        self, cells: Sequence[tuple[int, str, Recipe, Mapping[str, float]]], root: Path, gpu: Gpu
    ) -> None:
        self.gpu = gpu
        steps: dict[int, tuple[StepConfig, int, str]] = {}
        faults: dict[int, str] = {}
        for number, _, recipe, _ in cells:
            try:
                steps[number] = _step(recipe, root)
            except CookbookError as error:
                faults[number] = error.faults[0]
        known = [step for step, _, _ in steps.values()]
        own = next((step for step in known if step.element_bytes != FP32), None)
        own = own or (known[0] if known else None)
        self.epochs = sorted({epoch for _, _, epoch in steps.values()})
        self.predictor = Predictor(own, gpu) if own else None
        self.cells = []
        for number, name, _, published in cells:
            step, tokens, _ = steps.get(number, (None, 0, ""))
            prediction = self._of(step) if step else None
            self.cells.append(
                PredictedCell(number, name, prediction, tokens, faults.get(number, ""), published)
            )

    def _of(self, step: StepConfig) -> Prediction | None:
        """Return what is predicted of a step, on nodes of as many GPUs as it takes."""
        if self.predictor is None:
            return None
        own = replace(self.predictor.own, gpus_per_node=step.gpus_per_node)
        return replace(self.predictor, own=own).of(step)

    def as_json(self) -> dict[str, Any]:
        """Return everything; sizes in GiB, times in seconds."""
        return {
            "basis": "computed, not measured",
            "gpu": {"name": self.gpu.name, "usable_gib": round(self.gpu.usable_gib, 3)},
            "cells": [each.as_json() for each in self.cells],
        }

    def lines(self) -> Iterator[str]:
        """Yield the table as a person reads it."""
        rows = [[*_HEADS]]
        published = any(each.published for each in self.cells)
        if published:
            rows[0] += ["MEASURED BY OTHERS: ALLOCATED", "RESERVED", "EPOCH"]
        for each in self.cells:
            rows.append(_row(each))
            if published:
                rows[-1] += _published(each.published)
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        for row in rows:
            cells = (
                f"{cell:<{width}}" if k in (0, 3) else f"{cell:>{width}}"
                for k, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            yield "  ".join(cells).rstrip()
        gpu = self.gpu
        yield (
            f"predicted for {gpu.name}: {gpu.usable_gib:.1f} of {gpu.memory_gib:.1f} GiB usable; "
            "nothing is measured"
        )
        if self.predictor is not None:
            yield f"times by {self.predictor.basis}"
            yield f"EPOCH: the time of {'; or of '.join(self.epochs)}"
        if any(each.prediction and each.epoch_s is None for each in self.cells):
            yield "-: no time is predicted for fp32, because configs/gpus.yaml has bf16 peaks only"
        for each in self.cells:
            if each.fault:
                yield f"{each.name}: {each.fault}"


def _step(recipe: Recipe, root: Path) -> tuple[StepConfig, int, str]:
    """Return the step of a recipe, the tokens of an epoch, and where their number is from."""
    if not recipe.entry.can_estimate:
        raise CookbookError(f"{recipe.entry_name} cannot be estimated")
    config, resources = recipe.resolved(root, "run"), recipe.resources
    step = step_of(config, resources.nodes, resources.gpus_per_node)
    return step, *epoch_of(config, step)[:2]


def _row(cell: PredictedCell) -> list[str]:
    prediction = cell.prediction
    if prediction is None:
        return [cell.name, "-", "-", "not computed", "-", "-"]
    host = host_bytes(prediction.step) / GIB
    verdict = "fits" if prediction.fits else "DOES NOT FIT"
    verdict += f", {host:.0f} GiB on the CPU" if host else ""
    rate = "-" if cell.epoch_s is None else f"{prediction.rate:,.0f}"
    ranks = str(prediction.step.layout.ranks)
    return [cell.name, ranks, f"{prediction.peak_gib:,.2f}", verdict, rate, clock(cell.epoch_s)]


def _published(given: Mapping[str, float]) -> list[str]:
    sizes = [f"{given[key]:.2f}" if key in given else "-" for key in _SIZES]
    return [*sizes, clock(given.get("epoch_s"))]


_SIZES = ("allocated_gib", "reserved_gib")


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
