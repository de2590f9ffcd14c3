"""Web servers for one user on 127.0.0.1 of this host, reached through ssh."""

import getpass
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from launcher.errors import PreflightFault, UsageFault


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


def tunnel(port: int, node: str | None = None) -> str:
    """Return the command that a user types on their own machine.

    Args:
        node: the node whose port it is, None for this host.
    """
    user = getpass.getuser()
    through = f"-J {user}@{_host()} " if node else ""
    return f"ssh -N {through}-L {port}:127.0.0.1:{port} {user}@{node or _host()}"


def _host() -> str:
    name = socket.getfqdn()
    return socket.gethostname() if name.startswith("localhost") else name


def end_with_signals() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, and a lost connection or a kill SystemExit."""
    # A shell that starts this in the background makes it ignore Ctrl-C; the signal must end it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))


def run(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a server until it ends or is interrupted; return its exit status."""
    process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL)
    try:
        return process.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        process.terminate()
        process.wait()
