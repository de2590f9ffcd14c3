"""Serving TensorBoard on 127.0.0.1, to be reached through an SSH tunnel."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from launcher import paths
from launcher.errors import PreflightFault
from launcher.look import servers
from launcher.run.directory import Run
from runspec import files

# TensorBoard's own default port, and the next ones if it is taken.
PORTS = range(6006, 6106)


def serve(chosen: list[Run], port: int, say: Callable[[str], None]) -> int:
    """Serve the runs' curves and traces until interrupted; return TensorBoard's exit status."""
    servers.end_with_signals()
    # COOKBOOK_VENV may be an engine's environment, which need not have it.
    places = (paths.venv_root() / "bin", Path(sys.executable).parent)
    program = next((p for place in places if (p := place / "tensorboard").is_file()), None)
    if program is None:
        message = f"there is no {places[0] / 'tensorboard'}: set up the virtual environment"
        raise PreflightFault(f"{message} with: bash setup.sh")
    with tempfile.TemporaryDirectory(prefix="cookbook-tensorboard-") as folder:
        for run in chosen:
            # Curves and traces only: a checkpoint folder is slow to walk and holds nothing to show.
            (Path(folder) / run.name).symlink_to(run.path / files.TENSORBOARD)
            (Path(folder) / f"{run.name} traces").symlink_to(run.path / files.PROFILE)
        argv = [str(program), f"--logdir={folder}", "--host=127.0.0.1", f"--port={port}"]
        # The profiler's tab logs every file that it opens, and warns about float64 tensors.
        environment = {**os.environ, "TORCH_PROFILER_LOG_LEVEL": "ERROR"}
        say(f"on your own machine:  {servers.tunnel(port)}")
        say(f"then open:            http://127.0.0.1:{port}/   (Ctrl-C here ends it)")
        return servers.run([*argv, "--load_fast=false"], environment)
