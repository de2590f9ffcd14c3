"""Web servers for one user: on this host or in a small job on a node, reached through ssh.

They listen on 127.0.0.1, and the user forwards a port. If a laptop's cookbook --host started the
command, a server on a node listens on the node's address, to which the laptop forwards a port
through the login node.
"""

import getpass
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from launcher import paths
from launcher.errors import PreflightFault, SlurmFault, UsageFault
from launcher.executors import slurm
from launcher.executors.slurm.step import attached
from launcher.recipes.recipe import Resources, time_limit_s
from launcher.site import Site
from runspec import files

# The file for what a laptop forwards a port to: launcher/remote/far.py.
LISTENING = "COOKBOOK_LISTENING"
# How long one may serve on a node, unless another time is asked for or the partition allows less.
_JOB_TIME = "04:00:00"


def free_port(wanted: int | None, ports: range) -> int:
    """Return wanted if nothing listens on it, else the first free port of a range."""
    for port in [wanted] if wanted else ports:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    if wanted:
        message = f"port {wanted} of 127.0.0.1 is in use"
        raise UsageFault(f"{message}: leave --port out, or choose another")
    message = f"no free port from {ports.start} to {ports.stop - 1} on 127.0.0.1"
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


def address() -> str:
    """Return where a server listens: on a node that a laptop forwards to, others can connect."""
    forwarded_to = LISTENING in os.environ and "SLURM_STEP_ID" in os.environ
    return socket.gethostname() if forwarded_to else "127.0.0.1"


def _host() -> str:
    name = socket.getfqdn()
    return socket.gethostname() if name.startswith("localhost") else name


def on_node(
    command: str,
    argv: Sequence[str],
    resources: Resources,
    site: Site,
    name: str | None,
    gpus: int = 0,
) -> int:
    """Run a command of the kit on a node, in a small job, until interrupted; return its status.

    It gets --jump: what ssh passes through, for the line that it prints.

    Args:
        argv: of the command, as the node gets them.
        name: that of the site's file.
    """
    end_with_signals()
    asked = {
        "time": resources.time or _time(resources.partition),
        "partition": resources.partition,
        "account": resources.account,
        "qos": resources.qos,
        "constraint": resources.constraint,
        "reservation": resources.reservation,
    }
    options = [f"--{key}={value}" for key, value in asked.items() if value]
    form = {"gres": "--gres=gpu:", "gpus-per-node": "--gpus-per-node="}.get(site.gpu_request)
    if gpus and form:
        wanted = f"{resources.gpu_type}:" if resources.gpu_type else ""
        options.append(f"{form}{wanted}{gpus}")
        if resources.cpus_per_gpu:
            options.append(f"--cpus-per-task={resources.cpus_per_gpu * gpus}")
    return attached(
        [f"--job-name=cookbook-{command}", *options], _on_node(command, argv, site, name)
    )


def beside(
    command: str, argv: Sequence[str], job: str, node: str, site: Site, name: str | None
) -> int:
    """Run a command of the kit on a node of a running job, until interrupted or the job ends."""
    end_with_signals()
    options = [f"--jobid={job}", f"--nodelist={node}", "--overlap", "--mem=0"]
    return attached(options, _on_node(command, argv, site, name))


def _on_node(command: str, argv: Sequence[str], site: Site, name: str | None) -> list[str]:
    hops = ",".join(filter(None, [site.jump_host, f"{getpass.getuser()}@{_host()}"]))
    whole = ["env", f"COOKBOOK_ROOT={site.root}", f"PYTHONPATH={paths.REPO_ROOT}"]
    if LISTENING in os.environ:
        whole.append(f"{LISTENING}={os.environ[LISTENING]}")
    whole += [str(paths.venv_root() / "bin" / "python"), "-m", "launcher", command, *argv]
    return [*whole, "--jump", hops, *(["--cluster", name] if name else [])]


def _time(partition: str | None) -> str:
    """Return the time limit of a job that was not given one: not above its partition's."""
    try:
        known = slurm.partitions(hidden=True).values()
    except SlurmFault:  # srun says what is wrong
        return _JOB_TIME
    for each in known:
        if each.name == partition or (partition is None and each.default):
            with suppress(ValueError):  # infinite
                return min(_JOB_TIME, each.time_limit, key=time_limit_s)
    return _JOB_TIME


def end_with_signals() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, and a lost connection or a kill SystemExit."""
    # A shell that starts this in the background makes it ignore Ctrl-C; the signal must end it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))


def run(argv: Sequence[str], env: Mapping[str, str], port: int, path: str = "/") -> int:
    """Run a server on `address()` until it ends or is interrupted; return its exit status.

    A laptop is told where, and with which path, once it answers.
    """
    process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL)
    try:
        while process.poll() is None and LISTENING in os.environ:
            with suppress(OSError), socket.create_connection((address(), port), timeout=1):
                listening(address(), port, path)
                break
            time.sleep(0.2)
        return process.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        process.terminate()
        process.wait()
