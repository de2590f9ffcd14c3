"""The score head of a reward model."""

import torch
import torch.nn.functional as F
from torch import nn


class ScoreHead(nn.Linear):
    """[..., dim] to [..., 1] in fp32, whatever the weight's dtype is: bf16 has 3 digits."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The scores of hidden states."""
        return F.linear(x.float(), self.weight.float())
