"""A sweep: one recipe and the settings in which its runs differ, as a grid or as a list."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from launcher import paths, yamlfile
from launcher.errors import RecipeFault, nearest

_KEYS = ("description", "recipe", "set", "grid", "list", "sweeps", "parallel", "gpu")
_ONE_OF = ("grid", "list", "sweeps")
_LIST_KEYS = ("name", "set")
# Slurm's own limit of a job array is MaxArraySize, 1001 unless the site says otherwise.
MOST_CELLS = 1000
_PARALLEL = 4


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: its name, and the overrides that make it of the recipe."""

    number: int
    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Sweep:
    """A sweep's file, read and checked. parallel: the maximum number of concurrent runs."""

    name: str
    path: Path
    description: str
    recipe: str
    cells: tuple[Cell, ...]
    parallel: int = _PARALLEL
    gpu: str | None = None


def names() -> list[str]:
    """Return the names of the sweeps that the kit ships, sorted."""
    return yamlfile.names(paths.SWEEPS)


def load(name: str) -> Sweep:
    """Return a sweep by its name or path; RecipeFault lists every fault of its file."""
    path = yamlfile.find("sweep", name, paths.SWEEPS)
    content = yamlfile.load(path)
    faults = [*_faults(content)]
    cells: list[Cell] = []
    if not faults:
        shared = tuple(_overrides(content.get("set") or {}))
        cells = [*_cells(content, shared)]
        others = [load(str(each)) for each in content.get("sweeps") or []]
        recipe = _recipe(content, path)
        faults += [
            f"sweeps: {each.name} has the recipe {each.recipe}, this one {recipe}: they must be "
            "the same"
            for each in others
            if each.recipe != recipe
        ]
        joined = [cell for each in others for cell in each.cells]
        cells += [
            replace(cell, number=number, overrides=(*cell.overrides, *shared))
            for number, cell in enumerate(joined)
        ]
        twice = sorted({each.name for each in cells if _count(cells, each.name) > 1})
        faults += [f"two cells are named {each!r}: give each its own name" for each in twice]
        if not 0 < len(cells) <= MOST_CELLS:
            faults.append(f"it has {len(cells)} cells: a sweep has 1 to {MOST_CELLS:,}")
    if faults:
        raise RecipeFault([f"{fault}, in {path}" for fault in faults])
    return Sweep(
        path.stem,
        path,
        str(content.get("description") or ""),
        _recipe(content, path),
        tuple(cells),
        int(content.get("parallel") or _PARALLEL),
        content.get("gpu"),
    )


def _recipe(content: Mapping[str, Any], path: Path) -> str:
    recipe = str(content["recipe"])
    if recipe.endswith((".yaml", ".yml")):
        # As in `extends`, a path counts from the file that names it.
        recipe = str((path.parent / Path(recipe).expanduser()).resolve())
    return recipe


def _count(cells: Sequence[Cell], name: str) -> int:
    return sum(each.name == name for each in cells)


def _faults(content: Mapping[str, Any]) -> Iterator[str]:
    for key in content:
        if key not in _KEYS:
            yield f"unknown key {key!r}{nearest(str(key), _KEYS)}: a sweep has {', '.join(_KEYS)}"
    if not isinstance(content.get("recipe"), str):
        yield "recipe: is missing: write the name of a recipe, or the path of its file"
    parallel = content.get("parallel", _PARALLEL)
    if not isinstance(parallel, int) or isinstance(parallel, bool) or parallel < 1:
        yield f"parallel: must be a whole number, 1 or more, got {parallel!r}"
    if not isinstance(content.get("set") or {}, Mapping):
        yield "set: must be a mapping of a recipe's keys to values"
    if sum(content.get(key) is not None for key in _ONE_OF) != 1:
        yield "give one of grid:, list: and sweeps:"
    elif content.get("grid") is not None:
        yield from _grid_faults(content["grid"])
    elif content.get("list") is not None:
        yield from _list_faults(content["list"])
    elif not isinstance(content["sweeps"], list) or not content["sweeps"]:
        yield "sweeps: must be a list of sweeps, whose cells this one has in their order"


def _grid_faults(grid: Any) -> Iterator[str]:
    if not isinstance(grid, Mapping) or not grid:
        yield "grid: must be a mapping: a recipe's key and its values"
        return
    for axis, values in grid.items():
        if isinstance(values, Mapping):
            wrong = [name for name, each in values.items() if not isinstance(each or {}, Mapping)]
            if wrong or not values:
                yield f"grid.{axis}: each name in it must have a mapping of keys to values"
        elif not isinstance(values, list) or not values:
            yield f"grid.{axis}: must be a list of values, or names with keys and values"


def _list_faults(cells: Any) -> Iterator[str]:
    if not isinstance(cells, list) or not cells:
        yield "list: must be a list of cells, each with name: and set:"
        return
    for number, cell in enumerate(cells):
        if not isinstance(cell, Mapping) or not isinstance(cell.get("name"), str):
            yield f"list, cell {number}: must be a mapping with its own name:"
            continue
        for key in cell:
            if key not in _LIST_KEYS:
                known = ", ".join(_LIST_KEYS)
                yield f"cell {cell['name']!r}: unknown key {key!r}: a cell has {known}"
        if not isinstance(cell.get("set") or {}, Mapping):
            yield f"cell {cell['name']!r}: set: must be a mapping of a recipe's keys to values"


def _cells(content: Mapping[str, Any], shared: tuple[str, ...]) -> Iterator[Cell]:
    if content.get("list") is not None:
        for number, cell in enumerate(content["list"]):
            own = tuple(_overrides(cell.get("set") or {}))
            yield Cell(number, cell["name"], (*shared, *own))
    if content.get("grid") is None:
        return
    axes = [[*_axis(str(axis), values)] for axis, values in content["grid"].items()]
    for number, chosen in enumerate(product(*axes)):
        name = ", ".join(each for each, _ in chosen)
        own = tuple(text for _, texts in chosen for text in texts)
        yield Cell(number, name, (*shared, *own))


def _axis(axis: str, values: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the choices of one axis of a grid, each with its name and its overrides."""
    if isinstance(values, Mapping):
        for name, keys in values.items():
            yield str(name), tuple(_overrides(keys or {}))
        return
    for value in values:
        text = _text(value)
        yield f"{axis.rpartition('.')[2]}={text}", (f"{axis}={text}",)


def _overrides(keys: Mapping[str, Any]) -> Iterator[str]:
    """Yield overrides as they are typed; a key that begins with ~ is removed."""
    for key, value in keys.items():
        yield str(key) if str(key).startswith("~") else f"{key}={_text(value)}"


def _text(value: Any) -> str:
    """Return a value as an override's text, which is read as YAML again."""
    if isinstance(value, str) and value.isprintable():
        try:
            if yamlfile.parse(value, "") == value:
                return value
        except RecipeFault:
            pass
    return json.dumps(value)
