"""Linear layers with fp8 matrix products, forward and backward."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.parts.measure import Case, Runnable, Setting, Tensors, Unavailable, Variant, leaf
from benchmarks.parts.measure import compiled as compile_for
from trainer.layers import fp8

# e4m3 has 3 mantissa bits, e5m2 (gradients) has 2.
FP8_TOLERANCE = 0.12


def cases(setting: Setting) -> Iterator[Case]:
    """The MLP's up and down projection, trained; and the up projection frozen, as in LoRA."""
    size = setting.size
    yield _case(setting, "mlp up", size.dim, size.hidden, trained=True)
    yield _case(setting, "mlp down", size.hidden, size.dim, trained=True)
    yield _case(setting, "mlp up, frozen", size.dim, size.hidden, trained=False)


def _case(setting: Setting, name: str, inputs: int, outputs: int, trained: bool) -> Case:
    size = setting.size
    x = setting.random(size.batch, size.sequence, inputs, seed=0)
    weight = setting.random(outputs, inputs, scale=inputs**-0.5, seed=1)
    grad_output = setting.random(size.batch, size.sequence, outputs, seed=2)

    def variant(
        label: str, make: Callable, recipe: str | None = None, compiled: bool = False
    ) -> Variant:
        def prepare() -> Runnable:
            parameter = weight.clone().requires_grad_(trained)
            if recipe and (reason := fp8.missing(recipe, setting.device)):
                raise Unavailable(reason)
            function, parameter = make(parameter, recipe)
            function = compile_for(setting, function) if compiled else function
            leaves = {"x": leaf(x)} | ({"weight": parameter} if trained else {})
            bounds = dict.fromkeys(("output", *leaves), FP8_TOLERANCE) if recipe else {}
            return Runnable(lambda: function(leaves["x"]), leaves, tolerance=bounds)

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
        reference=lambda: _reference(setting, x, weight, grad_output, trained),
        tolerance=setting.tolerance,
        grad_output=grad_output,
        rate=("TFLOP/s", 2 * (3 if trained else 2) * size.tokens * weight.numel() / 1e12),
    )


def _plain(weight: torch.Tensor, recipe: None) -> tuple[Callable, torch.Tensor]:
    return lambda x: F.linear(x, weight), weight


def _trainer(weight: torch.Tensor, recipe: str) -> tuple[Callable, torch.Tensor]:
    # The scale of a frozen weight is computed once.
    static = recipe == "tensorwise" and not weight.requires_grad
    largest = weight.abs().max().float() if static else None
    return lambda x: fp8.linear(x, weight, recipe, largest), weight


def _torchao(weight: torch.Tensor, recipe: str) -> tuple[Callable, torch.Tensor]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    module = nn.Sequential(nn.Linear(*weight.shape[::-1], bias=False, device="meta"))
    module[0].weight = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
    config = Float8LinearConfig.from_recipe_name(recipe)
    # Without a GPU torchao emulates: it rounds to fp8 and multiplies in higher precision.
    convert_to_float8_training(module, config=replace(config, emulate=not weight.is_cuda))
    return module[0], module[0].weight


def _reference(
    setting: Setting,
    x: torch.Tensor,
    weight: torch.Tensor,
    grad_output: torch.Tensor,
    trained: bool,
) -> Tensors:
    x, weight, grad_output = (t.to(setting.reference_dtype) for t in (x, weight, grad_output))
    results = {"output": x @ weight.t(), "x": grad_output @ weight}
    if trained:
        results["weight"] = grad_output.flatten(0, 1).t() @ x.flatten(0, 1)
    return results
