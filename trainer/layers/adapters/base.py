"""Kinds of adapters by name, and a model without its adapter."""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from runspec import adapters
from trainer.config import refused_path
from trainer.errors import ConfigError
from trainer.model import AdapterKind, Decoder


def kind_of(model: Mapping[str, Any]) -> AdapterKind | None:
    """The kind that a `model` block names; None if all weights are trained.

    Raises:
        ConfigError: there is no such kind.
    """
    name = adapters.name_of(model)
    if name is None:
        return None
    known = adapters.KINDS.get(name)
    dotted = name if known is None else known.made_by
    if refused := refused_path("model.adapter", dotted):
        raise ConfigError(f"{refused}, or be one of {', '.join(adapters.KINDS)}")
    module, _, last = dotted.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), last)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"model.adapter: there is no {dotted}: {error}") from None
    if not (isinstance(kind, type) and issubclass(kind, AdapterKind)):
        raise ConfigError(f"model.adapter: {dotted} is no trainer.model.AdapterKind")
    return kind({key: model[key] for key in kind.declared.keys if model.get(key) is not None})


def method(model: Decoder) -> str:
    """What a model trains: full, or an adapter's title, with a Q before it over a base in NF4."""
    if model.adapter is None:
        return "full"
    title = model.adapter.declared.title
    quantised = any(hasattr(module, "nf4_table") for module in model.modules())
    return f"Q{title}" if quantised else title


def turn_off(module: nn.Module) -> list[nn.Module]:
    """Let `module` compute what its base model does from now on; returns what was changed."""
    changed = [m for m in module.modules() if vars(m).get("adapter_enabled")]
    for each in changed:
        each.adapter_enabled = False
    return changed


@contextmanager
def disabled(module: nn.Module) -> Iterator[None]:
    """Within it `module` computes what its base model does, on every layout and compiled.

    A backward pass belongs within it, too: activation checkpointing computes the model again.
    """
    changed = turn_off(module)
    try:
        yield
    finally:
        for each in changed:
            each.adapter_enabled = True
