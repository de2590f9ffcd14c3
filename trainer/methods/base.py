"""What a training method is: its config, data, models and loss, and what must stay the same."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from runspec.keys.key import may_change
from runspec.keys.train import TrainConfig
from trainer.checkpoint.weights import SafetensorsSource
from trainer.data import batches
from trainer.data.batches import Data
from trainer.data.form import SINGLE, SampleForm
from trainer.errors import ConfigError
from trainer.layers.adapters.base import disabled
from trainer.layers.batch import MicroBatch
from trainer.model import Decoder
from trainer.models.build import Model
from trainer.models.builder import Builder
from trainer.parallel.world import World
from trainer.sharded import reshard


@dataclass(frozen=True)
class Models:
    """The models of a method: the one that is trained, and frozen ones beside it."""

    policy: Model
    # The policy as it was before training, if that is a model of its own.
    reference: Model | None = None
    # The model to imitate.
    teacher: Model | None = None
    # Of the frozen models' weights, by name.
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    @property
    def modules(self) -> list[Decoder]:
        """The modules of all of them, the trained one first."""
        models = (self.policy, self.reference, self.teacher)
        return [model.module for model in models if model is not None]

    @contextmanager
    def as_reference(self) -> Iterator[Decoder]:
        """The policy as it was before training, for forward passes without gradients.

        Call it before the policy's own pass over a batch: FSDP gathers ahead, in the backward pass,
        what the last forward pass used.
        """
        if self.reference is None:
            with torch.no_grad(), disabled(self.policy.module):
                yield self.policy.module
        else:
            with self._frozen(self.reference) as module:
                yield module

    def as_teacher(self) -> AbstractContextManager[Decoder]:
        """The teacher, for forward passes without gradients; see `as_reference`."""
        if self.teacher is None:
            raise RuntimeError("the method's config names no teacher_key")
        return self._frozen(self.teacher)

    @contextmanager
    def _frozen(self, model: Model) -> Iterator[Decoder]:
        with torch.no_grad():
            yield model.module
        # Its embedding and output head would stay gathered until the next step.
        reshard(model.module)


class LossSum(NamedTuple):
    """The loss of a micro-batch, summed over the targets that `Objective.target_count` counts."""

    # A scalar, fp32, with a graph behind it even if there is no target.
    total: torch.Tensor
    # Further sums over the same targets by name, detached scalars; the same names in every
    # micro-batch. Each is logged under its name, as the mean over all targets of the step, and
    # under val_ and its name as that over all targets of dataset_val. A name with a slash is in
    # the group before it in TensorBoard.
    metrics: dict[str, torch.Tensor]


class Objective(ABC):
    """One training method on one rank; the loop calls `build_data`, `build_models`, then `loss`.

    How many targets a step has must be known from its batches, because all ranks must know the sum
    before the first backward pass: the gradient is that of the mean over the targets of the whole
    step.

    Attributes:
        config_class: its keys, and what the launcher knows of it: whether it has a reference or a
            teacher, and how many documents a sample has.
        form: what it reads of a sample, and which documents stay together.
        normaliser: what the loss is a mean over: trained tokens, documents, or samples, such as
            pairs.
        extremes: by name, figures among LossSum.metrics that are the smallest or the largest of
            their values, over all targets, and no sum.
        counted: by name, figures among LossSum.metrics that are means over some of the targets
            only: the name of the sum there that counts these.
    """

    config_class: ClassVar[type[TrainConfig]]
    form: ClassVar[SampleForm] = SINGLE
    normaliser: ClassVar[Literal["tokens", "documents", "samples"]] = "tokens"
    extremes: ClassVar[Mapping[str, Literal["min", "max"]]] = {}
    counted: ClassVar[Mapping[str, str]] = {}

    def __init__(self, config: Any, world: World) -> None:
        self.config, self.world = config, world

    @classmethod
    def faults(cls, config: Any) -> list[str]:
        """What of a config the method cannot use, one line each; read by `trainer.check`.

        Weights and data are not read.
        """
        return []

    def build_data(self) -> Data:
        """The batches; raises ConfigError if the data cannot be read or used."""
        return batches.build(self.config, self.world, self.form)

    def build_models(self, builder: Builder) -> Models:
        """The models that the config names, laid out over the ranks.

        Raises:
            ConfigError: they do not fit the data, or their folders are incomplete.
        """
        config, reference, teacher = self.config, None, None
        policy = builder.policy()
        if config.reference_kind == "model":
            reference = builder.reference()
        if folder := config.teacher_of(vars(config)):
            teacher = builder.teacher(folder)
        return Models(policy, reference, teacher, dict(builder.fingerprints))

    def prepare(  # noqa: B027, most methods have nothing to do
        self, models: Models, data: Data
    ) -> None:
        """What is done once before training, when the models have the weights they begin with.

        All ranks call this together, at every start, before a checkpoint is loaded.
        """

    def before_step(
        self, models: Models, micro_batches: list[MicroBatch], step: int
    ) -> list[MicroBatch]:
        """What the step of this index trains on; all ranks call this together."""
        return micro_batches

    @property
    def generates(self) -> bool:
        """Whether the policy answers prompts before some step or all of them."""
        return False

    def trace_answers(self, models: Models) -> None:  # noqa: B027, most methods generate nothing
        """Allocate what answers take, for a trace, whose tensors have no values."""

    def validated(self) -> None:  # noqa: B027, most methods hold nothing for it
        """A pass over dataset_val has ended."""

    @classmethod
    def sample_faults(cls, config: Any) -> list[str]:
        """What of the method goes wrong on the first samples; read by `trainer.check --samples`."""
        return []

    def step_figures(self) -> dict[str, float | None]:
        """Further figures of the steps since the last call, the same on all ranks."""
        return {}

    @abstractmethod
    def loss(self, models: Models, batch: MicroBatch) -> LossSum:
        """The loss of one micro-batch, which is in CPU memory; a trace has fake tensors."""

    def target_count(self, batch: MicroBatch) -> int:
        """The number by which the summed loss of a micro-batch becomes a mean."""
        if self.normaliser == "tokens":
            return batch.target_count
        return len(batch.lengths) if self.normaliser == "documents" else batch.sample_count

    def identity(self, models: Models, data: Data) -> dict[str, Any]:
        """What must stay the same between a checkpoint and the start that resumes it, by key."""
        config = self.config
        base, adapter = None, models.policy.module.adapter
        if (adapter is not None or config.freeze) and config.reads_weights:
            # Checkpoints hold what is trained; the rest must still be there.
            source = config.checkpointer
            base = self.world.from_main(lambda: SafetensorsSource.open(source).fingerprint())
        return {
            "method": models.policy.method,
            "model": config.model,
            "base_weights": base,
            "freeze": config.freeze,
            "dtype": config.dtype,
            "master_weights": config.master_weights,
            "fp8_recipe_name": config.fp8_recipe,
            "optimizer": {
                key: value
                for key, value in config.optimizer.items()
                if not may_change(TrainConfig.keys(), f"optimizer.{key}")
            },
            "seed": config.seed,
            "shuffle": config.shuffle,
            **self.own_values(may_change=False),
            **{f"{name}_weights": sha for name, sha in models.fingerprints.items()},
            **data.training.identity,
        }

    def own_values(self, may_change: bool) -> dict[str, Any]:
        """The values of the keys that the method adds, and that may, or may not, change at resume.

        A teacher's folder is in neither: its weights count, whatever it is called.
        """
        own = self.config_class.own_keys()
        return {
            name: getattr(self.config, name)
            for name, key in own.items()
            if "." not in name and key.may_change == may_change
            if name != self.config.teacher_key
        }


def named(dotted: str) -> type[Objective]:
    """The method at a dotted path, such as trainer.methods.sft.SupervisedFineTuning.

    Raises:
        ConfigError: there is no method.
    """
    module, _, name = dotted.rpartition(".")
    try:
        objective = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"there is no method {dotted}: {error}") from None
    if not (isinstance(objective, type) and issubclass(objective, Objective)):
        raise ConfigError(f"{dotted} is no trainer.methods.base.Objective")
    return objective
