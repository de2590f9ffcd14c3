"""Linear layers whose products run in 8-bit floating point, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.parts.measure import Case, Ready, Setting, Tensors, Unavailable, Variant, leaf
from benchmarks.parts.measure import compiled as compile_for
from trainer import fp8

# e4m3 keeps 3 bits behind the point, e5m2 (gradients) 2.
FP8_TOLERANCE = 0.12


def cases(setting: Setting) -> Iterator[Case]:
    """Up and down of the MLP with trained weights, and up with a frozen one, as under LoRA."""
    size = setting.size
    yield _case(setting, "mlp up", size.dim, size.hidden, trained=True)
    yield _case(setting, "mlp down", size.hidden, size.dim, trained=True)
    yield _case(setting, "mlp up, frozen", size.dim, size.hidden, trained=False)


def _case(setting: Setting, name: str, inputs: int, outputs: int, trained: bool) -> Case:
    size = setting.size
    x = setting.random(size.batch, size.sequence, inputs, seed=0)
    weight = setting.random(outputs, inputs, scale=inputs**-0.5, seed=1)
    upstream = setting.random(size.batch, size.sequence, outputs, seed=2)

    def variant(
        label: str, make: Callable, recipe: str | None = None, compiled: bool = False
    ) -> Variant:
        def prepare() -> Ready:
            own = weight.clone().requires_grad_(trained)
            if recipe and (lack := fp8.missing(recipe, setting.device)):
                raise Unavailable(lack)
            function, own = make(own, recipe)
            function = compile_for(setting, function) if compiled else function
            leaves = {"x": leaf(x)} | ({"weight": own} if trained else {})
            bounds = dict.fromkeys(("output", *leaves), FP8_TOLERANCE) if recipe else {}
            return Ready(lambda: function(leaves["x"]), leaves, tolerance=bounds)

        return Variant(label, prepare)

    variants = [variant("not quantised", _plain)]
    for recipe in ("tensorwise", "rowwise"):
        variants += [
            variant(f"trainer, {recipe}", _trainer, recipe),
            variant(f"trainer, {recipe}, compiled", _trainer, recipe, compiled=True),
            variant(f"torchao, {recipe}, compiled", _torchao, recipe, compiled=True),
        ]
    return Case(
        name=name,
        what=(
            f"{size.tokens} tokens, {inputs} -> {outputs}, weight "
            f"{'trained' if trained else 'frozen'}"
        ),
        variants=variants,
        reference=lambda: _reference(setting, x, weight, upstream, trained),
        tolerance=setting.tolerance,
        upstream=upstream,
        rate=("TFLOP/s", 2 * (3 if trained else 2) * size.tokens * weight.numel() / 1e12),
    )


def _plain(weight: torch.Tensor, recipe: None) -> tuple[Callable, torch.Tensor]:
    return lambda x: F.linear(x, weight), weight


def _trainer(weight: torch.Tensor, recipe: str) -> tuple[Callable, torch.Tensor]:
    # One scale of a weight that never changes is found once.
    known = recipe == "tensorwise" and not weight.requires_grad
    largest = weight.abs().max().float() if known else None
    return lambda x: fp8.linear(x, weight, recipe, largest), weight


def _torchao(weight: torch.Tensor, recipe: str) -> tuple[Callable, torch.Tensor]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    holder = nn.Sequential(nn.Linear(*weight.shape[::-1], bias=False, device="meta"))
    holder[0].weight = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
    config = Float8LinearConfig.from_recipe_name(recipe)
    # Without a GPU it rounds to fp8 and multiplies in higher precision.
    convert_to_float8_training(holder, config=replace(config, emulate=not weight.is_cuda))
    return holder[0], holder[0].weight


def _reference(
    setting: Setting, x: torch.Tensor, weight: torch.Tensor, upstream: torch.Tensor, trained: bool
) -> Tensors:
    x, weight, upstream = (t.to(setting.exact) for t in (x, weight, upstream))
    results = {"output": x @ weight.t(), "x": upstream @ weight}
    if trained:
        results["weight"] = upstream.flatten(0, 1).t() @ x.flatten(0, 1)
    return results
