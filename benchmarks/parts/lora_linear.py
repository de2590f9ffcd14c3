"""LoRA linear layers over a frozen base weight, forward and backward."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.parts.measure import Case, Runnable, Setting, Tensors, Variant, leaf
from benchmarks.parts.measure import compiled as compile_for
from trainer.layers.adapters.lora_linear import LowRankLinear as OurLinear
from trainer.models.torchtune.compat import LoRALinear

ALPHA_PER_RANK = 2.0


def cases(setting: Setting) -> Iterator[Case]:
    """One layer of each shape in a block, and q, k and v, which have the same input."""
    size = setting.size
    kv = size.kv_heads * size.head_dim
    yield _case(setting, "output_proj", size.dim, [size.dim])
    yield _case(setting, "mlp up", size.dim, [size.hidden])
    yield _case(setting, "mlp down", size.hidden, [size.dim])
    yield _case(setting, "q, k and v, same input", size.dim, [size.dim, kv, kv])


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
    grad_output = setting.random(size.batch, size.sequence, sum(outputs), seed=1)

    def variant(label: str, make: Callable, compiled: bool = False) -> Variant:
        return Variant(label, lambda: _runnable(setting, x, weights, make, compiled))

    variants = [
        variant("trainer", _trainer),
        variant("trainer, compiled", _trainer, compiled=True),
        variant("torchtune LoRALinear", _torchtune),
        variant("PEFT", _peft),
        variant("scale applied at rank r", _scale_at_rank),
        variant("custom backward", _custom_backward),
        variant("custom backward, compiled", _custom_backward, compiled=True),
    ]
    if len(outputs) > 1:
        variants.append(variant("fused A matrices", _fused_a))
        variants.append(variant("fused A matrices, compiled", _fused_a, compiled=True))
    width = sum(outputs)
    # The base has a forward product and an input gradient; the adapter also a weight gradient.
    base = 2 * 2 * inputs * width
    adapter = 3 * 2 * rank * sum(inputs + out for out in outputs)
    return Case(
        name=name,
        what=(
            f"{size.tokens} tokens, {inputs} -> {' + '.join(map(str, outputs))}, rank {rank}, "
            "base frozen, no dropout"
        ),
        variants=variants,
        reference=lambda: _reference(setting, x, weights, grad_output),
        tolerance=setting.tolerance,
        grad_output=grad_output,
        rate=("TFLOP/s", size.tokens * (base + adapter) / 1e12),
    )


Weights = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _runnable(
    setting: Setting, x: torch.Tensor, weights: Weights, make: Callable, compiled: bool
) -> Runnable:
    """`make` returns (function of x, A matrices, B matrices) for the weights."""
    function, all_a, all_b = make(weights)
    if compiled:
        function = compile_for(setting, function)
    leaves = {"x": leaf(x)}
    for index, (a, b) in enumerate(zip(all_a, all_b, strict=True)):
        leaves |= {f"a{index}": a, f"b{index}": b}
    return Runnable(lambda: function(leaves["x"]), leaves)


def _layers(weights: Weights) -> nn.ModuleList:
    """torchtune's LoRALinear layers with these weights and a frozen base."""
    layers = nn.ModuleList()
    for weight, a, b in weights:
        rank = a.shape[0]
        layer = LoRALinear(weight.shape[1], weight.shape[0], rank, ALPHA_PER_RANK * rank)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.lora_a.weight = nn.Parameter(a.clone())
        layer.lora_b.weight = nn.Parameter(b.clone())
        layers.append(layer)
    return layers


def _concatenated(layers: nn.ModuleList) -> tuple[Callable, list, list]:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in layers], -1) if len(layers) > 1 else layers[0](x)

    return (
        function,
        [layer.lora_a.weight for layer in layers],
        [layer.lora_b.weight for layer in layers],
    )


def _trainer(weights: Weights) -> tuple[Callable, list, list]:
    layers = nn.ModuleList()
    for layer, (_, a, _) in zip(_layers(weights), weights, strict=True):
        rank = a.shape[0]
        layers.append(OurLinear(layer, rank, ALPHA_PER_RANK * rank))
        layers[-1].lora_a, layers[-1].lora_b = layer.lora_a, layer.lora_b
    return _concatenated(layers)


