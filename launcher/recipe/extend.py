"""The whole content of a recipe: it is laid over the files that it extends, and refers to itself.

${a.b} is the value of the key a.b, as in OmegaConf. In shell lines (`command`) any other ${...} is
the shell's.
"""

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher import paths, yamlfile
from launcher.errors import RecipeFault, nearest
from launcher.recipe.torchtune import replace_older
from runspec.keys.key import Fault

_REFERENCE = re.compile(r"\$\{([^${}]+)\}")


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
            raise RecipeFault(f"extends: {name} in {path} refers to itself: leave it out")
        below, inherited = read(base, (*trail, path))
        whole, files = _laid_over(whole, below), [*inherited, *files]
    return _laid_over(whole, config), [path, *files]


def _find(name: Any, path: Path) -> Path:
    """Return the file that an `extends` names: a path beside the recipe, a base or a recipe."""
    choices = [folder / f"{name}.yaml" for folder in (paths.BASES, paths.RECIPES)]
    if str(name).endswith((".yaml", ".yml")):
        choices = [path.parent / Path(name).expanduser()]
    elif ".." in str(name).split("/"):
        choices = []
    file = next((choice for choice in choices if choice.is_file()), None)
    if file is None:
        bases = [str(each.relative_to(paths.BASES))[:-5] for each in paths.BASES.rglob("*.yaml")]
        recipes = [each.stem for each in paths.RECIPES.glob("*.yaml")]
        raise RecipeFault(
            f"extends: there is no {name!r}{nearest(str(name), [*bases, *recipes])} for {path}: "
            "give a file of configs/base, a recipe, or the path of a file that ends in .yaml"
        )
    return file.resolve()


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return blocks merged key by key; a block for another component replaces the whole block."""
    merged = dict(below)
    for key, value in above.items():
        replace_older(merged, key)
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            before, now = old.get("_component_"), value.get("_component_")
            other = None not in (before, now) and before != now
            value = value if other else _laid_over(old, value)
        merged[key] = value
    return merged


# References --------------------------------------------------------------------------------------


def folders(root: Path) -> dict[str, str]:
    """Return the folders of a site, given its shared one, by the names that recipes may use."""
    named = {f"{name}_root": str(root / name) for name in ("models", "datasets")}
    return {"repo_root": str(paths.REPO_ROOT), **named}


def resolve(
    config: Mapping[str, Any], variables: Mapping[str, str]
) -> tuple[dict[str, Any], list[Fault]]:
    """Return config with its references replaced, and the faults; a wrong reference stays as it is.

    variables: names that may be used beside the recipe's own keys.
    """
    root = {**variables, **config}
    faults: list[Fault] = []

    def look_up(reference: str, key: str, trail: tuple[str, ...]) -> Any:
        if reference in trail:
            faults.append(Fault(key, f"${{{reference}}} refers to itself"))
            return f"${{{reference}}}"
        value: Any = root
        for part in reference.strip().split("."):
            if not isinstance(value, dict) or part not in value:
                if key == "command":
                    return f"${{{reference}}}"
                hint = nearest(part, value if isinstance(value, dict) else ())
                faults.append(Fault(key, f"${{{reference}}} is not defined{hint}"))
                return f"${{{reference}}}"
            value = value[part]
        return walk(value, key, (*trail, reference))

    def walk(value: Any, key: str, trail: tuple[str, ...] = ()) -> Any:
        if isinstance(value, dict):
            return {
                name: walk(inner, f"{key}.{name}".lstrip(".") if not trail else key, trail)
                for name, inner in value.items()
            }
        if isinstance(value, list):
            return [walk(inner, key, trail) for inner in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        if whole := _REFERENCE.fullmatch(value):
            return copy.deepcopy(look_up(whole.group(1), key, trail))
        return _REFERENCE.sub(lambda match: str(look_up(match.group(1), key, trail)), value)

    return dict(walk(config, "")), faults
