"""Another forward pass for a module that exists already, and compiled functions."""

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

COMPILE_BACKEND = "TORCH_COMPILE_BACKEND"


def patch_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Make `forward(module, ...)` the forward pass of `module`, in place.

    The module gets a subclass with that forward, not an attribute of its own: the compiler then
    sees that layers have the same code, and compiles it once.
    """
    module.__class__ = _subclass(module.__class__, forward)


def replaced(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward pass (module, ...) of `module` that `patch_forward` has replaced by `forward`."""
    kinds: tuple[type[nn.Module], ...] = type(module).__mro__
    index = next(i for i, kind in enumerate(kinds) if kind.__dict__.get("patched") is forward)
    return kinds[index + 1].forward


@cache
def _subclass(kind: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    # transformers wraps the forward pass of each subclass of a block.
    return type(kind.__name__, (kind,), {"forward": forward, "patched": forward})


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, to be compiled when it is called.

    As in torchtune, TORCH_COMPILE_BACKEND may name another compiler, to look for what breaks.
    """
    return torch.compile(function, backend=os.environ.get(COMPILE_BACKEND, "inductor"))
