"""One forwarded port: from this machine through the login node to where a server listens."""

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from launcher.errors import RemoteFault
from launcher.remote.ssh import Connection

_READY_S = 20


@contextmanager
def forwarded(connection: Connection, host: str, port: int) -> Iterator[int]:
    """Forward a port of 127.0.0.1 to host and port as the login node sees them; yield the port.

    It is the same number if that is free here. Through the master connection if there is one.
    """
    own = _free(port)
    rule = ["-L", f"127.0.0.1:{own}:{host}:{port}"]
    if connection.master:
        connection.control("forward", rule)
        try:
            yield own
        finally:
            with suppress(RemoteFault):
                connection.control("cancel", rule)
        return
    process = subprocess.Popen(connection.forwarding(rule), stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _READY_S
        while not _answers(own):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RemoteFault(f"ssh cannot forward port {own} to {host}:{port}")
            time.sleep(0.1)
        yield own
    finally:
        process.terminate()
        process.wait()


def _free(wanted: int) -> int:
    """Return a port of 127.0.0.1 on which nothing listens, the wanted one if it can be had."""
    for port in (wanted, 0):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)) as server:
            return int(server.getsockname()[1])
    raise RemoteFault("there is no free port on 127.0.0.1")


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
