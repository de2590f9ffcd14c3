"""Serving TensorBoard on 127.0.0.1, to be reached through an SSH tunnel."""

import getpass
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from launcher import paths
from launcher.errors import PreflightFault, UsageFault
from launcher.runs.directory import Run
from runspec import files

# TensorBoard's own default port, and the next ones if it is taken.
_PORTS = range(6006, 6106)


def free_port(wanted: int | None) -> int:
    """Return wanted if nothing listens on it, else the first free port from 6006 on."""
    for port in [wanted] if wanted else _PORTS:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    if wanted:
        words = f"port {wanted} of 127.0.0.1 is taken"
        raise UsageFault(f"{words}: leave --port out, or choose another")
    words = f"no free port from {_PORTS.start} to {_PORTS.stop - 1} on 127.0.0.1"
    raise PreflightFault(f"{words}: give one with --port")


def tunnel(port: int, jump: str | None = None) -> str:
    """Return the command that a user types on their own machine.

    Args:
        jump: the host between that machine and this one.
    """
    name = socket.getfqdn()
    host = socket.gethostname() if name.startswith("localhost") else name
    through = f"-J {jump} " if jump else ""
    return f"ssh -N {through}-L {port}:127.0.0.1:{port} {getpass.getuser()}@{host}"


def serve(chosen: list[Run], port: int, say: Callable[[str], None], jump: str | None = None) -> int:
    """Serve the runs' curves and traces until interrupted; return TensorBoard's exit status."""
    # A shell that starts this in the background makes it ignore Ctrl-C; the signal must end it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A lost connection or a kill ends this too, and TensorBoard with it.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    program = paths.venv_root() / "bin" / "tensorboard"
    if not program.is_file():
        words = f"there is no {program}: set up the virtual environment"
        raise PreflightFault(f"{words} with: bash setup.sh")
    with tempfile.TemporaryDirectory(prefix="cookbook-tensorboard-") as folder:
        for run in chosen:
            # Curves and traces only: a checkpoint folder is slow to walk and holds nothing to show.
            # The curves go by the run's own name.
            (Path(folder) / run.name).symlink_to(run.path / files.TENSORBOARD)
            (Path(folder) / f"{run.name} traces").symlink_to(run.path / files.PROFILE)
        argv = [str(program), f"--logdir={folder}", "--host=127.0.0.1", f"--port={port}"]
        argv.append("--load_fast=false")
        # The profiler's tab logs every file that it opens, and warns about float64 tensors.
        environment = {**os.environ, "TORCH_PROFILER_LOG_LEVEL": "ERROR"}
        say(f"on your own machine:  {tunnel(port, jump)}")
        say(f"then open:            http://127.0.0.1:{port}/   (Ctrl-C here ends it)")
        process = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL)
        try:
            return process.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            process.terminate()
            process.wait()
