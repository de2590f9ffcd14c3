"""What the methods of preference tuning share: the reference, and what they say of their data.

The reference is the policy with its adapter off, or a frozen second model.
"""

from typing import Any

import torch
import torch.distributed as dist

from trainer.checkpoint.weights import SafetensorsSource
from trainer.data.batches import Batches, Data
from trainer.layers.batch import MicroBatch
from trainer.layers.log_probs import document_sums, token_log_probs
from trainer.methods.base import Models, Objective
from trainer.model import Decoder


class PreferenceObjective(Objective):
    """A method that compares the policy with the model before training."""

    normaliser = "samples"

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
