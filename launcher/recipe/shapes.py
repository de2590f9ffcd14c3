"""The shape of a recipe's model, from its description: a shipped one, a kept one, or a new one."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher import paths, venv
from launcher.errors import RecipeFault
from runspec.description import SHIPPED, Subject
from runspec.keys.model import TRANSFORMERS
from runspec.shape import Shape

# What the trainer said in this process, by the name of the description's file.
_told: dict[str, Shape] = {}


def shape_of(model: Mapping[str, Any], folder: Path | None) -> Shape:
    """Return the shape of the model that a `model` block and a model folder name.

    The trainer is asked once for what is not in configs/descriptions, and its answer is kept in the
    user's cache. RecipeFault if the trainer refuses the model, or cannot be asked.
    """
    top = str(model.get("_component_") or "").partition(".")[0]
    own = venv.own_packages().get(top)
    try:
        subject = Subject(model, folder, _digest(own) if own else "")
    except (OSError, ValueError) as error:
        raise RecipeFault(f"{folder}/config.json: {error}") from error
    if subject.component == TRANSFORMERS and subject.file is None:
        raise RecipeFault(
            f"checkpointer.checkpoint_dir: {folder} has no config.json, which says what the model "
            "is: download the model with: cookbook download"
        )
    if shape := _told.get(subject.file_name):
        return shape
    site, kept = venv.site_packages(), paths.user_cache() / "models"

    def fits(name: str, version: str) -> bool:
        return site is None or (site / f"{name}-{version}.dist-info").is_dir()

    for place in (SHIPPED, kept):
        if shape := subject.find(place, fits):
            return shape
    content = _ask(subject)
    if subject.package or own:
        # Of any other package nobody knows whether it changes.
        subject.keep(kept, content, venv.packages())
    return _told.setdefault(subject.file_name, Shape.of(content))


def _ask(subject: Subject) -> dict[str, Any]:
    config = {"model": subject.model, "checkpointer": {"checkpoint_dir": str(subject.folder)}}
    try:
        done = venv.ask_trainer("trainer.describe", [config])
    except OSError as error:
        raise RecipeFault(
            f"no description of {subject.title} is shipped or kept, and the trainer cannot be "
            f"asked for one ({error}): set up the environment with: bash setup.sh"
        ) from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["no message"]
        start = f"error: {subject.title}: "
        faults = [line.removeprefix(start) for line in said if line.startswith(start)]
        raise RecipeFault(faults or said[-1:])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _digest(package: Path) -> str:
    """A hash of the source of a user's package, which may change between two runs."""
    files = sorted(package.rglob("*.py")) if package.is_dir() else [package]
    return f"{zlib.crc32(b''.join(file.read_bytes() for file in files)):08x}"
