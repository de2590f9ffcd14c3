"""What a recipe needs: memory per GPU, time, disk, and what to change if it does not fit.

All of it is computed from the recipe, none of it measured; `launcher.sizing.memory` has the
formulas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from launcher import venv
from launcher.errors import PreflightFault, UsageFault
from launcher.recipes.recipe import Recipe
from launcher.sizing import gpus
from launcher.sizing.memory import StepMemory, checkpoint_bytes, export_bytes, host_bytes
from launcher.sizing.search import METHODS, Predictor, remedies, settings
from launcher.sizing.step_config import GIB, StepConfig, step_of

DEFAULT_MFU = 0.4
# English text, Llama 3's and Qwen's tokenizers: roughly; for an epoch whose tokens nobody counted.
BYTES_PER_TOKEN = 4
COMPARED_NODES = (1, 2, 4, 8)
_STEP_FIELDS = {field.name for field in fields(StepConfig)} - {"shape", "layout"}


def epoch_of(config: Mapping[str, Any], length: int) -> tuple[int, str]:
    """Return the tokens of an epoch, by the size of a local file, else a million; and what it is.

    length: tokens at which a sample is cut.
    """
    dataset = config.get("dataset")
    files = dataset.get("data_files") if isinstance(dataset, Mapping) else None
    file = Path(files) if isinstance(files, str) else None
    if file is None or file.suffix != ".jsonl" or not file.is_file():
        return 10**6, "a million tokens; the dataset is not a local file"
    samples = size = 0
    with file.open("rb") as lines:
        for line in lines:
            samples += bool(line.strip())
            size += min(len(line), length * BYTES_PER_TOKEN)
    tokens = max(size // BYTES_PER_TOKEN, 1)
    return tokens, f"an epoch of {samples:,} samples, about {tokens:,} tokens by their size"


class Estimate:
    """All that is computed of one recipe.

    predictor: of settings near the recipe's own step. remedies: what to change if it does not
    fit. compared: full, LoRA and QLoRA on 1, 2, 4 and 8 nodes. traced: the same step on fake
    tensors.
    """

    def __init__(
        self,
        recipe: Recipe,
        root: Path,
        gpu: str | None = None,
        mfu: float = DEFAULT_MFU,
        network_gbits: float | None = None,
        *,
        compares: bool = False,
        traces: bool = False,
    ) -> None:
        """Work everything out for a recipe whose models lie under root.

        gpu: a name of configs/gpus.yaml. network_gbits: per GPU between nodes; None for the usual.
        compares, traces: whether `compared` and `traced` are wanted; else they are empty.
        """
        if not recipe.entry.can_estimate:
            raise UsageFault(
                f"{recipe.name} cannot be estimated: it starts {recipe.entry_name}, and only the "
                "kit's own trainer (entry: sft) can be computed"
            )
        self.name, self.description = recipe.name, recipe.description
        config = recipe.resolved(root, "run")
        step = step_of(config, recipe.resources.nodes, recipe.resources.gpus_per_node)
        self.step, self.gpu = step, gpus.by_name(gpu)
        self.predictor = Predictor(step, self.gpu, mfu, network_gbits)
        self.memory = StepMemory(step)
        self.fits = self.memory.peak / GIB <= self.gpu.usable_gib
        self.tokens, self.tokens_are = epoch_of(config, step.length)
        # At the given MFU.
        self.tokens_per_second_per_gpu = self.gpu.bf16_tflops * 1e12 * mfu / step.flops.model
        rate = self.tokens_per_second_per_gpu * step.layout.ranks
        self.hours = self.tokens / rate / 3600
        self.remedies = [] if self.fits else [*remedies(self.predictor)]
        cells = settings(step, method=METHODS, nodes=COMPARED_NODES) if compares else ()
        self.compared = [self.predictor.of(cell) for cell in cells]
        self.traced: dict[str, Any] | None = None
        if traces:
            self.traced = trace(recipe.train_config(root, "run"), step.layout.ranks)

    def as_json(self) -> dict[str, Any]:
        """Return everything, sizes in GiB."""
        step, found, gpu = self.step, self.memory, self.gpu
        return {
            "recipe": self.name,
            "basis": "computed, not measured",
            "gpu": {"name": gpu.name, "memory_gib": gpu.memory_gib},
            "usable_gib": round(gpu.usable_gib, 3),
            "fits": self.fits,
            "peak_gib": round(found.peak / GIB, 3),
            "peak_phase": found.peak_phase,
            "terms_gib": {k: round(v / GIB, 3) for k, v in found.terms.items() if v},
            "phases_gib": {k: round(sum(v.values()) / GIB, 3) for k, v in found.phases.items()},
            "layout": vars(step.layout),
            "step": {key: value for key, value in vars(step).items() if key in _STEP_FIELDS},
            "parameters": step.total,
            "trainable": step.trainable,
            "host_memory_per_node_gib": round(host_bytes(step) / GIB, 3),
            "checkpoint_gib": round(checkpoint_bytes(step) / GIB, 3),
            "export_gib": round(export_bytes(step) / GIB, 3),
            "mfu": self.predictor.mfu,
            "hfu": self.predictor.mfu * step.flops.hardware / step.flops.model,
            "tokens": self.tokens,
            "hours": self.hours,
            "gpu_hours": self.hours * step.layout.ranks,
            "remedies": [vars(each) for each in self.remedies],
            "compare": [
                {"method": each.step.method, "nodes": each.step.nodes, **each.as_json()}
                for each in self.compared
            ],
            "traced": self.traced,
        }


def peak_gib(recipe: Recipe, root: Path) -> float:
    """Return the memory that a recipe's step needs of each GPU, computed."""
    resources = recipe.resources
    config = recipe.resolved(root, "run")
    return StepMemory(step_of(config, resources.nodes, resources.gpus_per_node)).peak / GIB


def trace(train_config: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return what the trainer finds of the same step on fake tensors, to check the formulas.

    PreflightFault if it cannot be traced. See `python -m trainer.trace`.
    """
    try:
        done = venv.ask_trainer("trace", train_config, "--ranks", str(ranks))
    except OSError as error:
        raise PreflightFault(
            f"cannot trace: {error}: set up the environment with: bash setup.sh"
        ) from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["no message"]
        faults = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
        raise PreflightFault(faults or said[-1:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
