"""What one rank runs in one forward and backward pass: a model's inputs, labels, and counts."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.utils._pytree import tree_map_only

from trainer.model import Inputs

# The label of a position that is not trained, as in torch.nn.functional.cross_entropy.
IGNORE_INDEX = -100


@dataclass
class MicroBatch:
    """The rows of one forward and backward pass of one rank."""

    # What the model gets. Rows are padded to the longest sample, and on to a length that the
    # tensor-parallel ranks divide and fp8 takes; packed rows all have the same length.
    inputs: Inputs
    # int64 [batch, sequence], already shifted: labels[b, s] is the target of position s, or
    # `IGNORE_INDEX`.
    labels: torch.Tensor
    # int64 [target_count], the indices of the trained positions in the flattened labels. They are
    # counted before the batch reaches the GPU, because counting there waits for it.
    trained: torch.Tensor
    # Real input tokens.
    token_count: int
    # Trained labels.
    target_count: int
    # Real tokens of each document that counts; the documents of a sample are neighbours.
    lengths: tuple[int, ...]
    # int64 [target_count], which of these documents a trained position belongs to.
    document_index: torch.Tensor
    # int64 [samples], their indices in the dataset.
    samples: torch.Tensor
    # fp32 [samples], which the method reads with each sample; see trainer.data.form.
    numbers: torch.Tensor
    # How many of the documents that count are a sample.
    documents_per_sample: int = 1
    # int64 [documents], where the last token of each document that counts is in the flattened
    # batch; None in batches that no dataset made.
    ends: torch.Tensor | None = None

    @property
    def sample_count(self) -> int:
        """Samples that count."""
        return len(self.lengths) // self.documents_per_sample

    @property
    def targets(self) -> torch.Tensor:
        """The label of each trained position, int64 [target_count]."""
        return self.labels.flatten().index_select(0, self.trained)

    def pin_memory(self) -> "MicroBatch":
        """Return the batch in pinned memory; the DataLoader calls this."""
        return self._mapped(torch.Tensor.pin_memory)

    def to(self, device: torch.device) -> "MicroBatch":
        """Return the batch on `device`; from pinned memory the copy is asynchronous."""
        if self.labels.device == device:
            return self
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def _mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "MicroBatch":
        return replace(self, **tree_map_only(torch.Tensor, change, vars(self)))
