"""How a program other than the kit's trainer is started, resumed, stopped and followed: a row."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import paths
from launcher.errors import RecipeFault, nearest
from launcher.recipe import stock
from runspec.engines import Records

if TYPE_CHECKING:
    from launcher.recipe.recipe import Recipe


def of_module(row: Engine, recipe: Recipe, config: Mapping[str, Any]) -> str:
    """The engine's own program, with its config."""
    arguments = list(map(str, config.get("args") or []))
    program = shlex.quote(row.program(recipe.target))
    if row.overrides == "options":
        module, slash, name = recipe.target.partition("/")
        if not slash:
            raise RecipeFault(
                f"entry: {row.records.name} starts a config of a module: write "
                f"{recipe.entry_name.partition(':')[0]}:MODULE/CONFIG"
            )
        program = shlex.join(["--module", module, "--config", name])
        arguments += flags(row.config(config, str(config["output_dir"])))
    return f"{row.command.format(program=program)} {shlex.join(arguments)}".rstrip()


def of_script(row: Engine, recipe: Recipe, config: Mapping[str, Any]) -> str:
    """The script in the run's copy of its folder, with its arguments."""
    script = os.path.relpath(str(recipe.script), recipe.code_root or Path())
    command = shlex.join([script, *map(str, config.get("args") or [])])
    return row.command.format(program=command)


def of_shell_lines(row: Engine, recipe: Recipe, config: Mapping[str, Any]) -> str:
    """The user's shell lines, started once per node."""
    lines = recipe.target or str(config.get("command") or "")
    return row.command.format(program=shlex.quote(lines))


def of_torchtune(row: Engine, recipe: Recipe, config: Mapping[str, Any]) -> str:
    """The script of a recipe that torchtune ships."""
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
    return row.command.format(program=shlex.quote(str(known[name].path)))


@dataclass(frozen=True)
class Engine:
    """How a program other than the kit's trainer is started, resumed, stopped and followed.

    records: where its progress, metrics and checkpoints are, how it is asked to stop, and when it
    is finished; keeps_ours: it writes the kit's own files itself (docs/engines.md). start: the
    shell text that torchrun starts as each rank, or each node runs once, from command; {program} in
    it is what the entry's name says. programs: the names that may follow the colon,
    by what they start; the first is the default of a config file. overrides: where the recipe's
    parameters go, with dotted overrides put over them: "file" (train.yaml, which is its config),
    "options" (of its command) or "parameters" (the file $COOKBOOK_PARAMETERS); "recipe" if the
    recipe is its config. own: values of its config that the run decides, by dotted path: its
    folders, and that it resumes; lacks: those that some of its programs do not know. dependencies:
    its packages, built for a recipe whose environment lacks them; none: it runs in the kit's
    environment unless the recipe names another; pins: with the kit's versions of the others.
    total: the dotted path of the number of steps in its config; iterations: how many make a step,
    if it reports those; layout_fault: why it would refuse this many ranks. resumes: it continues
    from its newest checkpoint. known_by: keys of a file that is its config, all of the
    first and one of the second. signs: keys that not all of its programs read, by program; needs:
    of which a program's file has one. reads: what its config names relative to the folder in which
    it starts, by key (start_folder.py). schema: its package, in which plugins/engines/schema.py finds wrong
    keys before the queue; needs_gpu: its import may fail without one.
    """

    records: Records
    command: str
    start: Callable[[Engine, Recipe, Mapping[str, Any]], str] = of_module
    overrides: str = "file"
    programs: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    lacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    total: str = ""
    iterations: Callable[[Mapping[str, Any]], int] | None = None
    layout_fault: Callable[[Mapping[str, Any], int], str | None] | None = None
    keeps_ours: bool = False
    resumes: bool = True
    dependencies: tuple[str, ...] = ()
    pins: bool = True
    known_by: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    signs: Mapping[str, frozenset[str]] = field(default_factory=dict)
    needs: Mapping[str, frozenset[str]] = field(default_factory=dict)
    reads: Callable[[Mapping[str, Any]], Mapping[str, str]] = lambda content: {}
    schema: str = ""
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

    def programs_of(self, content: Mapping[str, Any]) -> list[str]:
        """Return the programs that may read a config, by its keys: one, or those it fits."""
        told = content.keys() & frozenset[str]().union(*self.signs.values())
        fitting = [
            name
            for name in self.programs
            if told <= self.signs[name] and (name not in self.needs or told & self.needs[name])
        ]
        return fitting or list(self.programs)

    @property
    def has_config(self) -> bool:
        """Whether it has a config of its own, which a recipe may name."""
        return self.overrides in ("file", "options") or bool(self.schema)

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
        iterations = self.iterations(config) if self.iterations else 1
        return replace(self.records, total_steps=steps or None, iterations=iterations)


def is_file(target: str) -> bool:
    """Whether an entry's target is a config file and not a program's name."""
    return target.endswith((".yaml", ".yml"))


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
