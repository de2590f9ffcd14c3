"""The one seam between the kit and its plug-ins: commands, checks, entries, methods and hooks.

A plug-in is a package with an entry point in the group "slurm_cookbook.plugins" that names a
Plugin. The kit's own plug-ins are in plugins/; other people's are packages that they install. The
core imports no plug-in: it asks this module, and works without any. A plug-in names its parts as
text, MODULE:NAME, and each part is imported only when it is used.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

GROUP = "slurm_cookbook.plugins"


@dataclass(frozen=True)
class Command:
    """A command of cookbook."""

    # MODULE:NAME of the click command.
    target: str
    # Its line in cookbook --help.
    help: str
    # Its group there: Prepare, Run, Look or Deliver.
    group: str


@dataclass(frozen=True)
class Check:
    """A check of a recipe before it is queued."""

    # The subject of its findings.
    subject: str
    # MODULE:NAME of the function, from a launcher.check.Context to findings.
    target: str
    # It is made even with --no-check.
    needed: bool = False
    # It starts another process, which takes seconds; a dry run leaves it out.
    starts: bool = False
    # It asks what is installed, and is made again once the environment of a recipe is built.
    after_build: bool = False


@dataclass(frozen=True)
class Plugin:
    """All that one plug-in gives."""

    name: str
    # By the word that a user types.
    commands: Mapping[str, Command] = field(default_factory=dict)
    # They run after the core's own, in this order.
    checks: tuple[Check, ...] = ()
    # MODULE:NAME of a mapping from names of entries to launcher.recipe.model.Entry; "" for none.
    entries: str = ""
    # MODULE:NAME of the config class of a training method, by the name of its entry.
    methods: Mapping[str, str] = field(default_factory=dict)
    # MODULE:NAME of a function, by the name of a hook. The core's callers say what each is for.
    hooks: Mapping[str, str] = field(default_factory=dict)


@cache
def plugins() -> tuple[Plugin, ...]:
    """Return the installed plug-ins, by the names of their entry points.

    An entry point whose package was removed is left out, as after `rm -r plugins`.
    """
    found = []
    for point in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        try:
            found.append(point.load())
        except ModuleNotFoundError as error:
            if not f"{point.module}.".startswith(f"{error.name}."):
                raise
    return tuple(found)


def load(target: str) -> Any:
    """Return what MODULE:NAME names."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def commands() -> dict[str, Command]:
    """Return the commands of all plug-ins."""
    return {name: each for plugin in plugins() for name, each in plugin.commands.items()}


def hooks(name: str) -> Iterator[Callable[..., Any]]:
    """Yield what the plug-ins give for a hook; nothing without a plug-in that knows it."""
    for plugin in plugins():
        if target := plugin.hooks.get(name):
            yield load(target)


def hook(name: str) -> Callable[..., Any] | None:
    """Return the first function for a hook, None without one."""
    return next(hooks(name), None)
