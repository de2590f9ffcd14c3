"""What a training method is: its data, its models, its loss, and what must stay the same."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from trainer.config import TrainConfig
from trainer.data.batches import Data, MicroBatch
from trainer.models.build import Model
from trainer.parallel.world import World
from trainer.storage.weights import SafetensorsSource


@dataclass(frozen=True)
class Models:
    """The models of a method: the one that is trained, and frozen ones beside it.

    reference: the policy as it was before training, for preference tuning.
    teacher: the model to imitate, for distillation.
    """

    policy: Model
    reference: Model | None = None
    teacher: Model | None = None


class LossSum(NamedTuple):
    """The loss of a micro-batch, summed over its `target_count` targets.

    total: a scalar, fp32, with a graph behind it even if there is no target.
    metrics: further sums over the same targets by name, detached scalars; the same names in every
    micro-batch. Each is logged under its name, as the mean over all targets of the step.
    """

    total: torch.Tensor
    metrics: dict[str, torch.Tensor]


class Objective(ABC):
    """One training method on one rank; the loop calls `build_data`, `build_models`, then `loss`.

    How many targets a step has is in its batches, because all ranks must know the sum before the
    first backward pass: the gradient is that of the mean over the targets of the whole step.
    """

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.config, self.world = config, world

    @abstractmethod
    def build_data(self) -> Data:
        """The batches; raises ConfigError if the data cannot be read or used."""

    @abstractmethod
    def build_models(self, data: Data) -> Models:
        """The models, laid out over the ranks; raises ConfigError if they do not fit the data."""

    @abstractmethod
    def loss(self, models: Models, batch: MicroBatch) -> LossSum:
        """The loss of one micro-batch, which is in CPU memory.

        Under tensor parallelism the loop calls it inside `vocabulary_split_loss`.
        """

    def identity(self, models: Models, data: Data) -> dict[str, Any]:
        """What must stay the same between a checkpoint and the start that resumes it, by key."""
        config, batches = self.config, data.training
        base = None
        if models.policy.method != "full":
            # Which base model an adapter belongs to: its checkpoints do not hold that.
            source = config.checkpointer
            found = self.world.on_main(lambda: SafetensorsSource.open(source).fingerprint())
            base = self.world.gather(found)[0]
        return {
            "method": models.policy.method,
            "model": config.model,
            "base_weights": base,
            "dtype": config.dtype,
            "master_weights": config.master_weights,
            "fp8_recipe_name": config.fp8_recipe,
            "optimizer._component_": config.optimizer["_component_"],
            "seed": config.seed,
            "shuffle": config.shuffle,
            "dataset_size": batches.size,
            "dataset_sha256": batches.rows.samples.sha256,
            "packed_row_length": batches.rows.length,
            "samples_per_step": batches.samples_per_step,
            "steps_per_epoch": batches.steps_per_epoch,
        }
