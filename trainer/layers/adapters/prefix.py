"""Prefix tuning: learnt keys and values before those of each document, in each layer.

Li and Liang 2021, arXiv 2101.00190. As in PEFT keys have no rotary embedding, and a document's
first token stands behind the prefix. In a packed row each document sees the prefix.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from runspec import adapters
from trainer.errors import ConfigError
from trainer.layers import attention, flex
from trainer.layers.adapters import virtual
from trainer.layers.adapters.base import disabled
from trainer.layers.attention import DocumentAttention, Mask
from trainer.layers.patch import patch_forward, replaced
from trainer.model import Decoder, Documents, Hub, Inputs, plain_name
from trainer.sharded import full_tensor, local, reshard

KEYS, VALUES = "prefix_keys", "prefix_values"
PEFT_NAME = virtual.PEFT_NAME


class Prefix(virtual.VirtualTokens):
    """Keys and values of virtual tokens, [tokens, key heads x head_dim] in each layer."""

    declared: ClassVar[adapters.Adapter] = adapters.PREFIX

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self._found: dict[str, torch.Tensor] = {}

    def add(self, model: Decoder) -> None:
        """To each attention layer."""
        layers = attention.layers(model)
        faults = []
        if model.shares_keys():
            faults.append("layers share keys and values with other layers")
        if len(layers) != len(model.blocks):
            faults.append("layers do not all have softmax attention")
        elif any(layer.value_dim != layer.head_dim for layer in layers):
            faults.append("attention is latent: its keys and values have different widths")
        elif len({layer.head_dim for layer in layers}) > 1:
            faults.append("layers have heads of different widths")
        if faults:
            raise ConfigError(
                *(
                    f"model.adapter: prefix is not possible with this model, whose {fault}; use "
                    "lora, ia3 or prompt"
                    for fault in faults
                )
            )
        heads, like = model.sizes()["num_kv_heads"], model.embedding.weight
        for layer in layers:
            shape = self.virtual_tokens, heads * layer.head_dim
            for name in (KEYS, VALUES):
                layer.register_parameter(name, nn.Parameter(like.new_empty(shape)))
            layer.prefix_length, layer.adapter_enabled = self.virtual_tokens, True
            patch_forward(layer, attend)
        model.adapter_enabled = True
        model.register_forward_pre_hook(self._shift, with_kwargs=True)

    def _shift(self, model: nn.Module, args: tuple[Inputs, ...], kwargs: dict[str, Any]) -> Any:
        """Let each document's tokens stand behind the prefix."""
        if not model.adapter_enabled:
            return None
        tokens, positions = args[0].tokens, args[0].positions
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return (args[0]._replace(positions=positions + self.virtual_tokens),), kwargs

    def first_value(
        self, model: Decoder, name: str, shape: torch.Size, generator: torch.Generator
    ) -> torch.Tensor:
        """What the base model makes of the text."""
        if not self._found:
            self._found = self._of_text(model)
        return self._found.pop(plain_name(name))

    @torch.no_grad()
    def _of_text(self, model: Decoder) -> dict[str, torch.Tensor]:
        """The base model's keys and values of the text, whole; all ranks call this together."""
        weight = model.embedding.weight
        # Parameters may be kept on the CPU and gathered on the GPU.
        sharded = isinstance(weight, DTensor)
        device = weight.device_mesh.device_type if sharded else weight.device
        count = self.virtual_tokens
        length = count + -count % self.row_multiple
        tokens = torch.zeros(1, length, dtype=torch.int64, device=device)
        tokens[0, :count] = torch.tensor(self._text, device=device)
        values: dict[str, torch.Tensor] = {}
        layers = {n: m for n, m in model.named_modules() if isinstance(m, DocumentAttention)}

        def keep(name: str) -> Callable[..., None]:
            def hook(layer: nn.Module, args: tuple[Any, ...]) -> None:
                for part, heads in zip((KEYS, VALUES), args[1:3], strict=True):
                    rows = heads[0, :count].flatten(1).contiguous()
                    parameter = getattr(layer, part)
                    if isinstance(parameter, DTensor) and "tp" in _names(parameter):
                        # Each tensor-parallel rank has its own heads.
                        mesh = parameter.device_mesh["tp"]
                        rows = DTensor.from_local(rows, mesh, [Shard(1)], run_check=False)
                    values[f"{plain_name(name)}.{part}"] = full_tensor(rows).cpu()

            return hook

        hooks = [m.register_forward_pre_hook(keep(n)) for n, m in layers.items()]
        training = model.training
        model.eval()
        try:
            with disabled(model), torch.compiler.set_stance("force_eager"):
                model(Inputs(tokens), output=lambda _, hidden: hidden)
        finally:
            reshard(model)
            model.train(training)
            for each in hooks:
                each.remove()
        return values

    @torch.no_grad()
    def to_peft(
        self, model: Decoder, hub: Hub, dtype: torch.dtype
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """PEFT's one tensor, [virtual tokens, layers x 2 x width], keys before values."""
        parts = [
            full_tensor(layer.get_parameter(each)).cpu()
            for _, layer in _layers(model)
            for each in (KEYS, VALUES)
        ]
        count, width = parts[0].shape
        heads = width // attention.layers(model)[0].head_dim
        settings = virtual.fields(count, width, len(parts) // 2, heads) | {
            "prefix_projection": False,
            "encoder_hidden_size": width,
        }
        whole = torch.stack(parts, 1).reshape(count, -1).to(dtype).contiguous()
        return {PEFT_NAME: whole}, settings

    def from_peft(
        self,
        model: Decoder,
        hub: Hub,
        tensors: dict[str, torch.Tensor],
        settings: Mapping[str, Any] | None,
        faults: list[str],
    ) -> dict[str, torch.Tensor]:
        """The inverse; adds what differs to `faults`."""
        self.check_type(settings, faults)
        if PEFT_NAME not in tensors or faults:
            return tensors
        layers = _layers(model)
        whole = tensors[PEFT_NAME]
        if whole.shape[1] % (2 * len(layers)):
            faults.append(f"has {whole.shape[1]} numbers of a token, for {len(layers)} layers")
            return {}
        parts = iter(whole.unflatten(1, (2 * len(layers), -1)).unbind(1))
        values = {}
        for name, _ in layers:
            values[f"{name}.{KEYS}"] = next(parts)
            values[f"{name}.{VALUES}"] = next(parts)
        return values


def _names(parameter: DTensor) -> tuple[str, ...]:
    return parameter.device_mesh.mesh_dim_names or ()


def _layers(model: Decoder) -> list[tuple[str, nn.Module]]:
    modules = model.named_modules()
    return [(plain_name(n), m) for n, m in modules if isinstance(m, DocumentAttention)]


def attend(
    layer: DocumentAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `DocumentAttention.forward`, with the prefix before each document's keys and values."""
    if not layer.adapter_enabled:
        return replaced(layer, attend)(layer, query, key, value, mask, sinks)
    prefixes = [
        local(part).to(key.dtype).view(layer.prefix_length, key.shape[2], -1)
        for part in (layer.prefix_keys, layer.prefix_values)
    ]
    if isinstance(mask, flex.BlockMasks) and layer.flex_attention is not None:
        keys, values = (flex.with_prefix(*e) for e in zip((key, value), prefixes, strict=True))
        heads, blocks = (query, keys, values), mask.by_window[layer.window]
        return flex.attend(layer.flex_attention, heads, blocks, layer.softcap, layer.scale, sinks)
    if isinstance(mask, torch.Tensor):
        seen = mask
    elif isinstance(mask, Documents):
        seen = mask.mask()
    else:
        square = (1, query.shape[1], query.shape[1])
        seen = torch.ones(square, dtype=torch.bool, device=query.device).tril()
    # The first token of a document stands right behind the prefix.
    position = seen.sum(2, keepdim=True) - 1
    distance = position - torch.arange(-layer.prefix_length, 0, device=query.device)
    before = distance >= 0 if layer.window is None else distance < layer.window
    own = attention.with_window(seen, layer.window, query.shape[1], query.device)
    keys, values = (
        torch.cat([prefix.expand(key.shape[0], -1, -1, -1), row], 1)
        for prefix, row in zip(prefixes, (key, value), strict=True)
    )
    return layer.dense(query, keys, values, torch.cat([before, own], 2), sinks)
