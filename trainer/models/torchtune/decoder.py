"""torchtune's decoder as a `Decoder`: its attributes, its attention, its adapters, its names."""

from typing import Any

import torch
from torch import nn
from torchtune.models.gemma.gemma_norm_embedding import GemmaNormEmbeddings
from torchtune.models.gemma.rms_norm import GemmaRMSNorm
from torchtune.modules import MultiHeadAttention, TiedLinear, TransformerDecoder
from torchtune.modules.peft import DoRALinear, LoRALinear

from runspec.keys.train import ModelSpec
from trainer.errors import ConfigError
from trainer.layers.adapters.lora_linear import LowRankLinear
from trainer.layers.attention import DocumentAttention, Mask
from trainer.layers.patch import patch_forward
from trainer.model import Decoder, Inputs, Role
from trainer.models.torchtune import fit, hub

# The linear layers of a block: what tensor parallelism splits by outputs, and by inputs.
COLUMNS = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.w1", "mlp.w3")
ROWS = ("attn.output_proj", "mlp.w2")

# torchtune gives these classes no public name.
GEMMA2_ATTENTION, GEMMA2_FINAL_NORM = "Gemma2Attention", "Gemma2FinalNorm"


def adopt(module: nn.Module) -> Decoder:
    """Make a `Decoder` from what one of torchtune's builders returned, in place; return it.

    Raises:
        ConfigError: it is no text decoder.
    """
    if not isinstance(module, TransformerDecoder):
        raise ConfigError(f"model: builds a {type(module).__name__}, not a text decoder")
    module.__class__ = TorchtuneDecoder
    for name, layer in list(module.named_modules()):
        if isinstance(layer, MultiHeadAttention):
            _use_document_attention(layer, dropout=layer.attn_dropout)
        elif type(layer).__name__ == GEMMA2_ATTENTION:
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
        elif isinstance(layer, LoRALinear | DoRALinear):
            module.set_submodule(name, _own_adapter(layer))
    # torchtune's Gemma 2 caps the last hidden state; Gemma 2 caps the logits made of it.
    if type(module.norm).__name__ == GEMMA2_FINAL_NORM:
        module.output_softcap = module.norm.capping_value
        module.norm = module.norm.rms_norm
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
        query, key = (layer.pos_embeddings(x, input_pos=input_pos) for x in (query, key))
    if layer.q_norm is not None:
        query, key = layer.q_norm(query), layer.k_norm(key)
    return layer.output_proj(layer.core(query, key, value, mask).flatten(2))


def _own_adapter(layer: nn.Module) -> LowRankLinear:
    rank, use_dora = layer.lora_a.out_features, isinstance(layer, DoRALinear)
    alpha = layer.scaling * rank if use_dora else layer.alpha
    return LowRankLinear(layer, rank, alpha, getattr(layer.dropout, "p", 0.0), use_dora)


class TorchtuneDecoder(Decoder, TransformerDecoder):
    """torchtune's TransformerDecoder, after `adopt`."""

    # Ours, for its argument `output`.
    forward = Decoder.forward

    def hidden(self, inputs: Inputs) -> torch.Tensor:
        """See `Decoder.hidden`."""
        hidden = self.tok_embeddings(inputs.tokens)
        for layer in self.layers:
            hidden = layer(hidden, mask=inputs.documents, input_pos=inputs.positions)
        return hidden

    blocks = property(lambda self: self.layers)
    embedding = property(lambda self: self.tok_embeddings)
    final_norm = property(lambda self: self.norm)

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
        in_a_block = dict.fromkeys(COLUMNS, Role.COLUMN) | dict.fromkeys(ROWS, Role.ROW)
        in_a_block |= dict.fromkeys(("sa_norm", "mlp_norm"), Role.NORM)
        # Gemma 2's norms behind the attention and the MLP.
        if isinstance(self.layers[0].sa_scale, GemmaRMSNorm):
            in_a_block |= dict.fromkeys(("sa_scale", "mlp_scale"), Role.REPLICATED)
        roles = {f"layers.*.{name}": role for name, role in in_a_block.items()}
        roles |= {"tok_embeddings": Role.EMBEDDING, "norm": Role.NORM}
        return roles if self.output_head is None else roles | {"output": Role.OUTPUT}

    def sizes(self) -> dict[str, int]:
        """What tensor parallelism divides."""
        layer = self.layers[0]
        return {
            "num_heads": layer.attn.num_heads,
            "num_kv_heads": layer.attn.num_kv_heads,
            "intermediate_dim": layer.mlp.w1.weight.shape[0],
        }

    def fit(self, hf_config: dict[str, Any], spec: ModelSpec) -> list[str]:
        """Make the model compute what config.json says; see models/torchtune/fit.py."""
        self._family = hub.of(hf_config)
        return fit.fit(self, hf_config, spec)

    def fill_buffers(self, device: torch.device) -> None:
        """Compute each distinct rotary table once; layers with the same settings share it."""
        tables: dict[Any, nn.Module] = {}
        for rope in [m for m in self.modules() if hasattr(m, "rope_init")]:
            numbers = {k: v for k, v in vars(rope).items() if isinstance(v, int | float)}
            key = (type(rope), *sorted(numbers.items() - {("training", rope.training)}))
            first = tables.setdefault(key, rope)
            if first is rope:
                # Scaled tables are made of real numbers only.
                with torch.device("cpu") if device.type == "meta" else device:
                    rope.rope_init()
                rope.to(device)
                continue
            for name, buffer in first.named_buffers(recurse=False):
                rope.register_buffer(name, buffer, persistent=False)
            vars(rope).update({k: v for k, v in vars(first).items() if k == "is_cache_built"})

    def hub_name(self, parameter: str) -> str | None:
        """The hub's tensor that holds a parameter; None if none does."""
        module, _, kind = parameter.rpartition(".")
        prefix = ""
        if module.startswith("layers."):
            _, block, module = module.split(".", 2)
            prefix = f"model.layers.{block}."
        name = self._family.names.get(module)
        return name and f"{prefix}{name}.{'weight' if kind == 'scale' else kind}"

    def from_hub(self, parameter: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows of a parameter in the order of interleaved RoPE, if torchtune has that."""
        return self._reordered(parameter, rows, (2, -1))

    def to_hub(self, parameter: str, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `from_hub`."""
        return self._reordered(parameter, rows, (-1, 2))

    def is_reordered(self, parameter: str) -> bool:
        """Whether the rows of a parameter are those of interleaved RoPE."""
        return self._heads(parameter) is not None

    def _heads(self, parameter: str) -> int | None:
        """How many heads' rows interleaved RoPE has in another order; None if there are none."""
        sizes = self.sizes()
        heads = {"q_proj": sizes["num_heads"], "k_proj": sizes["num_kv_heads"]}
        return heads.get(parameter.split(".")[-2]) if self._family.interleaved else None

    def _reordered(
        self, parameter: str, rows: torch.Tensor, pairs: tuple[int, int]
    ) -> torch.Tensor:
        count = self._heads(parameter)
        if count is None:
            return rows
        return rows.unflatten(0, (count, *pairs)).transpose(1, 2).reshape(rows.shape)
