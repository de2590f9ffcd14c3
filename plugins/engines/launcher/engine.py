"""How an engine is started, resumed, stopped and followed: a row, and what follows from it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.errors import RecipeFault, nearest
from launcher.recipe import entries
from launcher.recipe.model import Content, Recipe
from runspec.engines import Records

# What keeps the kit's files of a run's progress, beside the ranks.
FOLLOWER = "plugins.engines.slurm.engine:Follower"


@dataclass(frozen=True)
class Engine:
    """A program that trains in place of the kit's trainer."""

    # Where its progress, metrics and checkpoints are, how it is stopped, and when it is finished.
    records: Records
    # The shell text that torchrun starts as each rank; {program} is what the entry's name says.
    command: str
    # Its package, in which plugins/engines/schema.py finds wrong keys before the queue.
    schema: str
    # The names that may follow the colon, by what they start.
    programs: Mapping[str, str] = field(default_factory=dict)
    # Where the recipe's parameters go: file (train.yaml, its config), options (of its command) or
    # parameters (the file $COOKBOOK_PARAMETERS, beside a script of the user's own).
    overrides: str = "file"
    # Values of its config that the run decides, by dotted path: its folders, and that it resumes.
    own: Mapping[str, Any] = field(default_factory=dict)
    # Those of them that some of its programs do not know.
    lacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # The dotted path of the number of steps in its config.
    total: str = ""
    # How many of what it reports make a step.
    iterations: Callable[[Content], int] = lambda config: 1
    # Why it would refuse this many ranks.
    layout_fault: Callable[[Content, int], str | None] = lambda config, ranks: None
    # Its packages, built for a recipe whose environment lacks them.
    dependencies: tuple[str, ...] = ()
    # They are built with the kit's versions of all others.
    pins: bool = True
    # Keys of a file that is its config: all of the first and one of the second.
    known_by: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    # What its config names relative to the folder in which it starts, by key.
    reads: Callable[[Content], Mapping[str, str]] = lambda content: {}
    # Its import may fail without a GPU.
    needs_gpu: bool = False

    def program(self, target: str) -> str:
        """Return what the entry's target starts; RecipeFault if the engine has no such program."""
        if not self.programs:
            return target
        if target not in self.programs:
            message = f"{self.records.name} has no {target!r}{nearest(target, self.programs)}"
            raise RecipeFault(
                f"entry: {message}: name one of {', '.join(self.programs)}, or its config file"
            )
        return self.programs[target]

    def may_read(self, content: Content) -> bool:
        """Whether a file's content is, by its keys, a config of it."""
        all_of, one_of = self.known_by
        return bool(all_of) and all_of <= content.keys() and bool(one_of & content.keys())

    def start(self, recipe: Recipe, config: Content) -> str:
        """Return its command with its program, options and arguments."""
        if self.overrides == "parameters":
            return self.command.format(program=entries.script_command(recipe))
        arguments = list(map(str, config.get("args") or []))
        program = shlex.quote(self.program(recipe.target))
        if self.overrides == "options":
            module, slash, name = recipe.target.partition("/")
            if not slash:
                raise RecipeFault(
                    f"entry: {self.records.name} starts a config of a module: write "
                    f"{recipe.entry_name.partition(':')[0]}:MODULE/CONFIG"
                )
            program = shlex.join(["--module", module, "--config", name])
            arguments += flags(self.config(config, str(config["output_dir"])))
        return f"{self.command.format(program=program)} {shlex.join(arguments)}".rstrip()

    def config(self, config: Mapping[str, Any], run_dir: str) -> dict[str, Any]:
        """Return what the engine reads: the recipe's parameters, and what the run decides."""
        content: dict[str, Any] = _copied(config.get("parameters") or {})
        resources = config.get("resources") or {}
        counts = {
            "GPUS_PER_NODE": resources.get("gpus_per_node", 1),
            "NODES": resources.get("nodes", 1),
        }
        without = self.lacks.get(str(config.get("entry")).partition(":")[2], ())
        for path, value in self.own.items():
            text = value.replace("RUN_DIR", run_dir) if isinstance(value, str) else value
            if path not in without:
                _put(content, path, counts.get(text, text))
        return content

    def recorded(self, config: Mapping[str, Any]) -> Records:
        """Return where this recipe's progress is."""
        steps = count(config, f"parameters.{self.total}", 0) if self.total else 0
        return replace(self.records, total_steps=steps or None, iterations=self.iterations(config))


def flags(content: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield a block as command-line options, for an engine without a config file."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from flags(value, f"{above}{key}.")
        elif isinstance(value, bool):
            yield f"--{above}{key}" if value else f"--{above}no_{key}"
        else:
            yield f"--{above}{key}={value}"


def at(block: Any, path: str) -> Any:
    """Return the value at a dotted path, None if there is none; a number counts in a list."""
    for part in path.split("."):
        if isinstance(block, list) and part.isdigit() and int(part) < len(block):
            block = block[int(part)]
        else:
            block = block.get(part) if isinstance(block, Mapping) else None
    return block


def count(block: Any, path: str, default: int) -> int:
    """Return the number from 1 on at a dotted path, else the default."""
    value = at(block, path)
    return value if type(value) is int and value > 0 else default


def _put(block: dict[str, Any], path: str, value: Any) -> None:
    *above, last = path.split(".")
    for part in above:
        inner = block.get(part)
        block[part] = block = inner if isinstance(inner, dict) else {}
    block[last] = value


def _copied(value: Any) -> Any:
    return {key: _copied(each) for key, each in value.items()} if isinstance(value, dict) else value
