"""Another forward pass for a module that exists already."""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn


def replace(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Make `forward(module, ...)` the forward pass of `module`, in place.

    The module gets a class of its kind with that forward, not a function of its own: the compiler
    then sees that layers are alike, and compiles one code for all of them.
    """
    module.__class__ = _kind(type(module), forward)


@cache
def _kind(kind: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"forward": forward})
