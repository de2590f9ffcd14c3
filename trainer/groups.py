"""Parameters that an optimizer treats alike: those without weight decay, and Muon's and AdamW's."""

import inspect
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from trainer.checkpoint.weights import named_parameters
from trainer.config import instantiate
from trainer.errors import ConfigError
from trainer.model import Decoder

# Keys of the optimizer's block that are read here and go to no component.
OWN_KEYS = ("no_weight_decay", "adamw")
MUON, ADAMW = "torch.optim.Muon", "torch.optim.AdamW"
KINDS = ("norm", "bias", "embedding")


class Trained(NamedTuple):
    """A parameter that is trained."""

    parameter: torch.nn.Parameter
    name: str = ""
    # bias; embedding (the output head, too); matrix, of a block; norm, for other vectors; or other.
    kind: str = ""


def trained_of(module: Decoder) -> list[Trained]:
    """What is trained of a model."""
    tables = [module.embedding, module.output_head]
    ends = {id(p) for table in tables if table is not None for p in table.parameters()}
    blocks = {id(p) for p in module.blocks.parameters()}

    def kind(name: str, parameter: torch.nn.Parameter) -> str:
        if name.endswith("bias"):
            return "bias"
        if id(parameter) in ends:
            return "embedding"
        if parameter.ndim < 2:
            return "norm"
        return "matrix" if parameter.ndim == 2 and id(parameter) in blocks else "other"

    own = [(n, p) for n, p in named_parameters(module) if p.requires_grad]
    return [Trained(parameter, name, kind(name, parameter)) for name, parameter in own]


def own_keys(block: dict[str, Any]) -> tuple[str, ...]:
    """The keys of an `optimizer` block that its component does not get.

    With Muon also those that it does not take and AdamW does, such as betas and fused.
    """
    if block["_component_"] != MUON:
        return OWN_KEYS
    theirs = inspect.signature(torch.optim.AdamW).parameters.keys()
    return (*OWN_KEYS, *(theirs - inspect.signature(torch.optim.Muon).parameters.keys()))


def make(block: dict[str, Any], trained: Sequence[Trained]) -> Optimizer:
    """The optimizer of an `optimizer` block, with its groups.

    torch.optim.Muon gets the blocks' matrices only; what else is trained goes to AdamW, with
    Muon's learning rate and weight decay and what the key `adamw` says.

    Raises:
        ConfigError: it does not exist or does not take its arguments, or `no_weight_decay` names
            no parameter.
    """
    own = {key: value for key, value in block.items() if key not in own_keys(block)}
    patterns = block.get("no_weight_decay") or []
    free = [any(_matches(each, pattern) for pattern in patterns) for each in trained]
    for pattern in (each for each in patterns if each not in KINDS):
        if trained[0].name and not any(_matches(each, pattern) for each in trained):
            raise ConfigError(
                f"optimizer.no_weight_decay: nothing that is trained is called {pattern!r}; give "
                f"{', '.join(KINDS)}, or a pattern of names such as {trained[0].name}"
            )
    if block.get("adamw") is not None and own["_component_"] != MUON:
        raise ConfigError(f"optimizer.adamw: belongs to {MUON}; leave it out")
    if own["_component_"] != MUON:
        return instantiate("optimizer", own, _groups(trained, free))
    by_muon = [each.kind == "matrix" for each in trained]
    moved = [key for key in own_keys(block) if key not in OWN_KEYS]
    shared = {key: block[key] for key in ["lr", "weight_decay", *moved] if key in block}
    beside = {"_component_": ADAMW, "fused": True, **shared, **(block.get("adamw") or {})}
    parts = []
    for part, wanted in ((own, True), (beside, False)):
        chosen = [index for index, is_muon in enumerate(by_muon) if is_muon == wanted]
        groups = _groups([trained[i] for i in chosen], [free[i] for i in chosen])
        if groups:
            parts.append(instantiate("optimizer", part, groups))
    return parts[0] if len(parts) == 1 else Several(parts)


def _matches(each: Trained, pattern: str) -> bool:
    return each.kind == pattern if pattern in KINDS else fnmatchcase(each.name, pattern)


def _groups(trained: Sequence[Trained], free: Sequence[bool]) -> list[Any]:
    """Parameters, or two groups of them if some have no weight decay."""
    decayed = [each.parameter for each, no in zip(trained, free, strict=True) if not no]
    others = [each.parameter for each, no in zip(trained, free, strict=True) if no]
    if not others:
        return decayed
    rest = {"params": others, "weight_decay": 0.0}
    return [{"params": decayed}, rest] if decayed else [rest]


class Several(Optimizer):
    """Optimizers of different parameters that step together, with their groups one after another.

    They share this one's groups and state, so that schedules and checkpoints see one optimizer.
    """

    def __init__(self, parts: list[Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step of each of them."""
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of all of them."""
        super().load_state_dict(state_dict)
        self._share()
