"""(IA)3: a learnt factor for each output, or each input, of a few linear layers.

Liu et al. 2022, arXiv 2205.05638. As in PEFT a layer scales its outputs, bias included, and the
last layer of an MLP its inputs: here every layer that tensor parallelism splits by rows. Factors
begin as 1, and merge into the weights exactly.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from runspec import adapters
from trainer.errors import ConfigError
from trainer.layers import linear, nf4
from trainer.layers.linear import AdaptedLinear, Own
from trainer.model import PEFT_PREFIX, AdapterKind, Decoder, Hub, Role, pattern, plain_name
from trainer.sharded import full_tensor

OUT, IN = "ia3_out", "ia3_in"


class ScaledLinear(AdaptedLinear):
    """A linear layer with `ia3_out`, [out], or `ia3_in`, [in].

    Args:
        by_input: it scales its inputs.
    """

    def __init__(self, base: nn.Module, by_input: bool) -> None:
        owner, self.part = ("row", IN) if by_input else ("column", OUT)
        super().__init__(base, {self.part: adapters.IA3.parts_of(owner)[self.part]})
        outputs, inputs = base.weight.shape
        scale = base.weight.new_empty(inputs if by_input else outputs)
        self.register_parameter(self.part, nn.Parameter(scale))

    @property
    def scale(self) -> torch.Tensor:
        """The factors."""
        return self.get_parameter(self.part)

    def adapted(
        self,
        x: torch.Tensor,
        own: Own,
        total: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """[..., in] to [..., out] by base and factors, without bias."""
        weight = own("weight", self.weight)
        if not self.adapter_enabled:
            return linear.base(self, x, weight)
        scale = own(self.part, self.scale)
        if self.part == IN:
            return linear.base(self, x * scale, weight)
        return linear.base(self, x, weight) * scale

    def added_bias(self, own: Own) -> torch.Tensor:
        """The bias, scaled as the outputs are."""
        bias = super().added_bias(own)
        scaled = self.adapter_enabled and self.part == OUT
        return bias * own(self.part, self.scale) if scaled else bias

    def merge(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of the weight or bias, scaled, in fp32."""
        rows, columns = nf4.dense_place(self.weight)
        scale = full_tensor(self.scale.detach()).float()
        scale = scale[columns if self.part == IN else rows]
        if name == "weight":
            return tensor.float() * (scale if self.part == IN else scale[:, None])
        return tensor.float() * scale if self.part == OUT else tensor


class IA3(AdapterKind):
    """(IA)3 on linear layers of the blocks."""

    declared: ClassVar[adapters.Adapter] = adapters.IA3

    def add(self, model: Decoder) -> None:
        """To the layers that `target_modules` names, or to those that PEFT chooses for a family."""
        rows = model.linear_layers(Role.ROW)
        split = [*rows, *model.linear_layers(Role.COLUMN, Role.FUSED)]
        names = {name: name.rpartition(".")[2] for name in split}
        known, given = set(names.values()), self.settings.get("target_modules")
        wanted = set(given or adapters.ia3_targets(model.family))
        # A layer of experts has no linear layer of this name.
        missing = wanted - known - (set() if given else {"down_proj"})
        if missing or not wanted & known:
            raise ConfigError(
                f"model.target_modules: no layer {', '.join(sorted(missing or wanted))} for (IA)3; "
                f"has {', '.join(sorted(known))}"
            )
        for name in [name for name, last in names.items() if last in wanted]:
            layer = ScaledLinear(model.get_submodule(name), name in rows)
            model.set_submodule(name, layer)

    def first_value(
        self, model: Decoder, name: str, shape: torch.Size, generator: torch.Generator
    ) -> torch.Tensor:
        """Ones: the base model."""
        return torch.ones(shape)

    @torch.no_grad()
    def to_peft(
        self, model: Decoder, hub: Hub, dtype: torch.dtype
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """PEFT's tensors by name, and IA3Config's fields; all ranks call this together.

        If one tensor of the hub holds the rows of several layers, rows without factors have ones.
        """
        tensors, layers = {}, _layers(model)
        feedforward = []
        for place, parts in _places(model, hub, layers).items():
            rows = [
                full_tensor(layers[name].scale).cpu() if name in layers else torch.ones(count)
                for name, count in parts
            ]
            factors = torch.cat([each.to(dtype) for each in rows])
            by_input = _by_input(parts, layers)
            if by_input:
                feedforward.append(place)
            tensors[f"{PEFT_PREFIX}{place}.ia3_l"] = factors[None] if by_input else factors[:, None]
        targets = [key.removeprefix(PEFT_PREFIX).removesuffix(".ia3_l") for key in tensors]
        settings = {"target_modules": targets, "feedforward_modules": feedforward}
        # Short names, unless other layers have them, too.
        plain = {key: sorted({n.rpartition(".")[2] for n in v}) for key, v in settings.items()}
        every = {key.removesuffix(".weight") for key in hub if key}
        short = tuple(f".{name}" for name in plain["target_modules"])
        alike = {name for name in every if name.endswith(short)} == set(targets)
        chosen = plain if alike and not model.carried_tensors else settings
        return tensors, {**chosen, "fan_in_fan_out": False, "modules_to_save": None}

    def from_peft(
        self,
        model: Decoder,
        hub: Hub,
        tensors: dict[str, torch.Tensor],
        settings: Mapping[str, Any] | None,
        faults: list[str],
    ) -> dict[str, torch.Tensor]:
        """PEFT's tensors, or the model's own, by the model's names; see `AdapterKind.from_peft`."""
        self.check_type(settings, faults)
        values, used, layers = {}, set(), _layers(model)
        for place, parts in _places(model, hub, layers).items():
            key = f"{PEFT_PREFIX}{place}.ia3_l"
            if key not in tensors:
                continue
            used.add(key)
            by_input = _by_input(parts, layers)
            if (tensors[key].shape[0] == 1) != by_input:
                faults.append(
                    f"scales the {'outputs' if by_input else 'inputs'} of {pattern(place)}, "
                    f"the model its {'inputs' if by_input else 'outputs'}"
                )
            elif by_input:
                values[f"{parts[0][0]}.{IN}"] = tensors[key][0]
            else:
                rows = tensors[key][:, 0].split([count for _, count in parts])
                for (name, _), own in zip(parts, rows, strict=True):
                    values[f"{name}.{OUT}"] = own
        return values | {n: t for n, t in tensors.items() if n not in used}


def _layers(model: Decoder) -> dict[str, ScaledLinear]:
    modules = model.named_modules()
    return {plain_name(name): m for name, m in modules if isinstance(m, ScaledLinear)}


def _by_input(parts: list[tuple[str, int]], layers: Mapping[str, ScaledLinear]) -> bool:
    """Whether the layer in these rows scales its inputs; it is then the only one."""
    return any(name in layers and layers[name].part == IN for name, _ in parts)


def _places(
    model: Decoder, hub: Hub, layers: Mapping[str, ScaledLinear]
) -> dict[str, list[tuple[str, int]]]:
    """By module of transformers' class, the layers in its rows and how many rows each has."""
    places = {}
    for key, parts in hub.items():
        own = [(name.removesuffix(".weight"), p.shape[0]) for name, p in parts]
        weights = all(name.endswith(".weight") for name, _ in parts)
        if key is not None and weights and any(name in layers for name, _ in own):
            places[key.removesuffix(".weight")] = own
    return places
