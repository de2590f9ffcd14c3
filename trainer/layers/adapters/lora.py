"""LoRA and DoRA: on linear layers and on experts, and between a model's layers and PEFT's files."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from runspec import adapters
from trainer.errors import ConfigError
from trainer.layers import experts
from trainer.layers.adapters import lora_experts, peft_config
from trainer.layers.adapters.lora_linear import (
    LowRankLinear,
    adapted_layers,
    row_norms,
    share,
)
from trainer.layers.adapters.peft_config import PeftConfig
from trainer.model import PEFT_PREFIX, AdapterKind, Decoder, Hub, pattern, plain_name
from trainer.sharded import full_tensor

# By module of transformers' class: its adapter's rank.
Ranks = dict[str, int]


class LoRA(AdapterKind):
    """LoRA on linear layers and on experts."""

    declared: ClassVar[adapters.Adapter] = adapters.LORA

    @property
    def use_dora(self) -> bool:
        """Whether layers have magnitudes."""
        return "magnitude" in self.declared.parts

    def add(self, model: Decoder) -> None:
        """To the linear layers of the blocks, or to those that `lora_modules` names.

        It may also name the output head.
        """
        rank = self.settings.get("lora_rank")
        if rank is None:
            raise ConfigError("model.adapter: LoRA and DoRA need model.lora_rank")
        layers = {name: name.rpartition(".")[2] for name in model.linear_layers()}
        routed = [layer for _, layer in experts.layers(model)]
        known = {*layers.values(), *([experts.NAME] if routed else [])}
        heads = (n for n in model.tables if model.get_submodule(n) is model.output_head)
        head = {name.rpartition(".")[2]: name for name in heads}
        wanted = set(self.settings.get("lora_modules") or known)
        if unknown := wanted - known - head.keys():
            raise ConfigError(
                f"model.lora_modules: no layer {', '.join(sorted(unknown))}; has "
                f"{', '.join(sorted(known | head.keys()))}"
            )
        alpha, use_rslora = self.settings.get("lora_alpha", 2 * rank), self._use_rslora
        dropout = self.settings.get("lora_dropout", 0.0)
        if experts.NAME in wanted:
            self._check_experts(dropout, known - {experts.NAME})
            for layer in routed:
                lora_experts.add(layer, rank, alpha, use_rslora)
        chosen = [name for name, last in layers.items() if last in wanted]
        chosen += [name for last, name in head.items() if last in wanted]
        for name in chosen:
            self.wrap(model, name, rank, alpha, dropout)
        # With dropout each layer has its own input.
        for names in () if dropout else model.shared_inputs:
            share([model.get_submodule(name) for name in names if name in chosen])

    @property
    def _use_rslora(self) -> bool:
        return bool(self.settings.get("use_rslora"))

    def wrap(
        self, model: Decoder, name: str, rank: int, alpha: float, dropout: float = 0.0
    ) -> None:
        """Give a linear layer LoRA of this rank and alpha."""
        base, dora = model.get_submodule(name), self.use_dora
        layer = LowRankLinear(base, rank, alpha, dropout, dora, self._use_rslora)
        model.set_submodule(name, layer)

    def _check_experts(self, dropout: float, others: set[str]) -> None:
        """PEFT has neither for weights of several experts."""
        given = {"adapter: dora": self.use_dora, "lora_dropout:": dropout}
        if wrong := [key for key, value in given.items() if value]:
            raise ConfigError(
                *(
                    f"model.{key} is not possible for the experts; leave it out, or leave the "
                    f"experts out: model.lora_modules=[{','.join(sorted(others))}]"
                    for key in wrong
                )
            )

    def first_value(
        self, model: Decoder, name: str, shape: torch.Size, generator: torch.Generator
    ) -> torch.Tensor:
        """A by Kaiming uniform, B by zeros (Hu et al. 2021, arXiv 2106.09685); magnitudes by the
        norms of the base weight's rows.
        """
        owner, _, last = name.rpartition(".")
        if last == "magnitude":
            return row_norms(model.get_submodule(owner))
        full = torch.zeros(shape, dtype=torch.float32)
        if owner.endswith(".lora_a"):
            bound = 1 / math.sqrt(shape[-1])
            full.uniform_(-bound, bound, generator=generator)
        return full

    @torch.no_grad()
    def to_peft(
        self, model: Decoder, hub: Hub, dtype: torch.dtype
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """PEFT's tensors by name, and LoraConfig's fields; all ranks call this together.

        If one tensor of the hub holds the rows of several layers, their adapters become one: the
        A's one below the other, and the B's as the blocks of a block-diagonal B. Rows without an
        adapter have zeros in it, and in DoRA the norm that they have as their magnitude.
        """
        layers = {plain_name(name): m for name, m in model.named_modules()}
        tensors, ranks = dict[str, torch.Tensor](), Ranks()
        for key, parts in hub.items():
            own = {name: layers.get(name.removesuffix(".weight")) for name, _ in parts}
            adapted = [layer for layer in own.values() if isinstance(layer, LowRankLinear)]
            if key is None or not adapted:
                continue
            module = key.removesuffix(".weight")
            place = PEFT_PREFIX + module
            factors = {layer: [part.cpu() for part in layer.whole()] for layer in adapted}
            a = torch.cat([factors[layer][0] for layer in adapted])
            b = torch.zeros(sum(p.shape[0] for _, p in parts), len(a), dtype=a.dtype)
            row = column = 0
            for name, parameter in parts:
                layer = own[name]
                if isinstance(layer, LowRankLinear):
                    block = factors[layer][1]
                    end = row + block.shape[0], column + block.shape[1]
                    b[row : end[0], column : end[1]] = block
                    column = end[1]
                row += parameter.shape[0]
            tensors[f"{place}.lora_A.weight"] = a.to(dtype)
            tensors[f"{place}.lora_B.weight"] = b.to(dtype)
            if adapted[0].magnitude is not None:
                magnitudes = [_magnitude(layer, dtype) for name, layer in own.items()]
                tensors[f"{place}.lora_magnitude_vector"] = torch.cat(magnitudes)
            ranks[module] = len(a)
        of_experts, expert_ranks = _expert_tensors(model, dtype)
        return tensors | of_experts, _fields(self, model, ranks, expert_ranks)

    def from_peft(
        self,
        model: Decoder,
        hub: Hub,
        tensors: dict[str, torch.Tensor],
        settings: Mapping[str, Any] | None,
        faults: list[str],
    ) -> dict[str, torch.Tensor]:
        """See `AdapterKind.from_peft`."""
        if settings is not None:
            faults += _differences(self, model, hub, PeftConfig(settings))
        if any(name.startswith(PEFT_PREFIX) for name in tensors):
            return _from_peft(model, hub, tensors, (settings or {}).get("peft_version"), faults)
        return tensors


class DoRA(LoRA):
    """LoRA with a trained magnitude for each row."""

    declared: ClassVar[adapters.Adapter] = adapters.DORA


def is_unreadable(model: Decoder) -> bool:
    """Whether PEFT would take some of a model's adapted layers for experts."""
    adapted = {id(layer) for layer in adapted_layers(model)}
    has_experts = any(id(layer) in adapted for _, layer in experts.layers(model))
    return (has_experts and model.family in lora_experts.CONFUSED) and any(
        id(layer) in adapted and name.endswith(lora_experts.TAKEN_FOR_EXPERTS)
        for name, layer in model.named_modules()
    )


