"""Components: the class or function that a `_component_` names, imported and called."""

import importlib
import inspect
import os
from typing import Any

from runspec.hints import nearest
from trainer.errors import ConfigError

COMPONENT_PREFIXES = (
    "torch.",
    "torchtune.",
    "torchao.",
    "trainer.",
    "transformers.",
    "bitsandbytes.",
)
# Names packages and modules of the user's own, separated by commas, whose components are allowed
# too. It is set in the user's shell: a recipe, which may be a stranger's, cannot set it.
OWN_PACKAGES = "COOKBOOK_COMPONENTS"


def prefix_faults(key: str, block: dict[str, Any]) -> list[str]:
    """A fault if the dotted path of a block's `_component_` may not be imported."""
    dotted = block["_component_"]
    own = os.environ.get(OWN_PACKAGES, "").replace(",", " ").split()
    if dotted.startswith((*COMPONENT_PREFIXES, *(f"{name}." for name in own))):
        return []
    return [
        f"{key}._component_: {dotted!r} is not allowed; it must begin with one of "
        f"{', '.join(COMPONENT_PREFIXES)}, or with a package of yours that the variable "
        f"{OWN_PACKAGES} names"
    ]


def instantiate(key: str, block: dict[str, Any], *args: Any, **extra: Any) -> Any:
    """Call the component that a block names with the block's other keys.

    Raises:
        ConfigError: the component does not exist, or does not take these arguments.
    """
    refused = prefix_faults(key, block)
    if refused:
        raise ConfigError(*refused)
    dotted = block["_component_"]
    factory = component(key, dotted)
    arguments = {k: v for k, v in block.items() if k != "_component_"} | extra
    try:
        return factory(*args, **arguments)
    except (TypeError, ValueError, FileNotFoundError, AssertionError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{key}: {dotted} refused its arguments: {reason}") from error


def arguments_of(key: str, block: dict[str, Any]) -> set[str]:
    """The names of the arguments that the component of a block takes."""
    return set(inspect.signature(component(key, block["_component_"])).parameters)


def component(key: str, dotted: str) -> Any:
    """The class or function at a dotted path; raises ConfigError if there is none."""
    module_name, _, name = dotted.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        raise ConfigError(f"{key}._component_: {dotted} cannot be imported: {error}") from None
    except AttributeError:
        known = [n for n in dir(importlib.import_module(module_name)) if not n.startswith("_")]
        hint = nearest(name, known)
        raise ConfigError(f"{key}._component_: {module_name} has no {name}{hint}") from None
