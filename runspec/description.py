"""Descriptions of models: what one is of, its name, and where it is kept.

A description is the JSON of a `runspec.shape.Shape`, which `python -m trainer.describe` makes from
the model itself. It is kept by a hash of what it is of, with the packages that it was made with:
those of the catalogue in configs/descriptions, others in the user's cache.
"""

import json
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from runspec.adapters import KINDS, LORA, declared, name_of
from runspec.files import read_json, write_text
from runspec.keys.model import TRANSFORMERS
from runspec.shape import Shape

_CONFIGS = Path(__file__).parents[1] / "configs"
# Configurations of models of the hub as published, by the folder's name.
PUBLISHED = _CONFIGS / "shapes"
SHIPPED = _CONFIGS / "descriptions"
# Folders of models that recipes train from scratch.
FROM_SCRATCH = _CONFIGS / "models"
# Keys that change no base model: those of adapters and of 4 bits.
_ADAPTER = ("adapter", "quantize_base", *LORA.keys)


def config_file(folder: Path) -> Path | None:
    """Return the config.json of a model folder; the published one if it is not downloaded yet."""
    # torchtune's configs have the older names of Llama's folders.
    files = (folder / "config.json", PUBLISHED / f"{folder.name.removeprefix('Meta-')}.json")
    return next((file for file in files[: 1 + (not folder.is_dir())] if file.is_file()), None)


def family_of(model: Mapping[str, Any], folder: Path | None) -> str:
    """Return transformers' model_type of the text model; "" if unknown."""
    name = str(model.get("_component_") or TRANSFORMERS)
    file = config_file(folder) if folder and name == TRANSFORMERS else None
    content = (read_json(file) if file else None) or {}
    return str((content.get("text_config") or content).get("model_type") or "")


def base_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's `model` block without what adapters add to the model."""
    name = str(model.get("_component_") or TRANSFORMERS)
    if name == TRANSFORMERS:
        return {"_component_": name}
    kind, own = name_of(model), tuple[str, ...]()
    if kind in KINDS:
        own = KINDS[kind].keys
    elif kind is not None:
        # A kind that is not there is a fault of the recipe, which sizing and trainer name.
        with suppress(ValueError):
            own = declared(kind).keys
    given = {k: v for k, v in model.items() if k not in (*_ADAPTER, *own)}
    return {**given, "_component_": name}


class Subject:
    """What a description is of: the model that a `model` block and a folder name.

    folder: the model's. file: its config.json; None for a component, or if there is none.

    Raises:
        OSError, ValueError: config.json cannot be read.
    """

    def __init__(self, model: Mapping[str, Any], folder: Path | None) -> None:
        self.model = base_of(model)
        self.component = self.model["_component_"]
        self.folder, from_folder = folder, self.component == TRANSFORMERS
        self.file = config_file(folder) if folder and from_folder else None
        self.of: dict[str, Any] = {"model": self.model}
        self.title = self.component.rpartition(".")[2]
        if self.file is not None:
            self.of = {"config": read_json(self.file)}
            self.title = self.file.parent.name if self.file.stem == "config" else self.file.stem
        # What the model depends on.
        self.package = "transformers" if from_folder else ""

    @property
    def file_name(self) -> str:
        """The name of its description's file."""
        text = json.dumps(self.of, sort_keys=True)
        # A stronger hash would take longer to import than to compute.
        return f"{self.title}-{zlib.crc32(text.encode()):08x}.json"

    def find(
        self, place: Path, fits: Callable[[str, str], bool] = lambda _, __: True
    ) -> Shape | None:
        """Return its shape as kept in a folder; None without one.

        fits: (package that it was made with, its version) -> whether that is installed.
        """
        key = self.file_name.rpartition("-")[2]
        for file in sorted(place.glob(f"*-{key}")):
            content = read_json(file) or {}
            if all(fits(*each) for each in content.get("packages", {}).items()):
                with suppress(TypeError):  # another version of the kit has kept it
                    return Shape.of(content["shape"])
        return None

    def keep(self, place: Path, shape: Mapping[str, Any], packages: Mapping[str, str]) -> None:
        """Write its description into a folder."""
        made_with = {name: packages[name] for name in (self.package,) if name in packages}
        head = {"of": self.model if self.file is None else self.title, "packages": made_with}
        # Each block, and anything else, on a line.
        kinds = ",\n   ".join(json.dumps(kind) for kind in shape["kinds"])
        rest = {key: value for key, value in shape.items() if key != "kinds"}
        lines = ",\n  ".join(f"{json.dumps(key)}: {json.dumps(v)}" for key, v in rest.items())
        top = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
        text = f'{{\n{top} "shape": {{\n  {lines},\n  "kinds": [\n   {kinds}\n  ]\n }}\n}}\n'
        place.mkdir(parents=True, exist_ok=True)
        write_text(place / self.file_name, text)
