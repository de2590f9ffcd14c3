"""What a class of transformers makes of its last hidden states: a multiplier and a soft cap."""

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast


class Scaling(NamedTuple):
    """What a class does to its logits: see `Decoder.output_multiplier` and `output_softcap`."""

    multiplier: float | None
    softcap: float | None


def _multiplier(config: Any) -> float | None:
    """The config's value, under the names that the classes have for it."""
    divisor, factor = getattr(config, "logits_scaling", None), getattr(config, "logit_scale", None)
    value = factor if divisor is None else 1 / divisor
    return None if value is None or math.isclose(value, 1) else value


def scaling(whole: PreTrainedModel, base: str, head: str) -> Scaling | str:
    """Return what a class does to its logits, or why `unembed` cannot compute them.

    Not every class of text and images does what the config of its text model says: the class
    decides, as it generates and is evaluated.

    Args:
        base, head: the names of the text model and of the output layer in `whole`.
    """
    if getattr(whole.get_submodule(head), "bias", None) is not None:
        return "its output layer has a bias, which is not supported yet"
    config = whole.config.get_text_config()
    multipliers = dict.fromkeys((_multiplier(config), None))
    softcaps = dict.fromkeys((getattr(config, "final_logit_softcapping", None), None))
    hidden = torch.linspace(-40, 40, 24, device="cpu", dtype=torch.float32).view(1, 6, 4)
    tokens = torch.zeros(1, 6, dtype=torch.int64, device="cpu")
    # The module that calls the output layer, and its part that has the text model.
    owner, _, last = head.rpartition(".")
    causal, start = whole.get_submodule(owner), f"{owner}." if owner else ""
    parts = dict(causal._modules)
    inner = base.removeprefix(start).partition(".")[0]
    causal._modules |= {inner: _Given(hidden), last: nn.Identity()}
    try:
        with torch.device("cpu"), torch.no_grad():
            logits = causal(input_ids=tokens).logits.float()
    finally:
        causal._modules.update(parts)
    for multiplier, softcap in itertools.product(multipliers, softcaps):
        expected = hidden if multiplier is None else hidden * multiplier
        if softcap is not None:
            expected = torch.tanh(expected / softcap) * softcap
        if torch.allclose(logits, expected, rtol=1e-5, atol=1e-5):
            return Scaling(multiplier, softcap)
    return "its class changes the logits in a way that is not known here"


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
