"""The fastest settings of a recipe that fit its GPUs, by the predicted time of a step.

Tried are the layouts of `launcher.scaling`, with and without each kind of recomputation, and every
way to cut a step's rows into micro-steps. The rows of a step, and so what is learned, stay the
same. Nothing is measured: what is close in this table is for a benchmark to decide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from launcher.estimate import Report
from launcher.memory import GIB, Estimate, Plan
from launcher.scaling import Links, layouts, name, rate, step

CHECKPOINTING = {
    "none": "ac_mode=none enable_activation_checkpointing=false",
    "op": "ac_mode=selective ac_option=op enable_activation_checkpointing=false",
    "2": "ac_mode=selective ac_option=2 enable_activation_checkpointing=false",
    "full": "ac_mode=full",
}
# Predictions that lie closer together than this say nothing about which is faster.
ALIKE = 0.01
SHOWN = 8


@dataclass(frozen=True)
class Setting:
    """One way to run a recipe's step, and what is predicted of it.

    overrides: what is changed in the recipe; empty for the recipe as it is.
    """

    plan: Plan
    overrides: str
    peak_gib: float
    tokens_per_second_per_gpu: float

    def as_json(self) -> dict[str, Any]:
        """Return all but the plan."""
        return {key: value for key, value in vars(self).items() if key != "plan"}


class Tuning:
    """What is predicted of a recipe, and of the settings near it that fit, the fastest first."""

    def __init__(self, report: Report, network_gbits: float | None = None) -> None:
        self.report = report
        self._links = Links.of(report.device, report.gpus_per_node, network_gbits)
        self.own = self._setting(report.plan, report.estimate.peak / GIB)
        found = [self._setting(*candidate) for candidate in self._candidates()]
        found.sort(key=lambda each: -each.tokens_per_second_per_gpu)
        self.faster = list(self._simplest(found))

    def _candidates(self) -> Iterator[tuple[Plan, float]]:
        """Plans that fit, of the recipe's rows a step, and the GiB that they need."""
        plan, usable = self.report.plan, self.report.device.usable_gib
        for layout in layouts(plan, self.report.gpus_per_node, self.report.nodes):
            groups = layout.shard * layout.replicate
            rows, left = divmod(plan.samples_a_step, groups)
            if left or not rows:
                continue
            for batch in (size for size in range(1, rows + 1) if rows % size == 0):
                for checkpointing in CHECKPOINTING:
                    for sync in {plan.sync_each, layout.fsdp} if batch < rows else {plan.sync_each}:
                        candidate = replace(
                            layout,
                            batch=batch,
                            accumulation=rows // batch,
                            checkpointing=checkpointing,
                            sync_each=sync,
                        )
                        peak_gib = Estimate(candidate).peak / GIB
                        if peak_gib <= usable:
                            yield candidate, peak_gib

    def _setting(self, plan: Plan, peak_gib: float) -> Setting:
        took = step(plan, self.report.device, self._links, self.report.mfu)
        overrides = " ".join(_changes(self.report.plan, plan))
        return Setting(plan, overrides, peak_gib, rate(plan, took))

    def _simplest(self, found: list[Setting]) -> Iterator[Setting]:
        """Of settings predicted alike the one that changes the least, then the leanest."""
        while found:
            least = (1 - ALIKE) * found[0].tokens_per_second_per_gpu
            if least <= self.own.tokens_per_second_per_gpu:
                return
            alike = [each for each in found if each.tokens_per_second_per_gpu > least]
            yield min(alike, key=lambda each: (each.overrides.count("="), each.peak_gib))
            found = found[len(alike) :]

    def as_json(self) -> dict[str, Any]:
        """Return the recipe's own setting and the faster ones."""
        return {
            "basis": "predicted, not measured",
            "own": self.own.as_json(),
            "faster": [each.as_json() for each in self.faster],
        }

    def lines(self) -> Iterator[str]:
        """Yield it as a person reads it."""
        report, plan = self.report, self.report.plan
        yield (
            f"Settings that fit {report.device.name}, {plan.samples_a_step} rows a step in each, "
            f"at {100 * report.mfu:.0f} % of its peak while computing; predicted, not measured"
        )
        yield f"{'TOKENS/S/GPU':>12}{'GIB':>8}  CHANGES"
        fits = "" if report.fits else ", which does not fit"
        yield self._line(self.own, f"none: {name(plan)}, as the recipe has it{fits}")
        for each in self.faster[:SHOWN]:
            yield self._line(each, each.overrides)
        if not self.faster:
            yield "nothing that fits is predicted to be more than 1 % faster"

    def _line(self, setting: Setting, words: str) -> str:
        return f"{setting.tokens_per_second_per_gpu:>12,.0f}{setting.peak_gib:>8.1f}  {words}"


def _changes(own: Plan, plan: Plan) -> Iterator[str]:
    keys = {
        "tensor_parallel_dim": "tensor_parallel",
        "data_parallel_replicate_dim": "replicate",
        "batch_size": "batch",
        "gradient_accumulation_steps": "accumulation",
    }
    for key, field in keys.items():
        if getattr(plan, field) != getattr(own, field):
            yield f"{key}={getattr(plan, field)}"
    if plan.sync_each != own.sync_each:
        yield f"sync_each_micro_batch={str(plan.sync_each).lower()}"
    if plan.checkpointing != own.checkpointing:
        yield CHECKPOINTING[plan.checkpointing]
