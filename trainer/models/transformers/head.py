"""What a class of transformers makes of its last hidden states: a multiplier and a soft cap."""

import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast


def multiplier(config: Any) -> float | None:
    """What a class multiplies its logits with, under the names that the classes have for it."""
    divisor, factor = getattr(config, "logits_scaling", None), getattr(config, "logit_scale", None)
    value = factor if divisor is None else 1 / divisor
    return None if value is None or math.isclose(value, 1) else value


def faults(
    causal: PreTrainedModel, prefix: str, multiplier: float | None, softcap: float | None
) -> list[str]:
    """Return in what a class's logits differ from those that `unembed` computes; [] for equal.

    Args:
        prefix: the name of the base model in `causal`.
    """
    if getattr(causal.lm_head, "bias", None) is not None:
        return ["its output layer has a bias, which is not supported yet"]
    hidden = torch.linspace(-40, 40, 24, device="cpu", dtype=torch.float32).view(1, 6, 4)
    tokens = torch.zeros(1, 6, dtype=torch.int64, device="cpu")
    parts = dict(causal._modules)
    causal._modules |= {prefix: _Given(hidden), "lm_head": nn.Identity()}
    try:
        with torch.device("cpu"), torch.no_grad():
            logits = causal(input_ids=tokens).logits.float()
    finally:
        causal._modules.update(parts)
    expected = hidden if multiplier is None else hidden * multiplier
    if softcap is not None:
        expected = torch.tanh(expected / softcap) * softcap
    if not torch.allclose(logits, expected, rtol=1e-5, atol=1e-5):
        return ["its class changes the logits in a way that is not known here"]
    return []


class _Given(nn.Module):
    """Stands for a base model, and returns these hidden states."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        return _Output(last_hidden_state=self._hidden)


class _Output(BaseModelOutputWithPast):
    """None for whatever else a class may look for, such as a router's logits."""

    def __getattr__(self, name: str) -> None:
        return None
