"""A Python whose vLLM is a stand-in: tests/standins/vllm."""

import sys
from pathlib import Path

from launcher import paths


def vllm_python(folder: Path) -> Path:
    """Make it in a folder, as the Python of an environment."""
    python, folders = folder / "python", f"{paths.REPO_ROOT / 'tests/standins'}:{paths.REPO_ROOT}"
    # Whatever PYTHONPATH a job gives it, and -P: both are first here.
    program = f'#!/bin/sh\nPYTHONPATH={folders}:$PYTHONPATH exec {sys.executable} "$@"\n'
    python.write_text(program)
    python.chmod(0o755)
    return python
