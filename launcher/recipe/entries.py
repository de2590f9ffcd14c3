"""The table of entries: what a recipe can start, and what the kit can do with each.

Nothing else in the launcher compares the names of entries: it asks recipe.entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import plugins
from launcher.errors import RecipeFault, UsageFault, nearest, nearest_key
from launcher.recipe import stock
from launcher.recipe.launch import Engine, of_script, of_shell_lines
from plugins.engines.launcher.engines import ENGINES
from plugins.evaluate.recipe_keys import EVAL, task_faults
from plugins.serve.recipe_keys import SERVE, package_of
from runspec.keys.common import COMMAND, COMMON, ENGINE, SCRIPT
from runspec.keys.key import REQUIRED, Fault, Key, Keys, children, may_change
from runspec.keys.methods import METHODS
from runspec.keys.sft import SftConfig
from runspec.keys.train import TrainConfig

if TYPE_CHECKING:
    from launcher.recipe.recipe import Recipe


@dataclass(frozen=True)
class Entry:
    """A thing that a recipe can start, and its properties.

    backend: the package that the recipe's environment must have, because what runs on the host
    starts it there, by the recipe's content; "" for none. keys: all keys of its recipes. module: of the kit's trainer, and its first argument. command:
    what torchrun starts as each rank, as shell text, from the recipe and its resolved content: by
    default the module, with train.yaml. launch: the row of plugins/engines/launcher/engines.py that says it
    and the rest of what is not the kit's trainer: how it is started, resumed, stopped and followed.
    program: the file that is started,
    None for a module of the kit's trainer. on_host: it runs on the host with the kit's interpreter,
    and starts its backend in the recipe's environment. own_code: it is the
    user's own program; the folder around it is copied into the run, and it gets its parameters
    instead of a train.yaml. per_node: it is started once per node, without torchrun. other_keys:
    its recipes may hold keys that are not in keys. checked: what trainer.check looks at: "complete"
    (the whole config of the kit's trainer, with its layout and weights), "components" (only that
    they exist and take their arguments) or "". method: the config of a training method of the kit's
    trainer. companion: what the supervisor calls beside its ranks (slurm/companion.py), as
    MODULE:CLASS. resumes: it continues from its last checkpoint after a restart.
    purpose: train, evaluate or serve. faults: what its table
    of keys does not see of a recipe. notes: what the user should know of keys that are accepted.
    """

    keys: Keys
    module: str = ""
    command: Callable[[Recipe, Mapping[str, Any]], str] = lambda recipe, config: (
        f'python -P -m {recipe.entry.module} "$RUN_DIR/train.yaml"'
    )
    program: Callable[[Recipe], Path | None] = lambda recipe: None
    on_host: bool = False
    backend: Callable[[Mapping[str, Any]], str] = lambda config: ""
    own_code: bool = False
    launch: Engine | None = None
    per_node: bool = False
    other_keys: bool = False
    checked: str = ""
    method: type[TrainConfig] | None = None
    companion: str = ""
    can_profile: bool = False
    resumes: bool = False
    purpose: str = "train"
    faults: Callable[[Mapping[str, Any]], Iterable[Fault]] = lambda config: ()
    notes: Callable[[Mapping[str, Any]], Iterable[str]] = lambda config: ()

    @property
    def engine(self) -> Engine | None:
        """The launch of another trainer that reads a config of its own, None for all others."""
        return self.launch if self.launch and self.launch.has_config else None

    @property
    def max_retries(self) -> int:
        """How often a failed attempt is retried if the recipe does not say it."""
        return 3 if self.continues else 0

    @property
    def continues(self) -> bool:
        """Whether it continues from its last checkpoint after a restart."""
        return self.launch.resumes if self.launch else self.resumes


def method(module: str, config: type[TrainConfig]) -> Entry:
    """Return the row of a training method of the kit's trainer: what starts it, and its config."""
    return Entry(
        keys={**COMMON, **config.keys()},
        module=module,
        checked="complete",
        method=config,
        companion=config.companion,
        can_profile=not config.runs_teacher_only,
        resumes=True,
        backend=config.backend_of,
        faults=config.recipe_faults,
        notes=config.key_notes,
    )


def other(launch: Engine, keys: Keys, **known: Any) -> Entry:
    """Return the row of what is not the kit's trainer, by that of plugins/engines/launcher/engines.py."""
    known.setdefault("notes", _start_notes)
    if launch.start is of_script:
        known["program"] = _script
    return Entry(
        keys={**COMMON, **keys},
        command=lambda recipe, config: launch.start(launch, recipe, config),
        launch=launch,
        companion="" if launch.keeps_ours else "plugins.engines.slurm.engine:Follower",
        own_code=launch.overrides == "parameters",
        per_node=launch.start is of_shell_lines,
        **known,
    )


