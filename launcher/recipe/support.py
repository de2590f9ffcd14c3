"""What can be trained of a model, by its description, and why the rest cannot."""

from collections.abc import Iterator
from functools import partial

from runspec.description import SHIPPED
from runspec.files import read_json
from runspec.layout import NF4_BLOCK, StepFacts
from runspec.shape import Shape


def support(shape: Shape) -> dict[str, bool | str]:
    """Return by method, layout and way to save memory True, or the trainer's first reason against.

    Of layouts, two ranks are tried.
    """
    facts = partial(
        StepFacts,
        sizes=shape.split_sizes,
        unsplit=shape.unsplit,
        experts=shape.experts,
        linear=shape.linear,
    )
    faults_of = {
        "full": (),
        "lora": (),
        "dora": _dora_faults(shape),
        "qlora": _nf4_faults(shape),
        "packing": _packing_faults(shape),
        "tensor_parallel": facts(tensor_parallel=2, experts=None).faults(),
        "expert_parallel": facts(expert_parallel=2).faults(),
        "compile": (),
        "fp8": facts(fp8=True, experts=None).faults(),
    }
    return {name: next(iter(faults), True) for name, faults in faults_of.items()}


def _dora_faults(shape: Shape) -> Iterator[str]:
    if shape.experts:
        others = {n.rpartition(".")[2] for n, part in shape.names.items() if part != "experts"}
        yield (
            "model.use_dora: is not possible for the experts; leave it out, or leave the experts "
            f"out: model.lora_modules=[{','.join(sorted(others))}]"
        )


def _nf4_faults(shape: Shape) -> Iterator[str]:
    matrices = (m for block, _ in shape.blocks for m in block.matrices.values())
    for width in sorted({m.inputs for m in matrices if m.part != "router"}):
        if width % NF4_BLOCK:
            yield (
                f"model.quantize_base: needs inputs in blocks of {NF4_BLOCK}, and this model "
                f"has layers with {width} inputs; set model.quantize_base=False"
            )


def _packing_faults(shape: Shape) -> Iterator[str]:
    if not shape.packs:
        yield (
            "dataset.packed: in this model's layers of linear attention a packed document would "
            "see those before it; set dataset.packed=False"
        )


def families() -> dict[str, Shape]:
    """Return the shipped descriptions of hub models, the first of each model_type."""
    shapes: dict[str, Shape] = {}
    for file in sorted(SHIPPED.glob("*.json")):
        content = (read_json(file) or {}).get("shape", {})
        if kind := content.get("model_type"):
            shapes.setdefault(kind, Shape.of(content))
    return dict(sorted(shapes.items()))
