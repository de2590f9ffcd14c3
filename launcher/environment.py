"""The environment that jobs use: its packages, and questions to the trainer in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import paths, yamlfile

if TYPE_CHECKING:
    from subprocess import CompletedProcess


def python() -> Path:
    """Return the environment's interpreter, there or not."""
    return paths.venv_root() / "bin" / "python"


def site_packages() -> Path | None:
    """Return the folder of the environment's packages, None where there is no environment."""
    return next(paths.venv_root().glob("lib/python*/site-packages"), None)


def packages() -> dict[str, str]:
    """Return the environment's packages and their versions, read from their folders' names."""
    folder = site_packages()
    found = folder.glob("*.dist-info") if folder else ()
    pairs = (path.stem.split("-")[:2] for path in sorted(found))
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def ask_trainer(
    module: str, config: dict[str, Any], *arguments: str, timeout_s: float | None = None
) -> CompletedProcess[str]:
    """Run one of the trainer's modules in the environment on a train.yaml that holds config.

    OSError where there is no environment; subprocess.TimeoutExpired after timeout_s.
    """
    # Not at the top: the estimate's closed form must not wait for them.
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train.yaml"
        file.write_text(yamlfile.dump(config), encoding="utf-8")
        return subprocess.run(
            [str(python()), "-m", f"trainer.{module}", str(file), *arguments],
            cwd=paths.REPO_ROOT,
            env={**os.environ, "PYTHONPATH": str(paths.REPO_ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
