"""What one rank runs in one forward and backward pass: a model's inputs, labels, and counts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from trainer.model import Inputs

# The label of a position that is not trained, as in torch.nn.functional.cross_entropy.
IGNORE_INDEX = -100


class TopK(NamedTuple):
    """The stored part of a teacher's distribution of each token.

    ids: int32 [tokens, k], its likeliest tokens, the first one first. log_probs: fp32 [tokens, k],
    theirs. tail: fp32 [tokens], the log of the mass of all other tokens; -inf for none.
    """

    ids: torch.Tensor
    log_probs: torch.Tensor
    tail: torch.Tensor


@dataclass
class MicroBatch:
    """The rows of one forward and backward pass of one rank.

    inputs: what the model gets. Its rows are padded to the longest sample, and on to a length that
    the tensor-parallel ranks divide and fp8 takes; packed rows all have the same length.
    labels: int64 [batch, sequence], already shifted: labels[b, s] is the target of position s, or
    `IGNORE_INDEX`.
    trained: int64 [target_count], the indices of the trained positions in the flattened labels.
    They are counted before the batch reaches the GPU, because counting there waits for it.
    token_count: real input tokens. target_count: trained labels. lengths: real tokens of each
    document that counts; the documents of a sample are neighbours.
    document_index: int64 [target_count], which of these documents a trained position belongs to.
    documents_per_sample: how many of them are a sample. samples: int64 [samples], their indices in
    the dataset. numbers: fp32 [samples], which the method reads with each sample; see
    trainer.data.form. reference: fp32 [samples, documents per sample], the log-probability of each
    document by the model before training; None if none were kept. teacher: of the trained
    positions, what is kept of a teacher's distributions; None if nothing is read.
    ends: int64 [documents], where the last token of each document that counts is in the flattened
    batch; None in batches that no dataset made.
    """

    inputs: Inputs
    labels: torch.Tensor
    trained: torch.Tensor
    token_count: int
    target_count: int
    lengths: tuple[int, ...]
    document_index: torch.Tensor
    samples: torch.Tensor
    numbers: torch.Tensor
    documents_per_sample: int = 1
    reference: torch.Tensor | None = None
    teacher: TopK | None = None
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
