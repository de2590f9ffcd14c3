"""A sweep: one recipe and the settings in which its runs differ, as a grid or as a list."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from launcher import paths, yamlfile
from launcher.errors import RecipeFault
from runspec.keys.key import REQUIRED, Key, faults, table

_KEYS = table(
    Key("description", "text", "One line about it."),
    Key("recipe", "text", "The name of a recipe, or the path of its file.", REQUIRED),
    Key("set", "open block", "Values of the recipe's keys in every cell."),
    Key("grid", "open block", "Keys with their values: every combination is a cell."),
    Key("list", "list", "Cells."),
    Key("parallel", "positive", "Maximum number of concurrent runs."),
    Key("gpu", "text", "Kind of GPU for the prediction, as in configs/gpus.yaml."),
)
_OF_CELL = table(
    Key("name", "text", "Its own name.", REQUIRED),
    Key("set", "open block", "Values of the recipe's keys."),
)
# Each is a job of its own in Slurm's queue.
MOST_CELLS = 1000
_PARALLEL = 4


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: its name, and the overrides that make it of the recipe."""

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


def load(name: str) -> Sweep:
    """Return a sweep by its name or path; RecipeFault lists every fault of its file."""
    path = yamlfile.find("sweep", name, paths.SWEEPS)
    content = yamlfile.load(path)
    wrong = [*_faults(content)]
    cells = () if wrong else tuple(_cells(content, tuple(_overrides(content.get("set") or {}))))
    if not wrong:
        count = Counter(each.name for each in cells)
        twice = sorted(each for each in count if count[each] > 1)
        wrong += [f"two cells are named {each!r}: give each its own name" for each in twice]
        if not 0 < len(cells) <= MOST_CELLS:
            wrong.append(f"it has {len(cells)} cells: a sweep has 1 to {MOST_CELLS:,}")
    if wrong:
        raise RecipeFault([f"{fault}, in {path}" for fault in wrong])
    return Sweep(
        path.stem,
        path,
        str(content.get("description") or ""),
        _recipe(content, path),
        cells,
        int(content.get("parallel") or _PARALLEL),
        content.get("gpu"),
    )


def _recipe(content: Mapping[str, Any], path: Path) -> str:
    recipe = str(content["recipe"])
    if recipe.endswith((".yaml", ".yml")):
        # As in `extends`, a path counts from the file that names it.
        recipe = str((path.parent / Path(recipe).expanduser()).resolve())
    return recipe


def _faults(content: Mapping[str, Any]) -> Iterator[str]:
    yield from (fault.text for fault in faults(content, _KEYS))
    grid, cells = content.get("grid"), content.get("list")
    if (grid is None) == (cells is None):
        yield "give one of grid: and list:"
    for axis, values in grid.items() if isinstance(grid, Mapping) else ():
        named = isinstance(values, Mapping)
        if not (
            all(isinstance(each or {}, Mapping) for each in values.values())
            if named
            else isinstance(values, list)
        ):
            yield f"grid.{axis}: must be a list of values, or names with keys and values"
    for number, cell in enumerate(cells if isinstance(cells, list) else ()):
        if not isinstance(cell, Mapping):
            yield f"list, cell {number}: must be a mapping with name: and set:"
        else:
            yield from (f"list, cell {number}: {each.text}" for each in faults(cell, _OF_CELL))


def _cells(content: Mapping[str, Any], shared: tuple[str, ...]) -> Iterator[Cell]:
    if content.get("list") is not None:
        for cell in content["list"]:
            own = tuple(_overrides(cell.get("set") or {}))
            yield Cell(cell["name"], (*shared, *own))
    if content.get("grid") is None:
        return
    axes = [[*_axis(str(axis), values)] for axis, values in content["grid"].items()]
    for chosen in product(*axes) if axes else ():
        name = ", ".join(each for each, _ in chosen)
        own = tuple(text for _, texts in chosen for text in texts)
        yield Cell(name, (*shared, *own))


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
