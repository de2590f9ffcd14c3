"""What the methods of preference tuning share: the reference, and what they say of their data.

The reference is the policy with its adapter off, or a frozen second model.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from runspec import adapters
from runspec.keys.preference import PreferenceConfig
from trainer.checkpoint.weights import SafetensorsSource
from trainer.data.batches import Batches, Data
from trainer.layers.batch import MicroBatch
from trainer.layers.log_probs import document_sums, token_log_probs
from trainer.methods.base import Models, Objective
from trainer.model import Decoder

# How far the policy may be from the reference before the first update, as a share of the
# log-probability of an answer: rounding of the data type, of two forward passes.
ROUNDING = {"fp32": 1e-4, "bf16": 1e-2}


class PreferenceObjective(Objective):
    """A method that compares the policy with the model before training."""

    normaliser = "samples"
    _step = 0

    @classmethod
    def faults(cls, config: PreferenceConfig) -> list[str]:
        """What of loss and reference does not go together; see `Objective.faults`."""
        texts = super().faults(config)
        start = config.checkpointer.get("adapter_checkpoint")
        whole = config.model.get("modules_to_save")
        if config.reference_kind == "adapter_off":
            if adapters.name_of(config.model) is None:
                texts.append(
                    "reference: adapter_off needs an adapter, and every weight is trained; set "
                    "reference=model"
                )
            elif whole:
                texts.append(
                    f"reference: adapter_off leaves {', '.join(whole)} as trained "
                    "(model.modules_to_save); set reference=model"
                )
            elif start is not None:
                texts.append(
                    "reference: adapter_off is the base model without the adapter of "
                    "checkpointer.adapter_checkpoint; set reference=model"
                )
        return texts

    def prepare(self, models: Models, data: Data) -> None:
        """Say what the data are."""
        for name, batches in (("dataset", data.training), ("dataset_val", data.validation)):
            if isinstance(batches, Batches):
                for line in self.described(batches):
                    self.world.say(f"{name}: {line}")

    def described(self, batches: Batches) -> list[str]:
        """What the user should know of the data, a line each."""
        return []

    def identity(self, models: Models, data: Data) -> dict[str, Any]:
        """The weights of the reference count, however it is computed."""
        found = super().identity(models, data)
        if self.config.reference_kind == "adapter_off":
            # A second model was hashed when it was built.
            source = self.config.checkpointer
            found["reference_weights"] = self.world.from_main(
                lambda: SafetensorsSource.open(source).fingerprint()
            )
        return found

    def first_step_fault(self, figures: Mapping[str, float | None]) -> str | None:
        """Before the first update the policy is the reference, so that every reward is 0."""
        if not self._begins_at_reference:
            return None
        names = ("rewards/chosen", "rewards/rejected")
        rewards = [abs(figures.get(name) or 0.0) / self.config.beta for name in names]
        log_probs = max(abs(figures.get(f"logps/{n}") or 0.0) for n in ("chosen", "rejected"))
        if max(rewards) <= ROUNDING[self.config.dtype] * max(log_probs, 1.0):
            return None
        shown = ", ".join(f"{name} {figures.get(name)}" for name in names)
        return (
            f"reference: before the first update it must equal the policy, and it does not "
            f"({shown}); set reference=model, and report this if it stays"
        )

    def before_step(
        self, models: Models, micro_batches: list[MicroBatch], step: int
    ) -> list[MicroBatch]:
        """As Objective.before_step."""
        self._step = step
        return micro_batches

    def at_reference(self, models: Models) -> bool:
        """Whether this is a pass before the first update, when the policy is its reference."""
        before = models.policy.module.training and self._step == 0
        return before and self._begins_at_reference

    @property
    def _begins_at_reference(self) -> bool:
        # Virtual tokens begin as a text before each document, which the reference does not see.
        return bool(self.config.reference_kind) and not adapters.virtual_tokens(self.config.model)

    def reference_sums(self, models: Models, batch: MicroBatch) -> torch.Tensor | None:
        """The reference's `answer_sums` of a batch on the device; None for a loss without one.

        Call it before the policy's own pass: see Models.as_reference.
        """
        if not self.config.reference_kind:
            return None
        with models.as_reference() as module:
            return answer_sums(module, batch)

    def mean_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """The mean of values [n] over all ranks that see different data, a scalar; 0 for none."""
        # A tensor of Python's numbers would be copied to the GPU, and the host wait for that.
        both = torch.stack([values.sum(), values.new_full((), len(values))])
        if self.world.size > 1:
            both *= self.world.data_weight
            dist.all_reduce(both)
        total, count = both.unbind()
        return total / count.clamp_min(1)


def answer_sums(module: Decoder, batch: MicroBatch) -> torch.Tensor:
    """The log-probability of each document's trained tokens, fp32 [samples, documents]."""
    return document_sums(token_log_probs(module, batch), batch)