def _expert_tensors(model: Decoder, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], Ranks]:
    """The same of the experts' adapters; a module is one of their matrices."""
    tensors, ranks = {}, Ranks()
    for name, layer in experts.layers(model):
        if not layer.adapters:
            continue
        module = plain_name(name)
        for matrix, place in lora_experts.peft_places(f"{PEFT_PREFIX}{module}").items():
            a, b = (part.cpu() for part in layer.adapters[matrix].whole())
            a, b = lora_experts.to_peft(a, b)
            tensors[f"{place}.lora_A.weight"] = a.to(dtype)
            tensors[f"{place}.lora_B.weight"] = b.to(dtype)
            ranks[f"{module}.{matrix}"] = layer.rank
    return tensors, ranks


def _magnitude(layer: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """DoRA's magnitude of a layer's rows, [out]; for a layer without DoRA the norms of its rows."""
    if isinstance(layer, LowRankLinear):
        return full_tensor(layer.magnitude).cpu()
    return row_norms(layer, dtype).to(dtype).cpu()


def _fields(kind: LoRA, model: Decoder, ranks: Ranks, expert_ranks: Ranks) -> dict[str, Any]:
    layer: Any = adapted_layers(model)[0]
    # Other parts of a model of several may have layers with the same last names.
    whole = bool(model.carried_tensors)
    targets = ranks if whole else sorted({name.rpartition(".")[2] for name in ranks})
    settings = {
        **peft_config.fields(ranks | expert_ranks, layer.rank, layer.scaling, layer.use_rslora),
        "use_dora": kind.use_dora,
        "lora_dropout": getattr(getattr(layer, "dropout", None), "p", 0.0),
        "target_modules": list(targets) or None,
        "bias": "none",
        "fan_in_fan_out": False,
    }
    if expert_ranks:
        settings["peft_version"] = lora_experts.PEFT_VERSION
        kinds = (".".join(name.split(".")[-3:]) for name in expert_ranks)
        settings["target_parameters"] = list(dict.fromkeys(kinds))
    return settings


def _differences(kind: LoRA, model: Decoder, hub: Hub, settings: PeftConfig) -> Iterator[str]:
    """What of an adapter's settings the model does otherwise or cannot do."""
    for field in settings.unsupported():
        yield f"the adapter has {field}, which is not supported; {peft_config.REMEDY}"
    own = set(adapted_layers(model))
    layers = {plain_name(n): layer for n, layer in model.named_modules() if layer in own}
    layer: Any = next(iter(layers.values()))
    alpha = layer.scaling / peft_config.scaling(layer.rank, 1, layer.use_rslora)
    faults = [
        f"the adapter has {theirs}={old}, the model {ours}={new}; set {ours}={old}"
        for theirs, ours, old, new in (
            ("r", "model.lora_rank", settings.rank, layer.rank),
            ("lora_alpha", "model.lora_alpha", settings.alpha, alpha),
            ("use_rslora", "model.use_rslora", bool(settings.use_rslora), layer.use_rslora),
        )
        if not math.isclose(old, new)
    ]
    if bool(settings.use_dora) != kind.use_dora:
        theirs, own_kind = ("dora", "lora") if settings.use_dora else ("lora", "dora")
        faults.append(
            f"the adapter is {theirs}, the model's {own_kind}; set model.adapter={theirs}"
        )
    yield from faults
    places = [
        key.removesuffix(".weight")
        for key, parts in hub.items()
        if key is not None and any(name.removesuffix(".weight") in layers for name, _ in parts)
    ]
    routed = [name for name, _ in experts.layers(model) if name in layers]
    places += [f"{name}.{matrix}" for name in routed for matrix in experts.MATRICES]
    other = [p for p in places if not math.isclose(settings.scaling_of(p), layer.scaling)]
    for place in dict.fromkeys(map(pattern, () if faults else other)):
        yield (
            f"rank_pattern and alpha_pattern scale {place} otherwise than other layers, which is "
            f"not supported; {peft_config.REMEDY}"
        )


def _from_peft(
    model: Decoder,
    hub: Hub,
    tensors: dict[str, torch.Tensor],
    version: Any,
    faults: list[str],
) -> dict[str, torch.Tensor]:
    """PEFT's tensors by the model's own names; adds what cannot be split to `faults`.

    If one matrix of the hub holds the rows of several layers, an adapter of our own export has all
    their A's, and the B's are the blocks on its diagonal; any other has one A, which each layer
    then gets.
    """
    own_tensors, used = dict[str, torch.Tensor](), set[str]()
    shapes = {plain_name(n): p.shape for n, p in model.named_parameters() if model.is_adapter(n)}
    for key, parts in hub.items():
        if key is None:
            continue
        place = PEFT_PREFIX + key.removesuffix(".weight")
        a, b = tensors.get(f"{place}.lora_A.weight"), tensors.get(f"{place}.lora_B.weight")
        if a is None or b is None:
            continue
        used |= {f"{place}.lora_A.weight", f"{place}.lora_B.weight"}
        magnitude = tensors.get(f"{place}.lora_magnitude_vector")
        layers = {name.removesuffix(".weight"): p.shape[0] for name, p in parts}
        adapted = [n for n in layers if f"{n}.lora_a.weight" in shapes]
        shared = len(adapted) < 2 or len(a) == shapes[f"{adapted[0]}.lora_a.weight"][0]
        row = column = 0
        for name, rows in layers.items():
            block = b[row : row + rows]
            if name in adapted:
                rank = len(a) if shared else shapes[f"{name}.lora_a.weight"][0]
                own = slice(None) if shared else slice(column, column + rank)
                column += rank
                own_tensors[f"{name}.lora_a.weight"] = a[own]
                own_tensors[f"{name}.lora_b.weight"] = block[:, own]
                if int(block.count_nonzero()) != int(block[:, own].count_nonzero()):
                    faults.append(f"{key} mixes the adapters of {', '.join(adapted)}")
                if magnitude is not None:
                    part = magnitude[row : row + rows]
                    own_tensors[f"{name}.magnitude"] = part
            elif int(block.count_nonzero()):
                faults.append(f"contains an adapter for {pattern(name)}, the model has none")
            row += rows
        if magnitude is not None:
            used.add(f"{place}.lora_magnitude_vector")
    for name, layer in experts.layers(model):
        place = PEFT_PREFIX + name
        for matrix, base in lora_experts.peft_places(place).items():
            keys = (f"{base}.lora_A.weight", f"{base}.lora_B.weight")
            if layer.adapters and all(key in tensors for key in keys):
                used |= set(keys)
                a, b = (tensors[key] for key in keys)
                own = layer.adapters[matrix]
                a, b = lora_experts.from_peft(a, b, own, layer.transposed, version)
                own_tensors[f"{name}.adapters.{matrix}.lora_a.weight"] = a
                own_tensors[f"{name}.adapters.{matrix}.lora_b.weight"] = b
    return own_tensors | {name: tensor for name, tensor in tensors.items() if name not in used}