def _torchtune(weights: Weights) -> tuple[Callable, list, list]:
    return _concatenated(_layers(weights))


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
        r=rank, lora_alpha=ALPHA_PER_RANK * rank, lora_dropout=0.0, target_modules=list(layers)
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


def _adapters(weights: Weights) -> tuple[list, list]:
    return [leaf(a.clone()) for _, a, _ in weights], [leaf(b.clone()) for _, _, b in weights]


def _scale_at_rank(weights: Weights) -> tuple[Callable, list, list]:
    """Scales [tokens, rank] instead of [tokens, out], and adds to the base inside addmm."""
    all_a, all_b = _adapters(weights)

    def one(x: torch.Tensor, index: int) -> torch.Tensor:
        rows = x.flatten(0, -2)
        inner = ALPHA_PER_RANK * F.linear(rows, all_a[index])
        base = F.linear(rows, weights[index][0])
        return torch.addmm(base, inner, all_b[index].t()).view(*x.shape[:-1], -1)

    def function(x: torch.Tensor) -> torch.Tensor:
        outputs = [one(x, index) for index in range(len(weights))]
        return torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]

    return function, all_a, all_b


class _Lora(torch.autograd.Function):
    """Saves x and x A^T only; all sums are done inside addmm."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        rows = x.flatten(0, -2)
        inner = (rows @ a.t()).mul_(ALPHA_PER_RANK)
        ctx.save_for_backward(rows, inner, weight, a, b)
        return (rows @ weight.t()).addmm_(inner, b.t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, inner, weight, a, b = ctx.saved_tensors
        grad = gradient.flatten(0, -2)
        grad_inner = (grad @ b).mul_(ALPHA_PER_RANK)
        grad_x = (grad @ weight).addmm_(grad_inner, a)
        grad_x = grad_x.view(*gradient.shape[:-1], -1)
        return grad_x, None, grad_inner.t() @ rows, grad.t() @ inner


def _custom_backward(weights: Weights) -> tuple[Callable, list, list]:
    all_a, all_b = _adapters(weights)

    def function(x: torch.Tensor) -> torch.Tensor:
        outputs = [
            _Lora.apply(x, weight, a, b)
            for (weight, _, _), a, b in zip(weights, all_a, all_b, strict=True)
        ]
        return torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]

    return function, all_a, all_b


def _fused_a(weights: Weights) -> tuple[Callable, list, list]:
    """The A matrices of layers with the same input, concatenated into one."""
    all_a, all_b = _adapters(weights)
    ranks = [a.shape[0] for a in all_a]

    def function(x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        inner = (ALPHA_PER_RANK * F.linear(rows, torch.cat(all_a))).split(ranks, -1)
        outputs = [
            torch.addmm(F.linear(rows, weight), part, b.t())
            for (weight, _, _), part, b in zip(weights, inner, all_b, strict=True)
        ]
        return torch.cat(outputs, -1).view(*x.shape[:-1], -1)

    return function, all_a, all_b


def _reference(
    setting: Setting, x: torch.Tensor, weights: Weights, grad_output: torch.Tensor
) -> Tensors:
    """The LoRA formula (Hu et al. 2021, arXiv 2106.09685) with its gradients written out."""
    rows, grad_rows = (t.to(setting.reference_dtype).flatten(0, 1) for t in (x, grad_output))
    results: Tensors = {"x": torch.zeros_like(rows)}
    outputs, begin = [], 0
    for index, parts in enumerate(weights):
        weight, a, b = (part.to(setting.reference_dtype) for part in parts)
        grad = grad_rows[:, begin : begin + len(weight)]
        begin += len(weight)
        outputs.append(rows @ weight.t() + ALPHA_PER_RANK * (rows @ a.t()) @ b.t())
        results["x"] += grad @ weight + ALPHA_PER_RANK * (grad @ b) @ a
        results[f"a{index}"] = ALPHA_PER_RANK * (grad @ b).t() @ rows
        results[f"b{index}"] = ALPHA_PER_RANK * grad.t() @ (rows @ a.t())
    results["x"] = results["x"].view(x.shape)
    return results | {"output": torch.cat(outputs, -1).view(grad_output.shape)}
