"""The table of entries: what a recipe can start, and what the kit can do with each.

Nothing else in the launcher compares the names of entries: it asks recipe.entry.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import paths
from launcher.errors import RecipeFault, UsageFault, nearest
from launcher.recipes import stock
from runspec.keys.common import COMMON, SCRIPT
from runspec.keys.distill import TeachConfig
from runspec.keys.evaluate import EVAL, task_faults
from runspec.keys.key import REQUIRED, Fault, Key, Keys, children, may_change
from runspec.keys.methods import METHODS
from runspec.keys.serve import SERVE
from runspec.keys.sft import SftConfig
from runspec.keys.train import TrainConfig, notes

if TYPE_CHECKING:
    from launcher.recipes.recipe import Recipe


# Neither compared nor shown: what is not generated takes no time at each start.
@dataclass(frozen=True, eq=False, repr=False)
class Entry:
    """What torchrun can start, and what is known of it.

    keys: all keys of its recipes. command: what torchrun starts as each rank, as shell text, from
    the recipe and its resolved content. program: the file that is started, None for a module of
    the kit's trainer. own_code: it is the user's own program; the folder around it is copied into
    the run, and it gets its parameters instead of a train.yaml. other_keys: its recipes may hold
    keys that are not in keys. checked: what trainer.check looks at: "complete" (the whole config
    of the kit's trainer, with its layout and weights), "components" (only that they exist and take
    their arguments) or "". method: the config of a training method of the kit's trainer.
    can_estimate: its memory and time can be computed. resumes: it continues from its last
    checkpoint when it is started again. purpose: train, evaluate or serve. faults: what its table
    of keys does not see of a recipe. notes: what the user should know of keys that are accepted.
    """

    keys: Keys
    command: Callable[[Recipe, Mapping[str, Any]], str]
    program: Callable[[Recipe], Path | None] = lambda recipe: None
    own_code: bool = False
    other_keys: bool = False
    checked: str = ""
    method: type[TrainConfig] | None = None
    can_estimate: bool = False
    can_profile: bool = False
    resumes: bool = False
    purpose: str = "train"
    faults: Callable[[Mapping[str, Any]], Iterable[Fault]] = lambda config: ()
    notes: Callable[[Mapping[str, Any]], Iterable[str]] = lambda config: ()

    @property
    def max_retries(self) -> int:
        """How often a failed attempt is retried if the recipe does not say it."""
        return 3 if self.resumes else 0


def trainer_command(module: str) -> Callable[[Recipe, Mapping[str, Any]], str]:
    """Return the command of an entry that is a module and reads train.yaml."""
    return lambda recipe, config: f'python -m {module} "$RUN_DIR/train.yaml"'


def method(module: str, config: type[TrainConfig]) -> Entry:
    """Return the row of a training method of the kit's trainer: what starts it, and its config."""
    return Entry(
        keys={**COMMON, **config.keys()},
        command=trainer_command(module),
        checked="complete",
        method=config,
        can_estimate=True,
        can_profile=True,
        resumes=True,
        notes=notes,
    )


def _script(recipe: Recipe) -> Path:
    return (recipe.path.parent / Path(recipe.target).expanduser()).resolve()


def _script_command(recipe: Recipe, config: Mapping[str, Any]) -> str:
    """The script in the run's copy of its folder, with its arguments."""
    import shlex  # only what starts a job needs it

    script = os.path.relpath(_script(recipe), recipe.code_root or Path())
    return f"python {shlex.join([script, *map(str, config.get('args') or [])])}"


def _torchtune_command(recipe: Recipe, config: Mapping[str, Any]) -> str:
    import shlex

    name, known = recipe.target, stock.recipes()
    if name not in known:
        raise RecipeFault(
            f"torchtune has no recipe {name!r}{nearest(name, known)}; it has "
            f"{', '.join(known) or 'none'} in {paths.venv_root()}"
        )
    if not known[name].distributed and recipe.resources.world_size > 1:
        raise RecipeFault(
            f"torchtune's {name} runs on one GPU, and {recipe.resources.nodes} x "
            f"{recipe.resources.gpus_per_node} are requested: use --nodes 1 --gpus-per-node 1"
        )
    return f'python {shlex.quote(str(known[name].path))} --config "$RUN_DIR/train.yaml"'


