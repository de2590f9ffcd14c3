"""Faster settings of the same step, by their predicted time: cookbook estimate --tune.

Tried are layouts, with and without each kind of activation checkpointing, and every way to split a
step's rows into micro-steps. The rows per step, and so what is learned, stay the same. Nothing is
measured: what is close in this table is for a benchmark to decide.
"""

from collections.abc import Iterator
from typing import Any

from plugins.estimate.launcher import search
from plugins.estimate.launcher.search import BASIS, Prediction, Predictor
from plugins.estimate.launcher.step_config import StepConfig

# Predictions that lie closer together than this say nothing about which is faster.
ALIKE = 0.05
SHOWN = 8
CHECKPOINTING = ("none", "op", "2", "full")


def layouts(step: StepConfig) -> list[tuple[int, int, int]]:
    """Return tensor parallelism, replicas and expert parallelism to compare, the simplest first.

    Layers whole or split within a node; one replica over all nodes or one replica in each, or, if
    an adapter is trained, in each GPU or tensor-parallel group; experts whole, spread over a node's
    ranks, or over all of a replica.
    """
    each = {1, step.nodes}
    return [
        (split, count, spread)
        for split in search.TENSOR_PARALLEL
        for count in sorted(each if step.adapter is None else each | {step.layout.ranks // split})
        for spread in search.spreads(step)
    ]


class Tuning:
    """What is predicted of a recipe, and of the settings near it that fit, the fastest first."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.own = predictor.of(predictor.own)
        modes = [{"checkpointing": mode} for mode in CHECKPOINTING]
        candidates = search.settings(
            predictor.own, layout=layouts, rows=self._rows, checkpointing=modes
        )
        fitting = [each for each in map(predictor.of, candidates) if each.fits]
        fitting.sort(key=lambda each: -each.rate)
        self.faster = [*self._simplest(fitting)]

    def _rows(self, step: StepConfig) -> Iterator[dict[str, int]]:
        """Every way to split the rows of the recipe's step."""
        own = self.predictor.own
        rows, left = divmod(own.rows_per_step, step.layout.data_parallel)
        for batch in () if left else range(1, rows + 1):
            if rows % batch == 0:
                for sync in {own.sync_each, step.fsdp if batch < rows else own.sync_each}:
                    yield {"batch": batch, "accumulation": rows // batch, "sync_each": sync}

    def changes(self, prediction: Prediction) -> str:
        """Return the keys that differ from the recipe's."""
        return search.overrides(prediction.step, self.own.step)

    def _simplest(self, fitting: list[Prediction]) -> Iterator[Prediction]:
        """Of settings with equal predictions, the one with the fewest changes, then memory."""
        while fitting:
            least = (1 - ALIKE) * fitting[0].rate
            # What does not fit is no measure.
            if self.own.fits and least <= self.own.rate:
                return
            alike = [each for each in fitting if each.rate > least]
            yield min(alike, key=lambda each: (self.changes(each).count("="), each.peak_gib))
            fitting = fitting[len(alike) :]

    def as_json(self) -> dict[str, Any]:
        """Return the recipe's own setting and the faster ones; times in seconds."""
        return {
            "basis": "predicted, not measured",
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
        yield f"from {BASIS}"
        yield f"{'TOKENS/S/GPU':>12}{'MFU %':>7}{'HFU %':>7}{'GIB':>7}  CHANGES"
        fits = "" if self.own.fits else ", which does not fit"
        yield _line(self.own, f"none: as the recipe has it{fits}")
        if self.faster and not self.own.fits:
            yield "the recipe does not fit; these settings do, the fastest first:"
        for each in self.faster[:SHOWN]:
            yield _line(each, self.changes(each))
        if not self.faster and self.own.fits:
            yield "nothing that fits is predicted to be more than 5 % faster"
        elif not self.faster:
            yield (
                "neither the recipe nor a setting near it fits: use more GPUs (--nodes), LoRA or "
                "QLoRA"
            )


def _line(prediction: Prediction, text: str) -> str:
    took = prediction.time
    return (
        f"{prediction.rate:>12,.0f}{100 * took.mfu:>7.1f}{100 * took.hfu:>7.1f}"
        f"{prediction.peak_gib:>7.1f}  {text}"
    )
