"""Serving TensorBoard on 127.0.0.1, to be reached through an SSH tunnel."""

import getpass
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from launcher import paths
from launcher.errors import PreflightFault, UsageFault
from launcher.executors.slurm.step import attached
from launcher.observe import events
from launcher.recipes.recipe import Resources
from launcher.runs.directory import Run
from launcher.site import Site
from runspec import files

# TensorBoard's own default port, and the next ones if it is taken.
_PORTS = range(6006, 6106)
# The file for what a laptop forwards a port to: launcher/remote/runner.py.
LISTENING = "COOKBOOK_LISTENING"
# How long it may serve on a node, unless another time is asked for.
_JOB_TIME = "04:00:00"


def free_port(wanted: int | None) -> int:
    """Return wanted if nothing listens on it, else the first free port from 6006 on."""
    for port in [wanted] if wanted else _PORTS:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    if wanted:
        message = f"port {wanted} of 127.0.0.1 is in use"
        raise UsageFault(f"{message}: leave --port out, or choose another")
    message = f"no free port from {_PORTS.start} to {_PORTS.stop - 1} on 127.0.0.1"
    raise PreflightFault(f"{message}: give one with --port")


def tunnel(port: int, jump: str | None = None, node: str | None = None) -> str:
    """Return the command that a user types on their own machine.

    Args:
        jump: the host between that machine and this one.
        node: the node whose port it is, None for this host.
    """
    user = getpass.getuser()
    hops = [jump, f"{user}@{_host()}" if node else None]
    through = ",".join(filter(None, hops))
    through = f"-J {through} " if through else ""
    return f"ssh -N {through}-L {port}:127.0.0.1:{port} {user}@{node or _host()}"


def listening(host: str, port: int, path: str = "/") -> bool:
    """Tell a laptop's cookbook --host where a server listens, for it to forward a port there.

    Returns whether this command was called by one: then nobody has to type an ssh command.
    """
    file = os.environ.get(LISTENING)
    if file:
        files.write_text(Path(file), f"{host} {port} {path}")
    return bool(file)


def _host() -> str:
    name = socket.getfqdn()
    return socket.gethostname() if name.startswith("localhost") else name


def serve_on_node(
    wanted: Sequence[str], resources: Resources, cluster: Site, name: str | None
) -> int:
    """Serve on a node, in a small job, until interrupted; return the exit status.

    The node runs the same command, which prints the line for the tunnel through this host.

    Args:
        wanted: runs and sweeps as they were typed.
        name: that of the site's file.
    """
    # A shell that starts this in the background makes it ignore Ctrl-C; the signal must end it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    asked = {
        "time": resources.time or _JOB_TIME,
        "partition": resources.partition,
        "account": resources.account,
        "qos": resources.qos,
        "constraint": resources.constraint,
        "reservation": resources.reservation,
    }
    options = [f"--{key}={value}" for key, value in asked.items() if value]
    here = f"{getpass.getuser()}@{_host()}"
    hops = ",".join(filter(None, [cluster.jump_host, here]))
    argv = ["env", f"COOKBOOK_ROOT={cluster.root}", f"PYTHONPATH={paths.REPO_ROOT}"]
    if LISTENING in os.environ:
        argv.append(f"{LISTENING}={os.environ[LISTENING]}")
    argv += [str(paths.venv_root() / "bin" / "python"), "-m", "launcher", "tensorboard", *wanted]
    argv += ["--jump", hops, *(["--cluster", name] if name else [])]
    return attached(["--job-name=cookbook-tensorboard", *options], argv)


def serve(chosen: list[Run], port: int, say: Callable[[str], None], jump: str | None = None) -> int:
    """Serve the runs' curves and traces until interrupted; return TensorBoard's exit status."""
    # A shell that starts this in the background makes it ignore Ctrl-C; the signal must end it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A lost connection or a kill ends this too, and TensorBoard with it.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
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
        host, path = "127.0.0.1", "/"
        if LISTENING in os.environ and "SLURM_STEP_ID" in os.environ:
            # A laptop reaches a node through the login node, so that others on the cluster can
            # connect too: they do not know the path.
            host, path = socket.gethostname(), f"/{secrets.token_hex(16)}/"
        argv = [str(program), f"--logdir={folder}", f"--host={host}", f"--port={port}"]
        argv += [f"--path_prefix={path.rstrip('/')}"] if path != "/" else []
        argv.append("--load_fast=false")
        # The profiler's tab logs every file that it opens, and warns about float64 tensors.
        environment = {**os.environ, "TORCH_PROFILER_LOG_LEVEL": "ERROR"}
        if LISTENING not in os.environ:
            say(f"on your own machine:  {tunnel(port, jump)}")
            say(f"then open:            http://127.0.0.1:{port}/   (Ctrl-C here ends it)")
        process = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL)
        done, fed = threading.Event(), [run for run in chosen if events.is_fed(run)]
        feeder = threading.Thread(target=events.feed, args=[fed, Path(folder), done], daemon=True)
        feeder.start()
        try:
            while process.poll() is None and LISTENING in os.environ:
                with suppress(OSError), socket.create_connection((host, port), timeout=1):
                    listening(host, port, path)
                    break
                time.sleep(0.2)
            return process.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            done.set()
            process.terminate()
            process.wait()
            feeder.join()
