"""Virtual tokens, which prompts and prefixes put before each document."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from trainer.config import instantiate
from trainer.model import AdapterKind, Decoder

PEFT_NAME = "prompt_embeddings"
# What they begin as if a recipe says nothing: any plain instruction is better than noise.
DEFAULT_TEXT = "Read what follows, and answer it correctly, in the form that is expected."


class Places(NamedTuple):
    """Where tokens lie once each document has its virtual tokens before it."""

    # int64 [tokens]
    real: torch.Tensor
    # int64 [documents, virtual tokens]
    virtual: torch.Tensor
    # int32 [documents + 1], where each document begins with its virtual tokens, and the end.
    bounds: torch.Tensor
    # int64 [tokens], which document each belongs to.
    document: torch.Tensor

    @classmethod
    def of(cls, bounds: torch.Tensor, tokens: int, count: int) -> "Places":
        """The places for documents that begin at `bounds`, int32 [documents + 1].

        Sizes follow from shapes alone, so that nothing waits for the device.

        Args:
            tokens: of all documents. count: virtual tokens of each document.
        """
        place = torch.arange(tokens, device=bounds.device)
        document = torch.bucketize(place, bounds[1:], right=True)
        before = torch.arange(bounds.shape[0], dtype=bounds.dtype, device=bounds.device) * count
        longer = bounds + before
        own = torch.arange(count, device=bounds.device)
        virtual = longer[:-1, None].long() + own
        return cls(place + (document + 1) * count, virtual, longer, document)

    def joined(self, virtual: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Rows of virtual tokens, [virtual tokens, ...], before those of each document."""
        rows = self.virtual.numel() + real.shape[0]
        # The backward pass of copies by index reads by index: it adds nothing up in any order.
        whole = real.new_zeros(rows, *real.shape[1:]).index_copy(0, self.real, real)
        each = virtual.expand(self.virtual.shape[0], *virtual.shape).flatten(0, 1)
        return whole.index_copy(0, self.virtual.flatten(), each)


class VirtualTokens(AdapterKind):
    """A kind that puts tokens of its own before each document; they begin as a text."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self._text: list[int] = []

    def fit(self, model: Decoder, tokenizer: Mapping[str, Any]) -> list[str]:
        """Read the text that they begin as, repeated or cut to their number.

        As PEFT's: with the token that begins a text, if the model has one.
        """
        count, text = self.virtual_tokens, self.settings.get("prompt_init_text") or DEFAULT_TEXT
        ids = instantiate("tokenizer", dict(tokenizer)).encode(text, add_bos=True, add_eos=False)
        self._text = (ids * -(-count // len(ids)))[:count]
        if count < model.max_seq_len:
            return []
        return [
            f"model.num_virtual_tokens: {count} leave no room in the model's "
            f"{model.max_seq_len} positions; set a smaller number"
        ]


def fields(count: int, width: int, layers: int, heads: int) -> dict[str, Any]:
    """adapter_config.json's fields of all prompt learning (peft.PromptLearningConfig)."""
    return {
        "num_virtual_tokens": count,
        "token_dim": width,
        "num_layers": layers,
        "num_attention_heads": heads,
        "num_transformer_submodules": 1,
        "modules_to_save": None,
    }
