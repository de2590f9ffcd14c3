"""Where the kit's files lie, and how a file is written so that no reader sees half of it."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from launcher.errors import RunFault, UsageFault

REPO_ROOT = Path(__file__).resolve().parent.parent
RECIPES = REPO_ROOT / "configs" / "recipes"
BASES = REPO_ROOT / "configs" / "base"
CLUSTERS = REPO_ROOT / "configs" / "clusters"
GPUS = REPO_ROOT / "configs" / "gpus.yaml"
TEMPLATES = REPO_ROOT / "templates"
# What cookbook download notes in a model's folder.
DOWNLOAD_RECORD = "cookbook-download.json"

# An #SBATCH line has no escape that every Slurm version reads alike, % is a pattern in
# --output, and # starts a comment: a path that holds one of these never reaches a script.
_PATH_NOT_FOR_SBATCH = re.compile(r"[\s\"'`$\\%#;&|<>*?!(){}\[\]]|[^\x20-\x7e]")


def shared_root(configured: str | None = None) -> Path:
    """Return the folder that login and compute nodes share: runs/ and models/ lie in it.

    COOKBOOK_ROOT comes first, then the cluster file's shared_root, then the checkout itself.
    """
    chosen = os.environ.get("COOKBOOK_ROOT") or configured
    root = Path(chosen).expanduser().absolute() if chosen else REPO_ROOT
    bad = _PATH_NOT_FOR_SBATCH.search(str(root))
    if bad:
        raise UsageFault(
            f"the path {str(root)!r} holds {bad.group()!r}, which a job script cannot carry "
            "safely: set COOKBOOK_ROOT to a folder named in letters, digits, '.', '_' and '-'"
        )
    return root


def venv_root() -> Path:
    """Return the environment that jobs use: COOKBOOK_VENV, or the one this command runs in."""
    chosen = os.environ.get("COOKBOOK_VENV")
    return Path(chosen).expanduser().absolute() if chosen else Path(sys.prefix)


def write_atomic(path: Path, text: str, mode: int = 0o600) -> None:
    """Write text to path so that a reader, or a crash, sees the old file or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, None where none is; RunFault where it is broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunFault(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise RunFault(f"cannot read {path}: it holds no JSON object")
    return value


def read_json_lines(path: Path) -> list[Any]:
    """Return a value a line, [] where there is no file; a torn last line is left out."""
    values = []
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    for line in text.splitlines():
        try:
            values.append(json.loads(line))
        except ValueError:
            continue
    return values


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object as one readable JSON file, atomically."""
    write_atomic(path, json.dumps(value, indent=1, sort_keys=False) + "\n")
