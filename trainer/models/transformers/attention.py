"""transformers' attention layers through `DocumentAttention`, and what each of them asks for.

transformers looks an attention function up by its name at each call, and hands over whatever
keyword arguments the model was called with. So the documents of packed rows reach every layer
without a mask of [sequence, sequence] and without a change to any model's code.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from trainer.errors import ConfigError
from trainer.layers.attention import DocumentAttention, Mask
from trainer.sharded import local

# The name of the attention function; transformers makes no masks for a name that it has none for.
NAME = "slurm_cookbook_documents"
# Arguments that change nothing here: they tell other kernels what the documents tell ours.
WITHOUT_EFFECT = ("position_ids", "use_cache", "output_attentions", "return_dict", "cache_position")
# The layer's scores are causal, whatever is said of it here.
CAUSAL = (None, True)
# The argument with the scores of a layer's sinks.
SINKS = "s_aux"


class Observer:
    """Takes the place of the documents in one forward pass on the meta device.

    Each attention layer that calls the attention function gets a `document_attention` with what it
    asks for. `faults`: what ours cannot do, one line each.
    """

    def __init__(self) -> None:
        self.seen: list[nn.Module] = []
        self.faults: list[str] = []

    def observe(
        self,
        layer: nn.Module,
        query: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        given: dict[str, Any],
    ) -> torch.Tensor:
        """Give `layer` its `DocumentAttention`; return an output of the right shape.

        Args:
            query, value: [batch, heads, sequence, head_dim].
            given: the keyword arguments of the attention function.
        """
        asked = {name: value for name, value in given.items() if value is not None}
        scale, head_dim = asked.pop("scaling", None), query.shape[-1]
        if scale is not None and math.isclose(scale, head_dim**-0.5):
            scale = None  # the default of every kernel
        if asked.pop("is_causal", None) not in CAUSAL or getattr(layer, "is_causal", True) is False:
            self._refuse("bidirectional attention")
        if mask is not None:
            self._refuse("an attention mask of its own")
        layer.document_attention = DocumentAttention(
            head_dim,
            scale=scale,
            window=asked.pop("sliding_window", None),
            softcap=asked.pop("softcap", None),
            dropout=asked.pop("dropout", 0.0),
            value_dim=value.shape[-1],
            sinks=asked.pop(SINKS, None) is not None,
        )
        for name in sorted(asked.keys() - set(WITHOUT_EFFECT)):
            self._refuse(f"the argument {name!r}")
        self.seen.append(layer)
        return value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])

    def _refuse(self, what: str) -> None:
        text = f"its attention has {what}, which is not supported yet"
        if text not in self.faults:
            self.faults.append(text)


def attend(
    layer: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    documents: Mask | Observer = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """[batch, heads, sequence, head_dim] to [batch, sequence, heads, head_dim]; no scores."""
    if isinstance(documents, Observer):
        return documents.observe(layer, query, value, attention_mask, given), None
    if not hasattr(layer, "document_attention"):
        raise ConfigError("its layers do not hand the documents of packed rows to their attention")
    heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
    sinks = given.get(SINKS)
    return layer.document_attention(
        *heads, documents, None if sinks is None else local(sinks)
    ), None


AttentionInterface.register(NAME, attend)
