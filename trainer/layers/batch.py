"""What one rank runs in one forward pass: tokens, labels, and the documents of packed rows."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_map_only

# The label of a position that is not trained, as in torch.nn.functional.cross_entropy.
IGNORE_INDEX = -100


class Documents(NamedTuple):
    """Which document each token of a packed batch belongs to; given to the model as its mask.

    ids: int32 [batch, sequence], the number of the document within its row; padding has a number
    of its own. cu_seqlens: int32 [documents + 1], where each document begins in the flattened
    batch, and the end of the last one.
    """

    ids: torch.Tensor
    cu_seqlens: torch.Tensor

    def mask(self) -> torch.Tensor:
        """Boolean [batch, sequence, sequence]: True if a query (row) may see a key (column)."""
        same = self.ids.unsqueeze(2) == self.ids.unsqueeze(1)
        return same.tril()


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

    tokens, labels: int64 [batch, sequence], padded to the longest sample, and on to a length that
    the tensor-parallel ranks divide and fp8 takes. Labels are already shifted: labels[b, s] is the
    target of position s, or `IGNORE_INDEX`.
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
    positions: int64 [batch, sequence], the position of each token in its document; documents:
    which document it belongs to. Both are None if rows are not packed; packed rows all have the
    same length.
    ends: int64 [documents], where the last token of each document that counts is in the flattened
    batch; None in batches that no dataset made.
    """

    tokens: torch.Tensor
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
    positions: torch.Tensor | None = None
    documents: Documents | None = None
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
        if self.tokens.device == device:
            return self
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def _mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "MicroBatch":
        return replace(self, **tree_map_only(torch.Tensor, change, vars(self)))
