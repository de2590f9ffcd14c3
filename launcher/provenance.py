"""What made a run: code, packages, model, command. Written into its folder before it is queued."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher import paths, slurm, yamlfile
from launcher.cluster import Cluster
from launcher.environment import packages
from launcher.recipe import Recipe


def of(recipe: Recipe, cluster: Cluster, files: Mapping[str, str]) -> dict[str, Any]:
    """Return what is needed to make the same run again; files are those of the run directory."""
    return {
        "created": time.time(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "overrides": list(recipe.overrides),
        # Without the run's own folder: equal for equal configurations.
        "config_sha256": _sha256(yamlfile.dump(recipe.resolved(cluster.root, "run"))),
        "script_sha256": _sha256(files["job.sbatch"]),
        "kit": _git_state(paths.REPO_ROOT),
        "model": _model_revision(recipe, cluster),
        "python": sys.version.split()[0],
        "packages": [f"{name}=={version}" for name, version in packages().items()],
        "slurm": slurm.version(),
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _git_state(folder: Path) -> dict[str, Any]:
    """Return the checkout's commit and what has been changed since, as a diff."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=20,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.decode(errors="replace") if done.returncode == 0 else None

    commit, diff = git("rev-parse", "HEAD"), git("diff", "HEAD")
    untracked = git("ls-files", "--others", "--exclude-standard")
    return {
        "commit": commit.strip() if commit else None,
        "diff": diff or "",
        "untracked": (untracked or "").splitlines(),
    }


def _model_revision(recipe: Recipe, cluster: Cluster) -> dict[str, Any]:
    """Return the model folder, and the revision where a download noted it there."""
    checkpointer = recipe.resolved(cluster.root, "run").get("checkpointer") or {}
    folder = Path(str(checkpointer.get("checkpoint_dir", "")))
    note = folder / ".cache" / "huggingface" / "download" / "config.json.metadata"
    revision, record = None, paths.read_json(folder / paths.DOWNLOAD_RECORD)
    if record:
        revision = record.get("revision")
    elif folder.parent.name == "snapshots":
        revision = folder.name
    elif note.is_file():
        revision = note.read_text(encoding="utf-8", errors="replace").partition("\n")[0].strip()
    return {"folder": str(folder), "revision": revision}
