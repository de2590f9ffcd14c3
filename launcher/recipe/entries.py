"""The table of entries: what a recipe can start, and what the kit can do with each.

Nothing else in the launcher compares the names of entries: it asks recipe.entry. Plug-ins add rows,
so the table is made when it is first asked for.
"""

import os
import shlex
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from launcher import plugins
from launcher.errors import RecipeFault, UsageFault, nearest
from launcher.recipe import absent, batch_script
from launcher.recipe.model import Content, Entry, Recipe
from runspec.keys.common import COMMAND, COMMON, SCRIPT
from runspec.keys.key import Fault, Key, Keys
from runspec.keys.methods import METHODS
from runspec.keys.train import TrainConfig


def method(module: str, config: type[TrainConfig]) -> Entry:
    """Return the row of a training method of the kit's trainer: what starts it, and its config."""
    return Entry(
        keys={**COMMON, **config.keys()},
        module=module,
        method=config,
        companion=config.companion,
        can_profile=True,
        resumes=True,
        backend=config.backend_of,
        faults=config.recipe_faults,
        notes=config.key_notes,
    )


# A script of the user's own -----------------------------------------------------------------------


def script_of(recipe: Recipe) -> Path:
    """Return the script that script:FILE names."""
    return (recipe.path.parent / Path(recipe.target).expanduser()).resolve()


def script_command(recipe: Recipe) -> str:
    """Return the shell text for the script in the run's copy of its folder, and its arguments."""
    script = os.path.relpath(str(recipe.script), recipe.code_root or Path())
    return shlex.join([script, *map(str, recipe.config.get("args") or [])])


# Shell lines --------------------------------------------------------------------------------------


def _shell_lines(recipe: Recipe, config: Content) -> str:
    return f"bash -c {shlex.quote(recipe.target or str(config.get('command') or ''))}"


def _command_faults(config: Content) -> Iterable[Fault]:
    entry, lines = str(config.get("entry") or ""), config.get("command")
    if not isinstance(lines, str | None):
        yield Fault("command", f"command must be text, got {lines!r}")
    elif bool(entry.partition(":")[2]) == bool(lines and lines.strip()):
        message = "entry: command needs the lines to run" if not lines else "they are given twice"
        yield Fault("command", f"{message}: write them under command:, or entry: command:LINE")
    else:
        for text in batch_script.faults(lines or entry.partition(":")[2]):
            yield Fault("command", f"command: {text}")


# The table ----------------------------------------------------------------------------------------

_COMMAND = Entry(
    keys={**COMMON, **SCRIPT, **COMMAND},
    title="shell lines",
    command=_shell_lines,
    own_code=True,
    per_node=True,
    faults=_command_faults,
)


@cache
def rows() -> dict[str, Entry]:
    """Return all entries by name, those of plug-ins last.

    A name that ends with a colon is followed by what is started: script:train.py
    """
    table = {name: method(f"trainer.train {name}", config) for name, config in METHODS.items()}
    table["script:"] = Entry(
        keys={**COMMON, **SCRIPT},
        title="the script",
        command=lambda recipe, config: f"python {script_command(recipe)}",
        program=script_of,
        own_code=True,
    )
    table |= {"command": _COMMAND, "command:": _COMMAND}
    for plugin in plugins.plugins():
        for name, config in plugin.methods.items():
            table[name] = method(f"trainer.train {config}", plugins.load(config))
        if plugin.entries:
            table |= plugins.load(plugin.entries)
    return table


def find(name: str) -> Entry:
    """Return the row for the text of `entry:` in a recipe; RecipeFault if there is none."""
    prefix, colon, target = name.partition(":")
    row = rows().get(prefix + colon)
    if row is None or (colon and not target):
        if why := absent.ENTRIES.get(name.lower()):
            raise RecipeFault(f"entry {name!r}: this version has no {why}")
        known = ", ".join(f"{each}..." if each.endswith(":") else each for each in rows())
        raise RecipeFault(
            f"entry {name!r} is not known{nearest(prefix + colon, rows())}: it is one of {known} "
            "(docs/keys.md)"
        )
    return row


def of(config: Mapping[str, Any]) -> Entry:
    """Return the row of a recipe's content."""
    return find(str(config.get("entry") or COMMON["entry"].default))


def like_torchtune(script: str) -> str:
    """Return the method for the purpose of a script of torchtune's, "" if there is none."""
    named = ((name, row.method.torchtune) for name, row in rows().items() if row.method)
    return next((name for name, part in named if part and part in script), "")


def for_data(component: str) -> str:
    """Return the method whose data a component reads, "" if any other may; UsageFault for prompts
    that none answers.
    """
    from launcher.recipe.own_data import PROMPTS  # hardly any command reads data

    for name, row in rows().items():
        if row.method and row.method.pairs == component:
            return name
        if row.method and row.method.samples_answers and component == PROMPTS:
            return name
    if component == PROMPTS:
        raise UsageFault("the data are prompts without answers, and no method here samples them")
    return ""


def recognised(content: Content) -> str | None:
    """Return the entry whose config a file is, by its keys; None for a file of nobody."""
    known = ((name, row.recognises) for name, row in rows().items() if row.recognises)
    return next((name for name, fits in known if fits(content)), None)


def all_keys() -> dict[str, Key]:
    """Return the keys of all entries."""
    return {name: key for entry in reversed(rows().values()) for name, key in entry.keys.items()}


def inner_keys() -> dict[str, Keys]:
    """Return the keys of each block inside an open block of all entries."""
    return {name: keys for entry in rows().values() for name, keys in entry.inner.items()}
