"""What a recipe needs: memory per GPU, time, disk, and what to change if it does not fit.

All of it is computed from the recipe, none of it measured; `plugins.estimate.launcher.memory` has
the formulas.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher import gpus, venv
from launcher.errors import PreflightFault, UsageFault
from launcher.recipe import entries
from launcher.recipe.model import Recipe
from plugins.estimate.launcher.epoch import epoch_of
from plugins.estimate.launcher.memory import (
    StepMemory,
    checkpoint_bytes,
    export_bytes,
    host_bytes,
)
from plugins.estimate.launcher.recipe_step import step_of
from plugins.estimate.launcher.search import Prediction, Predictor, Remedy, remedies
from plugins.estimate.launcher.step_config import GIB


class Estimate:
    """All that is computed of a resolved recipe, each part when it is asked for.

    It is what the core calls `launcher.recipe.needs.Needs`.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        nodes: int,
        gpus_per_node: int,
        gpu: str | None = None,
        tokens: int | None = None,
        network_gbits: float | None = None,
    ) -> None:
        """Take the step of a resolved recipe; the other arguments as `launcher.recipe.needs.needs`.

        network_gbits: Gbit/s per GPU between nodes; None for what is usual with the GPU. UsageFault
        for an entry or a GPU that nothing is known of, RecipeFault for what is wrong in the recipe.
        """
        method = entries.of(config).method
        if method is None:
            raise UsageFault(
                f"entry: {config.get('entry')} cannot be estimated: only the kit's own training "
                "methods can be computed"
            )
        self.config, self.method, self.given_tokens = config, method, tokens
        self.step, self.gpu = step_of(config, nodes, gpus_per_node), gpus.by_name(gpu)
        self.predictor = Predictor(self.step, self.gpu, network_gbits)

    @classmethod
    def of(cls, recipe: Recipe, root: Path, gpu: str | None = None, **given: Any) -> "Estimate":
        """Return that of a recipe whose models lie under root."""
        config, resources = recipe.resolved(root, "run"), recipe.resources
        return cls(config, resources.nodes, resources.gpus_per_node, gpu, **given)

    # Memory --------------------------------------------------------------------------------------

    @cached_property
    def memory(self) -> StepMemory:
        """Of a rank's GPU in each phase of a step."""
        return StepMemory(self.step)

    @property
    def peak_gib(self) -> float:
        return self.memory.peak / GIB

    @property
    def fits(self) -> bool:
        return self.prediction.fits

    @cached_property
    def remedies(self) -> list[Remedy]:
        """What to change if it does not fit."""
        return [] if self.fits else [*remedies(self.predictor)]

    # Time ----------------------------------------------------------------------------------------

    @cached_property
    def prediction(self) -> Prediction:
        """Whether the recipe's own step fits, and its time."""
        return self.predictor.of(self.step)

    @property
    def step_s(self) -> float:
        return self.prediction.time.seconds

    @property
    def rate(self) -> float:
        return self.prediction.rate

    @property
    def lowest_rate(self) -> float:
        return self.prediction.range[0]

    @cached_property
    def epoch(self) -> tuple[int, str]:
        """The tokens to train, and what they are."""
        if self.given_tokens is not None:
            return self.given_tokens, f"{self.given_tokens:,} tokens, as given"
        step, method = self.step, self.method
        tokens, text, samples = epoch_of(self.config, step)
        if method.samples_answers:
            group = self.config.get("group_size") or method.keys()["group_size"].default
            updates, samples = round(1 / step.on_policy_share), samples * int(group)
            often = f", each in {updates} updates" if updates > 1 else ""
            text = f"an epoch of {samples:,} answers, as long as can be{often}"
            tokens = samples * updates * step.length
        return tokens, text

    @property
    def hours(self) -> float:
        return self.epoch[0] / (self.rate * self.step.layout.ranks) / 3600

    @property
    def hours_generating(self) -> float:
        """In which the ranks generate answers."""
        took = self.prediction.time
        return self.hours * took.generating_s / took.seconds

    def as_json(self) -> dict[str, Any]:
        """Return everything, sizes in GiB."""
        step, memory, gpu, time = self.step, self.memory, self.gpu, self.prediction.time
        fields = {k: v for k, v in asdict(step).items() if k not in ("shape", "layout", "teacher")}
        return {
            "basis": "computed, not measured",
            "gpu": {"name": gpu.name, "memory_gib": gpu.memory_gib},
            "usable_gib": round(gpu.usable_gib, 3),
            "fits": self.fits,
            "peak_gib": round(memory.peak / GIB, 3),
            "peak_phase": memory.peak_phase,
            "terms_gib": _in_gib(memory.terms),
            "phases_gib": _in_gib({k: sum(v.values()) for k, v in memory.phases.items()}),
            "layout": vars(step.layout),
            "step": fields,
            "parameters": step.total,
            "active_parameters": step.shape.active_parameters,
            "trainable": step.trainable,
            "host_memory_per_node_gib": round(host_bytes(step) / GIB, 3),
            "checkpoint_gib": round(checkpoint_bytes(step) / GIB, 3),
            "export_gib": round(export_bytes(step) / GIB, 3),
            "mfu": time.mfu,
            "hfu": time.hfu,
            "tokens_per_second_per_gpu": self.rate,
            "tokens_per_second_per_gpu_range": self.prediction.range,
            "tokens": self.epoch[0],
            "hours": self.hours,
            "hours_generating": self.hours_generating,
            "gpu_hours": self.hours * step.layout.ranks,
            "remedies": [vars(each) for each in self.remedies],
        }


def _in_gib(sizes: Mapping[str, float]) -> dict[str, float]:
    return {name: round(size / GIB, 3) for name, size in sizes.items() if size}


def trace(train_config: dict[str, Any], objective: str, ranks: int) -> dict[str, Any]:
    """Return what the trainer finds of the same step on fake tensors, to check the formulas.

    PreflightFault if it cannot be traced. See `python -m plugins.estimate.trace`.
    """
    try:
        done = venv.ask_trainer(
            "plugins.estimate.trace",
            [train_config],
            *("--ranks", str(ranks), "--objective", objective),
        )
    except OSError as error:
        raise PreflightFault(
            f"cannot trace: {error}: set up the environment with: bash setup.sh"
        ) from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["no message"]
        faults = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
        raise PreflightFault(faults or said[-1:])
    return dict(json.loads(done.stdout.splitlines()[-1]))
