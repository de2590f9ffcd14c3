"""LoRA on the token embedding, as PEFT has it (peft.tuners.lora.layer.Embedding).

The row of a token gets s A B' added: A [vocabulary, rank] begins as zeros, B [dim, rank] from a
normal distribution. PEFT keeps A transposed.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trainer.layers.adapters.peft_config import scaling
from trainer.layers.patch import patch_forward, replaced
from trainer.parallel.sharded import full_tensor

A, B = "lora_embedding_a", "lora_embedding_b"


def add(embedding: nn.Module, rank: int, alpha: float, use_rslora: bool) -> None:
    """Add A and B to an embedding on the meta device, in place."""
    rows, dim = embedding.weight.shape
    for name, size in ((A, rows), (B, dim)):
        embedding.register_parameter(name, nn.Parameter(embedding.weight.new_empty(size, rank)))
    embedding.adapter_enabled = True
    embedding.rank, embedding.use_rslora = rank, use_rslora
    embedding.scaling = scaling(rank, alpha, use_rslora)
    patch_forward(embedding, _forward)


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is an embedding with LoRA."""
    return A in module._parameters


def _forward(embedding: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = replaced(embedding, _forward)(embedding, tokens)
    added = update(embedding, tokens, getattr(embedding, "padding_idx", None), lambda _, p: p)
    if added is None:
        return out
    scale = getattr(embedding, "output_scale", None)
    return out + (added if scale is None else added * torch.tensor(scale, dtype=added.dtype))


def update(
    embedding: nn.Module,
    index: torch.Tensor,
    padding: int | None,
    own: Callable[[str, torch.Tensor], torch.Tensor],
) -> torch.Tensor | None:
    """What LoRA adds to rows of an embedding, [..., dim]; None if it has none, or it is off.

    Args:
        index: int64 [...], rows of this rank's part.
        padding: the row that gets no gradient.
        own: how this rank's part of a parameter is taken.
    """
    if not (is_adapted(embedding) and embedding.adapter_enabled):
        return None
    a, b = own(A, getattr(embedding, A)), own(B, getattr(embedding, B))
    return F.linear(F.embedding(index, a, padding) * embedding.scaling, b)


def first_value(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """A: zeros; B: normal (peft.tuners.lora.layer.LoraLayer.reset_lora_parameters)."""
    is_a = name.endswith(A)
    return torch.zeros(shape) if is_a else torch.randn(shape, generator=generator)


@torch.no_grad()
def merged(embedding: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """The whole weight with the adapter in it; all ranks call this together."""
    a, b = (full_tensor(getattr(embedding, name)).float() for name in (A, B))
    whole = full_tensor(embedding.weight.detach()).float()
    return whole.addmm_(a, b.T, alpha=embedding.scaling).to(dtype)


@torch.no_grad()
def to_peft(embedding: nn.Module, place: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """PEFT's tensors by name; all ranks call this together."""
    a, b = (full_tensor(getattr(embedding, name)).to(dtype).cpu() for name in (A, B))
    return {f"{place}.lora_embedding_A": a.T.contiguous(), f"{place}.lora_embedding_B": b}


def from_peft(place: str, name: str, tensors: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """By PEFT's names of an embedding's tensors, those here and the tensors; {} without them."""
    pairs = {f"{place}.lora_embedding_A": A, f"{place}.lora_embedding_B": B}
    return {
        key: (f"{name}.{own}", tensors[key].T if own == A else tensors[key])
        for key, own in pairs.items()
        if key in tensors
    }
