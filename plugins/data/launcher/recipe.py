"""A data recipe: configs/data/NAME.yaml or a file of the user's own, with overrides applied."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import paths, yamlfile
from launcher.errors import RecipeFault, UsageFault
from launcher.recipe import extend, override
from launcher.recipe.model import Resources
from plugins.data import datarecipe
from runspec.keys.common import COMMON
from runspec.keys.key import faults as key_faults

DATA = paths.REPO_ROOT / "configs" / "data"
# Options whose value is a path: one that is typed counts from the shell's folder.
_PATHS = ("path", "tokenizer", "temp_dir")
_RESOURCES = {name: key for name, key in COMMON.items() if name.startswith("resources")}
# What a recipe of a training run asks for, and the preparation of data does not use.
_NO_USE = ("gpus_per_node", "gpu_type")


@dataclass(frozen=True)
class DataRecipe:
    """A data recipe whose references are not replaced yet."""

    name: str
    path: Path
    config: dict[str, Any]
    resources: Resources

    @property
    def base(self) -> Path:
        """The folder from which its relative paths count."""
        return self.path.parent

    def resolved(self, root: Path) -> dict[str, Any]:
        """Return what plugins.data.run reads: references replaced, without the launcher's keys."""
        folders = {"repo_root": str(paths.REPO_ROOT)}
        folders |= {f"{name}_root": str(root / name) for name in ("models", "datasets")}
        config, faults = extend.resolve(self.config, folders)
        if faults:
            raise RecipeFault([f"{fault.text} in {self.path}" for fault in faults])
        return {key: value for key, value in config.items() if key != "resources"}


def load(name: str, overrides: Iterable[str], options: dict[str, Any]) -> DataRecipe:
    """Return a data recipe; RecipeFault lists every fault found in it.

    overrides: key.path=value, where a number is a place in a list: steps.0.filter=...
    options: what was asked of Slurm on the command line.
    """
    path = yamlfile.find("data recipe", name, DATA)
    config = yamlfile.load(path)
    texts: list[str] = []
    for text in overrides:
        try:
            _override(config, text)
        except UsageFault as fault:
            texts += fault.faults
    texts += [f"{fault}, in {path}" for fault in datarecipe.faults(config)]
    given = config.get("resources") or {}
    asked = {**(given if isinstance(given, dict) else {}), **options}
    texts += [f"{fault.text}, in {path}" for fault in key_faults({"resources": asked}, _RESOURCES)]
    texts += [
        f"resources.{key} is not used by data preparation, in {path}: leave it out"
        for key in _NO_USE
        if asked.get(key)
    ]
    if texts:
        raise RecipeFault(list(dict.fromkeys(texts)))
    return DataRecipe(path.stem, path, config, Resources.of(asked))


def _override(config: dict[str, Any], text: str) -> None:
    parts = override.parts_of(text)
    if text.startswith(("~", "+")):
        raise UsageFault(f"the override {text!r}: write key=value or steps.0.filter=...")
    value = override.value_of(text)
    if parts[-1] in _PATHS and isinstance(value, str) and "://" not in value:
        value = str(Path.cwd() / Path(value).expanduser()) if value and "$" not in value else value
    parent: Any = config
    for depth, part in enumerate(parts):
        where = ".".join(parts[:depth])
        place: str | int = part
        if isinstance(parent, list):
            if not part.isdigit() or int(part) >= len(parent):
                raise UsageFault(
                    f"the override {text!r}: {where} has {len(parent)} items, {where}.0 to "
                    f"{where}.{len(parent) - 1}"
                )
            place = int(part)
        elif not isinstance(parent, dict):
            raise UsageFault(f"the override {text!r}: {where} is {parent!r}, which has no {part!r}")
        elif parent.get(part) is None:
            parent[part] = {}
        if depth < len(parts) - 1:
            parent = parent[place]
        else:
            parent[place] = value
