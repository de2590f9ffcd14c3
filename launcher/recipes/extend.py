"""`extends`: a recipe is laid over the files that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher import paths, yamlfile
from launcher.errors import RecipeFault, nearest
from runspec.keys.sft import SFT


def read(path: Path, trail: tuple[Path, ...] = ()) -> tuple[dict[str, Any], list[Path]]:
    """Return a file's keys over those of the files that it extends, and all these files.

    The last file that `extends` names comes before the others. The files are in that order: the
    first that holds a key is where its value comes from.
    """
    config = yamlfile.load(path)
    named = config.pop("extends", None) or []
    whole: dict[str, Any] = {}
    files: list[Path] = []
    for name in [named] if isinstance(named, str) else named:
        base = _find(name, path)
        if base in (*trail, path):
            raise RecipeFault(f"extends: {name} in {path} leads back to itself: leave it out")
        below, found = read(base, (*trail, path))
        whole, files = _laid_over(whole, below), [*found, *files]
    return _laid_over(whole, config), [path, *files]


def _find(name: Any, path: Path) -> Path:
    """Return the file that an `extends` names: a path beside the recipe, a base or a recipe."""
    choices = [folder / f"{name}.yaml" for folder in (paths.BASES, paths.RECIPES)]
    if str(name).endswith((".yaml", ".yml")):
        choices = [path.parent / Path(name).expanduser()]
    elif ".." in str(name).split("/"):
        choices = []
    found = next((choice for choice in choices if choice.is_file()), None)
    if found is None:
        bases = [str(each.relative_to(paths.BASES))[:-5] for each in paths.BASES.rglob("*.yaml")]
        recipes = [each.stem for each in paths.RECIPES.glob("*.yaml")]
        raise RecipeFault(
            f"extends: there is no {name!r}{nearest(str(name), [*bases, *recipes])} for {path}: "
            "name a file of configs/base, a recipe, or the path of a file that ends in .yaml"
        )
    return found.resolve()


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return blocks merged key by key; a block for another component replaces the whole block."""
    merged = dict(below)
    for key, value in above.items():
        replace_older(merged, key)
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            components = {old.get("_component_"), value.get("_component_")} - {None}
            value = value if len(components) == 2 else _laid_over(old, value)
        merged[key] = value
    return merged


def replace_older(config: dict[str, Any], key: str) -> None:
    """Remove other names of what a key says, which is about to be set."""
    known = SFT.get(key)
    for other in known.replaces if known else ():
        config.pop(other, None)
