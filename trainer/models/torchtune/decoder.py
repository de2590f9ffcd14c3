"""torchtune's decoder as a `Decoder`: its attributes, its attention, its adapters, its names."""

import json
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from trainer.config import TrainConfig, arguments_of
from trainer.errors import ConfigError
from trainer.layers.attention import DocumentAttention, Mask
from trainer.layers.lora import AdaptedLinear
from trainer.layers.patch import patch_forward
from trainer.models.decoder import Decoder, Role
from trainer.models.torchtune import fit, hub
from trainer.models.torchtune.compat import (
    DoRALinear,
    Gemma2Attention,
    Gemma2FinalNorm,
    GemmaNormEmbeddings,
    GemmaRMSNorm,
    LoRALinear,
    MultiHeadAttention,
    TiedLinear,
    TransformerDecoder,
)


def adopt(module: nn.Module) -> Decoder:
    """Make a `Decoder` from what one of torchtune's builders returned, in place; return it.

    Raises:
        ConfigError: it is no text decoder.
    """
    if not isinstance(module, TransformerDecoder):
        raise ConfigError(f"model: builds a {type(module).__name__}, not a text decoder")
    module.__class__ = TorchtuneDecoder
    for layer in module.modules():
        if isinstance(layer, MultiHeadAttention):
            _use_document_attention(layer, dropout=layer.attn_dropout)
        elif isinstance(layer, Gemma2Attention):
            _use_document_attention(
                layer,
                scale=layer.scaling,
                window=layer.sliding_window_size,
                softcap=layer.softcapping,
            )
        elif isinstance(layer, GemmaRMSNorm):
            layer.unit_offset = True
        elif isinstance(layer, GemmaNormEmbeddings):
            layer.output_scale = layer.embedding_dim**0.5
    # torchtune's Gemma 2 caps the last hidden state; Gemma 2 caps the logits made of it.
    if isinstance(module.norm, Gemma2FinalNorm):
        module.output_softcap = module.norm.capping_value
        module.norm = module.norm.rms_norm
    _use_own_adapters(module)
    return module


def _use_document_attention(layer: nn.Module, **settings: Any) -> None:
    layer.core = DocumentAttention(layer.head_dim, **settings)
    patch_forward(layer, _attention)


def _attention(
    layer: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    mask: Mask = None,
    input_pos: torch.Tensor | None = None,
) -> torch.Tensor:
    """As torchtune's attention without a cache: [batch, sequence, dim] to the same.

    Under tensor parallelism q, k and v are this rank's heads.
    """
    query, key, value = (
        projection(inputs).view(*inputs.shape[:2], -1, layer.head_dim)
        for projection, inputs in ((layer.q_proj, x), (layer.k_proj, y), (layer.v_proj, y))
    )
    if layer.pos_embeddings is not None:
        query = layer.pos_embeddings(query, input_pos=input_pos)
        key = layer.pos_embeddings(key, input_pos=input_pos)
    if layer.q_norm is not None:
        query, key = layer.q_norm(query), layer.k_norm(key)
    return layer.output_proj(layer.core(query, key, value, mask).flatten(2))


def _use_own_adapters(module: TransformerDecoder) -> None:
    for name, layer in list(module.named_modules()):
        if isinstance(layer, LoRALinear | DoRALinear):
            rank = layer.lora_a.out_features
            use_dora = isinstance(layer, DoRALinear)
            alpha = layer.scaling * rank if use_dora else layer.alpha
            dropout = getattr(layer.dropout, "p", 0.0)
            module.set_submodule(name, AdaptedLinear(layer, rank, alpha, dropout, use_dora))


class TorchtuneDecoder(Decoder, TransformerDecoder):
    """torchtune's TransformerDecoder, after `adopt`."""

    forward = TransformerDecoder.forward

    blocks = property(attrgetter("layers"))
    embedding = property(attrgetter("tok_embeddings"))
    final_norm = property(attrgetter("norm"))

    @property
    def output_head(self) -> nn.Module | None:
        """The output layer; None if it is tied to the embedding."""
        return None if isinstance(self.output, TiedLinear) else self.output

    @property
    def ignored_tensors(self) -> tuple[str, ...]:
        """Rotary tables of old folders, and the copy of a tied output."""
        tied = ("lm_head.weight",) if self.output_head is None else ()
        return ("*rotary_emb.inv_freq", *tied)

    def roles(self) -> dict[str, Role]:
        """The role of each module by its name."""
        roles = {
            "tok_embeddings": Role.EMBEDDING,
            "layers.*.sa_norm": Role.NORM,
            "layers.*.attn.q_proj": Role.COLUMN,
            "layers.*.attn.k_proj": Role.COLUMN,
            "layers.*.attn.v_proj": Role.COLUMN,
            "layers.*.attn.output_proj": Role.ROW,
            "layers.*.mlp_norm": Role.NORM,
            "layers.*.mlp.w1": Role.COLUMN,
            "layers.*.mlp.w3": Role.COLUMN,
            "layers.*.mlp.w2": Role.ROW,
            "norm": Role.NORM,
        }
        # Gemma 2's norms behind the attention and the MLP.
        if isinstance(self.layers[0].sa_scale, GemmaRMSNorm):
            roles |= dict.fromkeys(("layers.*.sa_scale", "layers.*.mlp_scale"), Role.REPLICATED)
        return roles if self.output_head is None else roles | {"output": Role.OUTPUT}

    def sizes(self) -> dict[str, int]:
        """What tensor parallelism divides."""
        layer = self.layers[0]
        return {
            "num_heads": layer.attn.num_heads,
            "num_kv_heads": layer.attn.num_kv_heads,
            "intermediate_dim": layer.mlp.w1.weight.shape[0],
        }

    def fit(self, hf_config: dict[str, Any], config: TrainConfig) -> list[str]:
        """Make the model compute what config.json says; see models/torchtune/fit.py."""
        self._family = hub.of(hf_config)
        arguments = arguments_of("model", config.model)
        return fit.fit(self, hf_config, config.checkpointer, arguments)

    def fill_buffers(self, device: torch.device) -> None:
        """Compute each distinct rotary table once; layers with the same settings share it."""
        tables: dict[str, nn.Module] = {}
        for rope in [m for m in self.modules() if hasattr(m, "rope_init")]:
            numbers = {k: v for k, v in vars(rope).items() if isinstance(v, int | float)}
            numbers.pop("training", None)
            key = type(rope).__name__ + json.dumps(numbers, sort_keys=True)
            if key not in tables:
                with device:
                    rope.rope_init()
                tables[key] = rope
            elif rope is not tables[key]:
                for name, buffer in tables[key].named_buffers(recurse=False):
                    rope.register_buffer(name, buffer, persistent=False)
                vars(rope).update({k: v for k, v in vars(tables[key]).items() if k == "is_cache_built"})

    def hub_name(self, parameter: str) -> str | None:
        """The hub's tensor that holds a parameter; None if none does."""
        return self._family.hub_name(parameter)

    def from_hub(self, parameter: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows of a parameter in the order of interleaved RoPE, if torchtune has that."""
        heads = self._interleaved_heads(parameter)
        if heads is None:
            return rows
        return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(rows.shape)

    def to_hub(self, parameter: str, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `from_hub`."""
        heads = self._interleaved_heads(parameter)
        if heads is None:
            return rows
        return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)

    def _interleaved_heads(self, parameter: str) -> int | None:
        sizes = self.sizes()
        heads = {"q_proj": sizes["num_heads"], "k_proj": sizes["num_kv_heads"]}
        return heads.get(parameter.split(".")[-2]) if self._family.interleaved else None
