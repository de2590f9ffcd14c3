"""Linear layers with LoRA adapters over a frozen base, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.parts.measure import Case, Ready, Setting, Tensors, Variant, leaf
from benchmarks.parts.measure import compiled as compile_for
from trainer import lora
from trainer.compat import LoRALinear

ALPHA_A_RANK = 2.0


def cases(setting: Setting) -> Iterator[Case]:
    """One layer of each shape of a block, and the three that share their input."""
    size = setting.size
    kv = size.kv_heads * size.head_dim
    yield _case(setting, "output_proj", size.dim, [size.dim])
    yield _case(setting, "mlp up", size.dim, [size.hidden])
    yield _case(setting, "mlp down", size.hidden, [size.dim])
    yield _case(setting, "q, k and v of one input", size.dim, [size.dim, kv, kv])


def _case(setting: Setting, name: str, inputs: int, outputs: list[int]) -> Case:
    size, rank = setting.size, setting.size.rank
    x = setting.random(size.batch, size.sequence, inputs, seed=0)
    weights = [
        (
            setting.random(out, inputs, scale=inputs**-0.5, seed=10 + index),
            setting.random(rank, inputs, scale=inputs**-0.5, seed=20 + index),
            setting.random(out, rank, scale=rank**-0.5, seed=30 + index),
        )
        for index, out in enumerate(outputs)
    ]
    upstream = setting.random(size.batch, size.sequence, sum(outputs), seed=1)

    def variant(label: str, make: Callable, compiled: bool = False) -> Variant:
        return Variant(label, lambda: _ready(setting, x, weights, make, compiled))

    variants = [
        variant("trainer", _trainer),
        variant("trainer, compiled", _trainer, compiled=True),
        variant("torchtune LoRALinear", _torchtune),
        variant("PEFT", _peft),
        variant("scale in the small product", _small_scale),
        variant("own backward pass", _own_backward),
        variant("own backward pass, compiled", _own_backward, compiled=True),
    ]
    if len(outputs) > 1:
        variants.append(variant("one product for all A", _shared_a))
        variants.append(variant("one product for all A, compiled", _shared_a, compiled=True))
    width = sum(outputs)
    # Forward and the input's gradient pass the base; the adapter has a weight gradient besides.
    base = 2 * 2 * inputs * width
    adapter = 3 * 2 * rank * sum(inputs + out for out in outputs)
    return Case(
        name=name,
        what=(
            f"{size.tokens} tokens, {inputs} -> {' + '.join(map(str, outputs))}, rank {rank}, "
            "base frozen, no dropout"
        ),
        variants=variants,
        reference=lambda: _reference(setting, x, weights, upstream),
        tolerance=setting.tolerance,
        upstream=upstream,
        rate=("TFLOP/s", size.tokens * (base + adapter) / 1e12),
    )


Weights = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _ready(
    setting: Setting, x: torch.Tensor, weights: Weights, make: Callable, compiled: bool
) -> Ready:
    """`make` gives (function of x, the A's, the B's) for the weights."""
    function, all_a, all_b = make(weights)
    if compiled:
        function = compile_for(setting, function)
    leaves = {"x": leaf(x)}
    for index, (a, b) in enumerate(zip(all_a, all_b, strict=True)):
        leaves |= {f"a{index}": a, f"b{index}": b}
    return Ready(lambda: function(leaves["x"]), leaves)


def _layers(weights: Weights) -> nn.ModuleList:
    """torchtune's layers with these weights, the base frozen."""
    layers = nn.ModuleList()
    for weight, a, b in weights:
        rank = a.shape[0]
        layer = LoRALinear(weight.shape[1], weight.shape[0], rank, ALPHA_A_RANK * rank)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.lora_a.weight = nn.Parameter(a.clone())
        layer.lora_b.weight = nn.Parameter(b.clone())
        layers.append(layer)
    return layers


def _joined(layers: nn.ModuleList) -> tuple[Callable, list, list]:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in layers], -1) if len(layers) > 1 else layers[0](x)

    return (
        function,
        [layer.lora_a.weight for layer in layers],
        [layer.lora_b.weight for layer in layers],
    )


def _trainer(weights: Weights) -> tuple[Callable, list, list]:
    layers = _layers(weights)
    lora.prepare(layers, quantised=False)
    return _joined(layers)


def _torchtune(weights: Weights) -> tuple[Callable, list, list]:
    return _joined(_layers(weights))


