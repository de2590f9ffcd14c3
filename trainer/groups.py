"""Parameters that an optimizer treats alike: those with weight decay, and those without."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from trainer.checkpoint.weights import named_parameters
from trainer.config import instantiate
from trainer.errors import ConfigError
from trainer.model import Decoder

# Of the optimizer's block; it is read here and goes to no component.
KEY = "no_weight_decay"
KINDS = ("norm", "bias", "embedding")


class Trained(NamedTuple):
    """A parameter that is trained."""

    parameter: torch.nn.Parameter
    name: str = ""
    # bias; embedding (the output head, too); norm, for other vectors; or matrix.
    kind: str = ""


def trained_of(module: Decoder) -> list[Trained]:
    """What is trained of a model."""
    tables = [module.embedding, module.output_head]
    ends = {id(p) for table in tables if table is not None for p in table.parameters()}

    def kind(name: str, parameter: torch.nn.Parameter) -> str:
        if name.endswith("bias"):
            return "bias"
        if id(parameter) in ends:
            return "embedding"
        return "norm" if parameter.ndim < 2 else "matrix"

    own = [(n, p) for n, p in named_parameters(module) if p.requires_grad]
    return [Trained(parameter, name, kind(name, parameter)) for name, parameter in own]


def make(block: dict[str, Any], trained: Sequence[Trained]) -> Optimizer:
    """The optimizer of an `optimizer` block, with its groups.

    Raises:
        ConfigError: it does not exist or does not take its arguments, or `no_weight_decay` names
            no parameter.
    """
    own = {key: value for key, value in block.items() if key != KEY}
    patterns = block.get(KEY) or []
    free = [any(_matches(each, pattern) for pattern in patterns) for each in trained]
    for pattern in (each for each in patterns if each not in KINDS):
        if trained[0].name and not any(_matches(each, pattern) for each in trained):
            raise ConfigError(
                f"optimizer.{KEY}: nothing that is trained is called {pattern!r}; give "
                f"{', '.join(KINDS)}, or a pattern of names such as {trained[0].name}"
            )
    decayed = [each.parameter for each, no in zip(trained, free, strict=True) if not no]
    others = [each.parameter for each, no in zip(trained, free, strict=True) if no]
    groups: list[Any] = decayed
    if others:
        rest = {"params": others, "weight_decay": 0.0}
        groups = [{"params": decayed}, rest] if decayed else [rest]
    return instantiate("optimizer", own, groups)


def _matches(each: Trained, pattern: str) -> bool:
    return each.kind == pattern if pattern in KINDS else fnmatchcase(each.name, pattern)
