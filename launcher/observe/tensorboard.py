"""Serving TensorBoard on 127.0.0.1, to be reached through an SSH tunnel."""

import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from launcher import paths
from launcher.errors import PreflightFault
from launcher.observe import events, servers
from launcher.runs.directory import Run
from runspec import files

# TensorBoard's own default port, and the next ones if it is taken.
PORTS = range(6006, 6106)
_OPTIONS = "COOKBOOK_TENSORBOARD"
# As the tensorboard program, with its options from a variable.
_STARTS = f"""
import os, sys
from tensorboard import program
server = program.TensorBoard()
server.configure(("tensorboard", *os.environ.pop("{_OPTIONS}").split("\\n")))
sys.exit(server.main())
"""


def serve(chosen: list[Run], port: int, say: Callable[[str], None], jump: str | None = None) -> int:
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
            # The curves go by the run's own name; an engine's own event files are beside them.
            name = f"{run.name} own" if events.is_fed(run) else run.name
            (Path(folder) / name).symlink_to(run.path / files.TENSORBOARD)
            (Path(folder) / f"{run.name} traces").symlink_to(run.path / files.PROFILE)
        # Others on the cluster can connect to a node's address: they do not know the path.
        host = servers.address()
        path = "/" if host == "127.0.0.1" else f"/{secrets.token_hex(16)}/"
        options = [f"--logdir={folder}", f"--host={host}", f"--port={port}", "--load_fast=false"]
        options += [f"--path_prefix={path.rstrip('/')}"] if path != "/" else []
        # Everybody on a host sees the arguments of a process, only its user the variables.
        argv = [str(program.parent / "python"), "-P", "-c", _STARTS]
        # The profiler's tab logs every file that it opens, and warns about float64 tensors.
        environment = {
            **os.environ,
            "TORCH_PROFILER_LOG_LEVEL": "ERROR",
            _OPTIONS: "\n".join(options),
        }
        if servers.LISTENING not in os.environ:
            say(f"on your own machine:  {servers.tunnel(port, jump)}")
            say(f"then open:            http://127.0.0.1:{port}/   (Ctrl-C here ends it)")
        done, fed = threading.Event(), [run for run in chosen if events.is_fed(run)]
        feeder = threading.Thread(target=events.feed, args=[fed, Path(folder), done], daemon=True)
        feeder.start()
        try:
            return servers.run(argv, environment, port, path)
        finally:
            done.set()
            feeder.join()