def _peft(weights: Weights) -> tuple[Callable, list, list]:
    from peft import LoraConfig, inject_adapter_in_model

    all_a, all_b, layers = [], [], nn.ModuleDict()
    for index, (weight, _, _) in enumerate(weights):
        layers[f"layer{index}"] = nn.Linear(1, 1, bias=False, device="meta")
        layers[f"layer{index}"].weight = nn.Parameter(weight, requires_grad=False)
        layers[f"layer{index}"].in_features = weight.shape[1]
        layers[f"layer{index}"].out_features = weight.shape[0]
    rank = weights[0][1].shape[0]
    config = LoraConfig(
        r=rank, lora_alpha=ALPHA_A_RANK * rank, lora_dropout=0.0, target_modules=list(layers)
    )
    inject_adapter_in_model(config, layers)
    for layer, (_, a, b) in zip(layers.values(), weights, strict=True):
        layer.lora_A["default"].weight = nn.Parameter(a.clone())
        layer.lora_B["default"].weight = nn.Parameter(b.clone())
        all_a.append(layer.lora_A["default"].weight)
        all_b.append(layer.lora_B["default"].weight)

    def function(x: torch.Tensor) -> torch.Tensor:
        outputs = [layer(x) for layer in layers.values()]
        return torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]

    return function, all_a, all_b


def _parts(weights: Weights) -> tuple[list, list]:
    return [leaf(a.clone()) for _, a, _ in weights], [leaf(b.clone()) for _, _, b in weights]


def _small_scale(weights: Weights) -> tuple[Callable, list, list]:
    """The factor meets [tokens, rank] instead of [tokens, out], and the sum is the product's."""
    all_a, all_b = _parts(weights)

    def one(x: torch.Tensor, index: int) -> torch.Tensor:
        rows = x.flatten(0, -2)
        inner = ALPHA_A_RANK * F.linear(rows, all_a[index])
        base = F.linear(rows, weights[index][0])
        return torch.addmm(base, inner, all_b[index].t()).view(*x.shape[:-1], -1)

    def function(x: torch.Tensor) -> torch.Tensor:
        outputs = [one(x, index) for index in range(len(weights))]
        return torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]

    return function, all_a, all_b


class _Lora(torch.autograd.Function):
    """Keeps x and the small inner product only; every sum is a product's own."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        rows = x.flatten(0, -2)
        inner = (rows @ a.t()).mul_(ALPHA_A_RANK)
        ctx.save_for_backward(rows, inner, weight, a, b)
        return (rows @ weight.t()).addmm_(inner, b.t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, inner, weight, a, b = ctx.saved_tensors
        slope = gradient.flatten(0, -2)
        through = (slope @ b).mul_(ALPHA_A_RANK)
        by_x = (slope @ weight).addmm_(through, a)
        by_x = by_x.view(*gradient.shape[:-1], -1)
        return by_x, None, through.t() @ rows, slope.t() @ inner


def _own_backward(weights: Weights) -> tuple[Callable, list, list]:
    all_a, all_b = _parts(weights)

    def function(x: torch.Tensor) -> torch.Tensor:
        outputs = [
            _Lora.apply(x, weight, a, b)
            for (weight, _, _), a, b in zip(weights, all_a, all_b, strict=True)
        ]
        return torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]

    return function, all_a, all_b


def _shared_a(weights: Weights) -> tuple[Callable, list, list]:
    """The A's of layers with one input as one matrix."""
    all_a, all_b = _parts(weights)
    ranks = [a.shape[0] for a in all_a]

    def function(x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        inner = (ALPHA_A_RANK * F.linear(rows, torch.cat(all_a))).split(ranks, -1)
        outputs = [
            torch.addmm(F.linear(rows, weight), part, b.t())
            for (weight, _, _), part, b in zip(weights, inner, all_b, strict=True)
        ]
        return torch.cat(outputs, -1).view(*x.shape[:-1], -1)

    return function, all_a, all_b


def _reference(
    setting: Setting, x: torch.Tensor, weights: Weights, upstream: torch.Tensor
) -> Tensors:
    """The formula, with the gradients multiplied out."""
    rows, up = (t.to(setting.exact).flatten(0, 1) for t in (x, upstream))
    results: Tensors = {"x": torch.zeros_like(rows)}
    outputs, begin = [], 0
    for index, parts in enumerate(weights):
        weight, a, b = (part.to(setting.exact) for part in parts)
        slope = up[:, begin : begin + len(weight)]
        begin += len(weight)
        outputs.append(rows @ weight.t() + ALPHA_A_RANK * (rows @ a.t()) @ b.t())
        results["x"] += slope @ weight + ALPHA_A_RANK * (slope @ b) @ a
        results[f"a{index}"] = ALPHA_A_RANK * (slope @ b).t() @ rows
        results[f"b{index}"] = ALPHA_A_RANK * slope.t() @ (rows @ a.t())
    results["x"] = results["x"].view(x.shape)
    return results | {"output": torch.cat(outputs, -1).view(upstream.shape)}
