"""A copy of the user's own script tree, taken at submission: what is queued is what will run."""

import os
import shutil
import subprocess
from pathlib import Path

from launcher.errors import PreflightFault

# A snapshot is code; data and checkpoints in it would fill the runs folder submit by submit.
LIMIT_BYTES = 100 * 2**20
_IGNORED = {"__pycache__", "node_modules", "runs", "wandb"}


def files(folder: Path) -> list[Path]:
    """Return the files to copy, relative to folder, sorted.

    In a git checkout: the files that git tracks or does not ignore. Elsewhere: all but hidden
    folders, caches and virtual environments.
    """
    listed = _git_files(folder)
    if listed is None:
        listed = _walked(folder)
    return sorted(path for path in listed if (folder / path).is_file())


def git(folder: Path, *arguments: str) -> bytes | None:
    """Return what a git command prints about a folder; None if it is no checkout."""
    argv = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _git_files(folder: Path) -> list[Path] | None:
    listed = git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed is None:
        return None
    return [Path(os.fsdecode(name)) for name in listed.split(b"\0") if name]


def _walked(folder: Path) -> list[Path]:
    paths = []
    for current, folders, names in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in _IGNORED
            and not (Path(current) / name / "pyvenv.cfg").exists()
        ]
        paths += [(Path(current) / name).relative_to(folder) for name in names]
    return paths


def fault(folder: Path) -> str | None:
    """Say why a folder cannot be copied, None if it can."""
    sizes = {path: (folder / path).stat().st_size for path in files(folder)}
    total = sum(sizes.values())
    if total <= LIMIT_BYTES:
        return None
    largest = max(sizes, key=lambda path: sizes[path])
    return (
        f"the code in {folder} has {total >> 20} MiB, but a snapshot may have at most "
        f"{LIMIT_BYTES >> 20} MiB; the largest file is {largest} ({sizes[largest] >> 20} MiB): "
        "move data out of the folder, add it to .gitignore, or set code_root= to a smaller folder"
    )


def copy(folder: Path, target: Path) -> None:
    """Copy a folder's files, or one file, to target, which must not exist.

    A link that leads out of the folder stays a link: the run may be readable for others, who may
    not read what it leads to.
    """
    try:
        if folder.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(folder, target)
            return
        target.mkdir(parents=True)
        for path in files(folder):
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            source = (folder / path).resolve()
            if source.is_relative_to(folder.resolve()):
                shutil.copy2(source, target / path)
            else:
                (target / path).symlink_to(source)
    except OSError as error:
        raise PreflightFault(
            f"cannot copy {error.filename or folder} into the run: {error.strerror}: make it "
            "readable, or add it to .gitignore"
        ) from error
