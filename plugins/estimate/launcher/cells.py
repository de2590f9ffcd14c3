"""What is predicted of each cell of a sweep, as a table: its memory, and the time of its epoch.

Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import CookbookError
from launcher.gpus import by_name
from launcher.recipe.model import Recipe
from plugins.estimate.launcher.estimate import Estimate
from plugins.estimate.launcher.memory import host_bytes
from plugins.estimate.launcher.step_config import FP32, GIB
from plugins.estimate.launcher.text import time_text

_HEADS = ("CELL", "GPUS", "PEAK GiB", "VERDICT", "TOK/S/GPU", "EPOCH")


@dataclass(frozen=True)
class PredictedCell:
    """A cell and its estimate; fault: why there is none."""

    name: str
    estimate: Estimate | None = None
    fault: str = ""

    @property
    def hours(self) -> float | None:
        """Of an epoch; None if unknown, and for fp32, whose peak no GPU's entry has."""
        found = self.estimate
        return None if found is None or found.step.element_bytes == FP32 else found.hours

    def row(self) -> tuple[str, ...]:
        """Return its line of the table."""
        found = self.estimate
        if found is None:
            return self.name, "-", "-", self.fault, "-", "-"
        verdict, host = "fits" if found.fits else "DOES NOT FIT", host_bytes(found.step) / GIB
        verdict += f", {host:.0f} GiB on the CPU" if host else ""
        times = ("-", "-")
        if self.hours is not None:
            times = f"{found.rate:,.0f}", time_text(self.hours)
        peak = f"{found.prediction.peak_gib:,.2f}"
        return self.name, str(found.step.layout.ranks), peak, verdict, *times


class PredictedSweep:
    """The predictions of all cells on one kind of GPU, on nodes of as many as each cell takes."""

    def __init__(self, cells: Sequence[tuple[str, Recipe]], root: Path, gpu: str | None) -> None:
        self.gpu = by_name(gpu)
        self.cells = [self._predicted(root, *cell) for cell in cells]

    def _predicted(self, root: Path, name: str, recipe: Recipe) -> PredictedCell:
        try:
            found = Estimate.of(recipe, root, self.gpu.name)
            # Its files are read here, so that a fault of theirs is the cell's.
            _ = found.epoch
            return PredictedCell(name, found)
        except CookbookError as error:
            return PredictedCell(name, fault=f"not computed: {error.faults[0]}")

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
            f"{self.gpu.memory_gib:.1f} GiB usable; nothing is measured. EPOCH is the time of one "
            "epoch; times are not predicted for fp32 (docs/measurements.md)"
        )
