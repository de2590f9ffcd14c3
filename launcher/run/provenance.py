"""What made a run: code, packages, model, command; written before the run is queued."""

import hashlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher import paths, slurm, yamlfile
from launcher.recipe.model import Recipe
from launcher.run import code
from launcher.site import Site
from launcher.venv import packages
from runspec import files, prepared

# Reading a larger file would hold up submit.
_HASHED_BYTES = 256 * 2**20


def of(
    recipe: Recipe, cluster: Site, contents: Mapping[str, str], kit: code.Code
) -> dict[str, Any]:
    """Return what is needed to make the same run again; contents: its files by name."""
    return {
        **of_now(kit),
        "overrides": list(recipe.overrides),
        # Without the run's own directory, so that equal configurations have equal hashes.
        "config_sha256": text_sha256(yamlfile.dump(recipe.resolved(cluster.root, "run"))),
        "script_sha256": text_sha256(contents[files.JOB_SCRIPT]),
        "model": _model_revision(recipe, cluster),
        "data": data_files(recipe.resolved(cluster.root, "run")),
        "python": sys.version.split()[0],
        "slurm": slurm.version(),
    }


def of_now(kit: code.Code) -> dict[str, Any]:
    """Return what every run's provenance holds: the command, the kit's code and the packages."""
    return {
        "created": time.time(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "kit": {**code.git_state(), "sha256": kit.sha256},
        "packages": [f"{name}=={version}" for name, version in packages().items()],
    }


def text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def data_files(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the local data files of a recipe with their size, and the hash of those not too large.

    A folder, and a dataset of the hub, has no entry: its name stands in the recipe.
    """
    records: dict[str, dict[str, Any]] = {}
    for block in ("dataset", "dataset_val"):
        given = config.get(block)
        named = given.get("data_files") if isinstance(given, Mapping) else None
        for name in named if isinstance(named, list) else [named]:
            path = Path(str(name))
            if not isinstance(name, str) or not path.is_file():
                continue
            size = path.stat().st_size
            sha256 = files.sha256(path) if size <= _HASHED_BYTES else None
            records[name] = {"file": name, "bytes": size, "sha256": sha256}
        if isinstance(given, Mapping) and given.get("_component_") == prepared.COMPONENT:
            records[block] = _prepared(Path(str(given.get("data_dir"))))
    return list(records.values())


def _prepared(folder: Path) -> dict[str, Any]:
    """Return what identifies a split of a prepared set: its version, and the hash of its rows."""
    known = {"file": str(folder), "bytes": None, "sha256": None}
    if (found := prepared.version_of(folder)) is None:
        return known
    version, card = found
    split = card["splits"].get(folder.name, {})
    listed = split.get("files", [])
    name = f"{folder.parent.parent.parent.name}@{version.name}"
    size = sum(each["bytes"] for each in listed)
    return {**known, "bytes": size, "sha256": split.get("content"), "prepared": name}


def _model_revision(recipe: Recipe, cluster: Site) -> dict[str, Any]:
    """Return the model folder, and the revision if a download recorded it there."""
    checkpointer = recipe.resolved(cluster.root, "run").get("checkpointer") or {}
    folder = Path(str(checkpointer.get("checkpoint_dir", "")))
    note = folder / ".cache" / "huggingface" / "download" / "config.json.metadata"
    revision, record = None, files.read_object(folder / paths.DOWNLOAD_RECORD)
    if record:
        revision = record.get("revision")
    elif folder.parent.name == "snapshots":
        revision = folder.name
    elif note.is_file():
        revision = note.read_text(encoding="utf-8", errors="replace").partition("\n")[0].strip()
    return {"folder": str(folder), "revision": revision}
