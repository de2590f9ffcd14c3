"""The shape of a recipe's model, from its description: a shipped one, a kept one, or a new one;
and what can be trained of a model by it.
"""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from launcher import paths, venv
from launcher.errors import RecipeFault
from runspec.description import SHIPPED, Subject
from runspec.files import read_json
from runspec.keys.model import TRANSFORMERS
from runspec.layout import NF4_BLOCK, StepFacts
from runspec.shape import Shape

# What the trainer said in this process, by the name of the description's file.
_told: dict[str, Shape] = {}


def shape_of(model: Mapping[str, Any], folder: Path | None) -> Shape:
    """Return the shape of the model that a `model` block and a model folder name.

    The trainer is asked once for what is not in configs/descriptions, and its answer is kept in the
    user's cache. RecipeFault if the trainer refuses the model, or cannot be asked.
    """
    try:
        subject = Subject(model, folder)
    except (OSError, ValueError) as error:
        raise RecipeFault(f"{folder}/config.json: {error}") from error
    if subject.component == TRANSFORMERS and subject.file is None:
        raise RecipeFault(
            f"checkpointer.checkpoint_dir: {folder} has no config.json, which says what the model "
            "is: download the model with: cookbook download"
        )
    if shape := _told.get(subject.file_name):
        return shape
    site, kept = venv.site_packages(), paths.user_cache() / "models"

    def fits(name: str, version: str) -> bool:
        return site is None or (site / f"{name}-{version}.dist-info").is_dir()

    for place in (SHIPPED, kept):
        if shape := subject.find(place, fits):
            return shape
    content = _ask(subject)
    if subject.package:
        # Of any other package nobody knows whether it changes.
        subject.keep(kept, content, venv.packages())
    return _told.setdefault(subject.file_name, Shape.of(content))


def _ask(subject: Subject) -> dict[str, Any]:
    config = {"model": subject.model, "checkpointer": {"checkpoint_dir": str(subject.folder)}}
    try:
        done = venv.ask_trainer("trainer.describe", [config])
    except OSError as error:
        raise RecipeFault(
            f"no description of {subject.title} is shipped or kept, and the trainer cannot be "
            f"asked for one ({error}): set up the environment with: bash setup.sh"
        ) from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["no message"]
        start = f"error: {subject.title}: "
        faults = [line.removeprefix(start) for line in said if line.startswith(start)]
        raise RecipeFault(faults or said[-1:])
    return dict(json.loads(done.stdout.splitlines()[-1]))


# What can be trained of a model -------------------------------------------------------------------


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
            "model.adapter: dora is not possible for the experts; leave it out, or leave the "
            f"experts out: model.lora_modules=[{','.join(sorted(others))}]"
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
