"""The fastest settings of a recipe that fit its GPUs, by the predicted time of a step.

Tried are the layouts of `launcher.sizing.scaling`, with and without each kind of activation
checkpointing, and every way to split a step's rows into micro-steps. The rows per step, and so
what is learned, stay the same. Nothing is measured: what is close in this table is for a benchmark
to decide.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launcher.sizing.scaling import layout_name, layouts
from launcher.sizing.search import CHECKPOINTING, Prediction, Predictor, overrides, settings
from launcher.sizing.step_config import StepConfig

# Predictions that lie closer together than this say nothing about which is faster.
ALIKE = 0.01
SHOWN = 8


class Tuning:
    """What is predicted of a recipe, and of the settings near it that fit, the fastest first."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.own = predictor.of(predictor.own)
        candidates = settings(
            predictor.own,
            layout=layouts,
            micro_steps=self._micro_steps,
            checkpointing=CHECKPOINTING,
        )
        found = [each for each in map(predictor.of, candidates) if each.fits]
        found.sort(key=lambda each: -each.rate)
        self.faster = [*self._simplest(found)]

    def _micro_steps(self, step: StepConfig) -> Iterator[tuple[int, int, bool]]:
        """Every way to split the rows of the recipe's step."""
        own = self.predictor.own
        rows, left = divmod(own.rows_per_step, step.layout.data_parallel)
        for batch in () if left else range(1, rows + 1):
            if rows % batch == 0:
                for sync in {own.sync_each, step.fsdp if batch < rows else own.sync_each}:
                    yield batch, rows // batch, sync

    def changes(self, found: Prediction) -> str:
        """Return the keys that differ from the recipe's."""
        return overrides(found.step, self.own.step)

    def _simplest(self, found: list[Prediction]) -> Iterator[Prediction]:
        """Of settings predicted alike the one that changes the least, then the leanest."""
        while found:
            least = (1 - ALIKE) * found[0].rate
            if least <= self.own.rate:
                return
            alike = [each for each in found if each.rate > least]
            yield min(alike, key=lambda each: (self.changes(each).count("="), each.peak_gib))
            found = found[len(alike) :]

    def as_json(self) -> dict[str, Any]:
        """Return the recipe's own setting and the faster ones; times in seconds."""
        return {
            "basis": "predicted, not measured",
            "peak_share": self.predictor.peak_share,
            "own": {"overrides": "", **self.own.as_json()},
            "faster": [{"overrides": self.changes(each), **each.as_json()} for each in self.faster],
        }

    def lines(self) -> Iterator[str]:
        """Yield it as a person reads it."""
        step, predictor = self.own.step, self.predictor
        yield (
            f"Settings that fit {predictor.gpu.name}, {step.rows_per_step} rows per step in each; "
            "predicted, not measured"
        )
        yield predictor.basis
        yield f"{'TOKENS/S/GPU':>12}{'MFU %':>7}{'HFU %':>7}{'GIB':>7}  CHANGES"
        fits = "" if self.own.fits else ", which does not fit"
        yield _line(self.own, f"none: {layout_name(step.layout)}, as the recipe has it{fits}")
        for each in self.faster[:SHOWN]:
            yield _line(each, self.changes(each))
        if not self.faster:
            yield "nothing that fits is predicted to be more than 1 % faster"


def _line(found: Prediction, words: str) -> str:
    took = found.time
    return (
        f"{found.rate:>12,.0f}{100 * took.mfu:>7.1f}{100 * took.hfu:>7.1f}"
        f"{found.peak_gib:>7.1f}  {words}"
    )