# What torchtune's own trainers share with the kit's; they check the rest by themselves.
_TORCHTUNE = {
    name: replace(key, unused="", refused="")
    for name, key in SftConfig.keys().items()
    if key.default is not REQUIRED and "." not in name and "block" not in key.kind
    if key.kind not in ("component", "any") and not key.choices
}

# By name; a name that ends with a colon is followed by what is started: script:train.py
ENTRIES = {
    **{name: method(f"trainer.{name}", config) for name, config in METHODS.items()},
    "teach": replace(method("trainer.teach", TeachConfig), can_estimate=False, can_profile=False),
    "eval": Entry(
        keys={**COMMON, **EVAL},
        command=trainer_command("trainer.evaluate"),
        resumes=True,
        purpose="evaluate",
        faults=task_faults,
    ),
    "serve": Entry(
        keys={**COMMON, **SERVE},
        command=trainer_command("serving.replica"),
        resumes=True,
        purpose="serve",
    ),
    "torchtune:": Entry(
        keys={**COMMON, **_TORCHTUNE},
        command=_torchtune_command,
        program=lambda recipe: getattr(stock.recipes().get(recipe.target), "path", None),
        other_keys=True,
        checked="components",
        can_profile=True,
    ),
    "script:": Entry(
        keys={**COMMON, **SCRIPT}, command=_script_command, program=_script, own_code=True
    ),
}


def find(name: str) -> Entry:
    """Return the row for the text of `entry:` in a recipe; RecipeFault if there is none."""
    prefix, colon, target = name.partition(":")
    row = ENTRIES.get(prefix + colon)
    if row is None or (colon and not target):
        # Imported late, as in most recipes nothing is wrong.
        from launcher.recipes import absent

        if why := absent.ENTRIES.get(name.lower()):
            raise RecipeFault(f"entry {name!r}: this version has no {why}")
        known = ", ".join(f"{each}..." if each.endswith(":") else each for each in ENTRIES)
        raise RecipeFault(
            f"entry {name!r} is not known{nearest(name, ENTRIES)}: it is one of {known} "
            "(cookbook recipes --key entry)"
        )
    return row


def of(config: Mapping[str, Any]) -> Entry:
    """Return the row of a recipe's content."""
    return find(str(config.get("entry") or COMMON["entry"].default))


def replaced_by(key: str) -> tuple[str, ...]:
    """Return the older names of what a key says."""
    return next((row.keys[key].replaces for row in ENTRIES.values() if key in row.keys), ())


def all_keys() -> dict[str, Key]:
    """Return the keys of all entries."""
    return {name: key for entry in reversed(ENTRIES.values()) for name, key in entry.keys.items()}


def explain(name: str) -> dict[str, Any]:
    """Return what is known of a key, as JSON values; UsageFault with a hint if it is unknown."""
    known = all_keys()
    if name not in known:
        last = {each.rpartition(".")[2]: each for each in known}
        hint = nearest(name, known) or nearest(name, last)
        if name in last:
            hint = f" (did you mean {last[name]}?)"
        raise UsageFault(f"there is no key {name!r}{hint}: docs/keys.md lists all keys")
    found = known[name]
    return {
        "key": name,
        "type": found.expects,
        "default": "(required)" if found.default is REQUIRED else found.default,
        "help": found.help,
        "entries": [each for each, entry in ENTRIES.items() if name in entry.keys],
        "not_used": found.unused or None,
        "refused": found.refused or None,
        "may_change_at_resume": may_change(known, name),
        "keys": {inner: each.help for inner, each in children(known, name).items()},
    }
