"""What a training method is: its data, its models, its loss, and what must stay the same."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from runspec.keys.key import Key
from trainer.config import KEYS, TrainConfig
from trainer.data.batches import Data, MicroBatch
from trainer.errors import ConfigError
from trainer.models.build import Model
from trainer.models.decoder import Decoder
from trainer.parallel.world import World
from trainer.storage.weights import SafetensorsSource

# The method of a config that names none.
SFT = "trainer.objectives.sft.SupervisedFineTuning"


@dataclass(frozen=True)
class Models:
    """The models of a method: the one that is trained, and frozen ones beside it.

    reference: the policy as it was before training, for preference tuning.
    teacher: the model to imitate, for distillation.
    """

    policy: Model
    reference: Model | None = None
    teacher: Model | None = None

    @property
    def modules(self) -> list[Decoder]:
        """The modules of all of them, the trained one first."""
        models = (self.policy, self.reference, self.teacher)
        return [model.module for model in models if model is not None]


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

    How many targets a step has must be known from its batches, because all ranks must know the sum
    before the first backward pass: the gradient is that of the mean over the targets of the whole
    step.

    Attributes:
        keys: the keys of its configs.
        output_chunks: in how many chunks the policy gives its logits (0: whole).
    """

    keys: ClassVar[Mapping[str, Key]] = KEYS
    output_chunks: int = 0

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.config, self.world = config, world

    @classmethod
    def faults(cls, config: TrainConfig) -> list[str]:
        """What of a config the method cannot use, one line each; read by `trainer.check`.

        Weights and data are not read.
        """
        return []

    @abstractmethod
    def build_data(self) -> Data:
        """The batches; raises ConfigError if the data cannot be read or used."""

    @abstractmethod
    def build_models(self, data: Data) -> Models:
        """The models, laid out over the ranks; raises ConfigError if they do not fit the data."""

    @abstractmethod
    def loss(self, models: Models, batch: MicroBatch) -> LossSum:
        """The loss of one micro-batch, which is in CPU memory.

        Under tensor parallelism the loop calls it inside `vocabulary_split_loss`. `trainer.trace`
        calls it with a policy alone, on fake tensors.
        """

    def target_count(self, batch: MicroBatch) -> int:
        """The number by which the summed loss of a micro-batch becomes a mean: trained tokens."""
        return batch.target_count

    def identity(self, models: Models, data: Data) -> dict[str, Any]:
        """What must stay the same between a checkpoint and the start that resumes it, by key."""
        config, batches = self.config, data.training
        base, adapter = None, models.policy.module.adapter
        if adapter is not None:
            # Which base model an adapter belongs to: its checkpoints do not hold that.
            source = config.checkpointer
            found = self.world.on_main(lambda: SafetensorsSource.open(source).fingerprint())
            base = self.world.gather(found)[0]
        return {
            "method": models.policy.method,
            "model": config.model,
            "base_weights": base,
            **({} if adapter is None else adapter.identity(models.policy.module)),
            "dtype": config.dtype,
            "master_weights": config.master_weights,
            "fp8_recipe_name": config.fp8_recipe,
            "optimizer._component_": config.optimizer["_component_"],
            "seed": config.seed,
            "shuffle": config.shuffle,
            **{key: getattr(config, key) for key in self.keys if key not in KEYS},
            "dataset_size": batches.size,
            "dataset_sha256": batches.rows.samples.sha256,
            "packed_row_length": batches.rows.length,
            "samples_per_step": batches.samples_per_step,
            "steps_per_epoch": batches.steps_per_epoch,
        }


def named(dotted: str) -> type[Objective]:
    """The method at a dotted path, such as trainer.objectives.sft.SupervisedFineTuning.

    Raises:
        ConfigError: there is no method.
    """
    module, _, name = dotted.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"there is no method {dotted}: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Objective)):
        raise ConfigError(f"{dotted} is no trainer.objectives.base.Objective")
    return found