def _start_notes(config: Mapping[str, Any]) -> Iterable[str]:
    read_from, folder = config.get("config_read_from"), config.get("work_dir")
    if folder and read_from and Path(str(folder)) != Path(str(read_from)).parent:
        yield f"it starts in {folder}, from which the paths in {Path(str(read_from)).name} count"


def _torchtune_notes(config: Mapping[str, Any]) -> Iterable[str]:
    name = str(config.get("entry")).partition(":")[2]
    if own := stock.own_method(name):
        yield (
            f"torchtune's own {name} runs it, and saves at the end of an epoch; the kit's own "
            f"method is entry: {own} (cookbook recipes --key entry)"
        )


def _script(recipe: Recipe) -> Path:
    return (recipe.path.parent / Path(recipe.target).expanduser()).resolve()


def _command_faults(config: Mapping[str, Any]) -> Iterable[Fault]:
    entry, lines = str(config.get("entry") or ""), config.get("command")
    if not isinstance(lines, str | None):
        yield Fault("command", f"command must be text, got {lines!r}")
    elif bool(entry.partition(":")[2]) == bool(lines and lines.strip()):
        message = "entry: command needs the lines to run" if not lines else "they are given twice"
        yield Fault("command", f"{message}: write them under command:, or entry: command:LINE")
    else:
        from launcher.recipe import batch_script  # most recipes run no shell lines

        for text in batch_script.faults(lines or entry.partition(":")[2]):
            yield Fault("command", f"command: {text}")


_ENGINE = {
    **ENGINE,
    **{name: SCRIPT[name] for name in ("code_root", "args", "redact_output", "parameters")},
}
# What torchtune's own trainers share with the kit's; they check the rest by themselves.
_TORCHTUNE = {
    name: replace(key, unused="", refused="")
    for name, key in SftConfig.keys().items()
    if key.default is not REQUIRED and "." not in name and "block" not in key.kind
    if key.kind not in ("component", "any") and not key.choices
}

_COMMAND = {"keys": {**SCRIPT, **COMMAND}, "faults": _command_faults}
# What is known of rows of plugins/engines/launcher/engines.py beside a config of their own.
_KNOWN: dict[str, dict[str, Any]] = {
    "torchtune:": {
        "keys": _TORCHTUNE,
        "program": lambda recipe: getattr(stock.recipes().get(recipe.target), "path", None),
        "other_keys": True,
        "checked": "components",
        "can_profile": True,
        "notes": _torchtune_notes,
    },
    "script:": {"keys": SCRIPT},
    "command": _COMMAND,
    "command:": _COMMAND,
}

# By name; a name that ends with a colon is followed by what is started: script:train.py
ENTRIES = {
    **{name: method(f"trainer.train {name}", config) for name, config in METHODS.items()},
    **{
        name: method(f"trainer.train {config}", plugins.load(config))
        for plugin in plugins.plugins()
        for name, config in plugin.methods.items()
    },
    "eval": Entry(
        keys={**COMMON, **EVAL},
        module="plugins.evaluate.main",
        resumes=True,
        purpose="evaluate",
        faults=task_faults,
    ),
    "serve": Entry(
        keys={**COMMON, **SERVE},
        command=lambda recipe, config: (
            '"$VENV/bin/python" -m plugins.serve.server "$RUN_DIR/train.yaml"'
        ),
        on_host=True,
        backend=package_of,
        resumes=True,
        purpose="serve",
    ),
    **{
        name: other(launch, **_KNOWN.get(name, {"keys": _ENGINE}))
        for name, launch in ENGINES.items()
    },
}


def find(name: str) -> Entry:
    """Return the row for the text of `entry:` in a recipe; RecipeFault if there is none."""
    prefix, colon, target = name.partition(":")
    row = ENTRIES.get(prefix + colon)
    if row is None or (colon and not target):
        # Imported late, as in most recipes nothing is wrong.
        from launcher.recipe import absent

        if why := absent.ENTRIES.get(name.lower()):
            raise RecipeFault(f"entry {name!r}: this version has no {why}")
        known = ", ".join(f"{each}..." if each.endswith(":") else each for each in ENTRIES)
        raise RecipeFault(
            f"entry {name!r} is not known{nearest(prefix + colon, ENTRIES)}: it is one of {known} "
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
    """Return the properties of a key, as JSON values; UsageFault with a hint if it is unknown."""
    known = all_keys()
    if name not in known:
        hint = nearest(name, known) or nearest_key(name, known)
        raise UsageFault(f"there is no key {name!r}{hint}: docs/keys.md lists all keys")
    key = known[name]
    return {
        "key": name,
        "type": key.expects,
        "default": "(required)" if key.default is REQUIRED else key.default,
        "help": key.help,
        "entries": [each for each, entry in ENTRIES.items() if name in entry.keys],
        "not_used": key.unused or None,
        "refused": key.refused or None,
        "may_change_at_resume": may_change(known, name),
        "keys": {inner: each.help for inner, each in children(known, name).items()},
    }
