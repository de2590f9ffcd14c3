"""Processes forked from one that has imported what they need: python -m tests.forked NAME PRELOAD

A command or a rank of a test spends more time on its imports than on its work. Here the module
PRELOAD imports them once, and each request is a fork: nothing of one start is left in the next. All
workers of a test session share the process. It has one thread when it forks, as OMP_NUM_THREADS=1
starts no others.
"""

import gc
import importlib
import json
import math
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
# What is imported for each kind of process.
TRAINER, LAUNCHER = "tests.trainer.preloaded", "tests.launcher.preloaded"
# A request is one message, and it holds the environment.
LONGEST = 2**17
STARTED_S = 60


class Fork:
    """A forked process, to be used as a subprocess.Popen is; it is killed with what started it."""

    def __init__(
        self,
        preload: str,
        module: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        out: IO[str] | int,
        err: IO[str] | int,
    ) -> None:
        """Start main(arguments) of a module, with no standard input."""
        request = json.dumps([module, list(arguments), dict(env), os.getcwd()]).encode()
        files = [each if isinstance(each, int) else each.fileno() for each in (out, err)]
        _, server = lease(preload)
        self._connection = _connect(preload)
        socket.send_fds(self._connection, [request], files)
        try:
            self.pid = int(self._connection.recv(16))
        except (ConnectionResetError, ValueError):
            said = server.stderr.read().decode() if server and server.stderr else ""
            raise RuntimeError(f"the process that forks has ended\n{said}") from None
        self.returncode: int | None = None

    def fileno(self) -> int:
        """Can be read when the process has ended."""
        return self._connection.fileno()

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        return self.wait(0)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end; None after `timeout` seconds."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                said = self._connection.recv(16)
            except (TimeoutError, BlockingIOError):
                return None
            self.returncode = int(said or -signal.SIGKILL)
            self._connection.close()
        return self.returncode

    def terminate(self) -> None:
        """Ask it to end."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def run(
    preload: str,
    module: str,
    arguments: Sequence[str],
    env: Mapping[str, str],
    timeout: float = math.inf,
) -> subprocess.CompletedProcess[str]:
    """Run main(arguments) of a module to its end; raises subprocess.TimeoutExpired.

    As with subprocess.run, who keeps its output open keeps the caller waiting.
    """
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    process = Fork(preload, module, arguments, env, out_end, err_end)
    os.close(out_end)
    os.close(err_end)
    texts, deadline = {out: b"", err: b""}, time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        for pipe in texts:
            selector.register(pipe, selectors.EVENT_READ)
        try:
            while selector.get_map():
                ready = selector.select(_left(deadline))
                if not ready:
                    raise subprocess.TimeoutExpired([module, *arguments], timeout)
                for key, _ in ready:
                    text = os.read(key.fd, 2**16)
                    texts[key.fd] += text
                    if not text:
                        selector.unregister(key.fd)
            status = process.wait(_left(deadline))
            if status is None:
                raise subprocess.TimeoutExpired([module, *arguments], timeout)
        finally:
            process.kill()
            os.close(out)
            os.close(err)
    said = (text.decode() for text in texts.values())
    return subprocess.CompletedProcess([module, *arguments], status, *said)


def _left(deadline: float) -> float | None:
    """Seconds until then, None without a limit."""
    return None if deadline == math.inf else max(0, deadline - time.monotonic())


# The process that forks ---------------------------------------------------------------------------


def session() -> str:
    """What names the processes that fork, the same for all workers of a test session."""
    return os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())


def _address(preload: str) -> str:
    """The abstract name of its socket."""
    return f"\0cookbook-{preload}-{session()}"


def _connect(preload: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(_address(preload))
    except OSError:
        connection.close()
        raise
    return connection


@cache
def lease(preload: str) -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
    """A connection for as long as this process lives, without which the server ends; the server
    if it was started here.
    """
    deadline = time.monotonic() + STARTED_S
    process: subprocess.Popen[bytes] | None = None
    while True:
        try:
            return _connect(preload), process
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
        # Of several that start at once one gets the name; the others end.
        if process is None or process.poll() is not None:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked", _address(preload)[1:], preload],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                # Its streams are pipes, as those of most of its forks are.
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        time.sleep(0.05)


class _Server:
    """Forks at each request, until all that have a lease have ended."""

    def __init__(self, listener: socket.socket) -> None:
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)
        self.listener = listener
        self.leases: set[socket.socket] = set()
        # The process behind each connection that has made a request.
        self.forks: dict[socket.socket, int] = {}

    def asked(self) -> bytes | None:
        """Serve; returns a request in the fork that is to be it, and None in the end."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    self.accept()
                elif key.data is not None:
                    self.selector.unregister(key.fileobj)
                    os.close(key.fd)
                    self.ended(key.data)
                elif request := self.read(key.fileobj):
                    return request
                elif not self.leases:
                    return None

    def accept(self) -> None:
        """Take a connection, which is a lease until it makes a request."""
        connection, _ = self.listener.accept()
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", peer)[1] != os.getuid():
            connection.close()
            return
        self.selector.register(connection, selectors.EVENT_READ)
        self.leases.add(connection)

    def read(self, connection: Any) -> bytes:
        """Read from a connection: in the fork that this makes the request, b"" elsewhere."""
        try:
            request, files, *_ = socket.recv_fds(connection, LONGEST, 2)
        except ConnectionResetError:
            request = b""
        if not request:
            self.selector.unregister(connection)
            if connection in self.forks:
                os.kill(self.forks[connection], signal.SIGKILL)
            else:
                self.leases.remove(connection)
                connection.close()
            return b""
        self.leases.remove(connection)
        pid = os.fork()
        if not pid:
            self.close()
            for number, file in enumerate(files, 1):
                os.dup2(file, number)
                os.close(file)
            return request
        for file in files:
            os.close(file)
        self.forks[connection] = pid
        self.selector.register(os.pidfd_open(pid), selectors.EVENT_READ, connection)
        connection.send(str(pid).encode())
        return b""

    def close(self) -> None:
        """Close all files by their objects: a number that is closed twice may be another file's."""
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
            else:
                key.fileobj.close()
        for connection in self.forks:
            connection.close()
        self.selector.close()

    def ended(self, connection: socket.socket) -> None:
        """Tell the exit status of a fork that has ended."""
        status = os.waitstatus_to_exitcode(os.waitpid(self.forks.pop(connection), 0)[1])
        with suppress(OSError):
            connection.send(str(status).encode())
        with suppress(KeyError):
            self.selector.unregister(connection)
        connection.close()


def main(arguments: list[str]) -> None:
    """Be the server, and then, in each fork, the process that was asked for."""
    name, preload = arguments
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(f"\0{name}")
    except OSError:
        return
    listener.listen()
    importlib.import_module(preload)
    # Objects that no fork's garbage collection visits stay in memory that all forks share.
    gc.collect()
    gc.freeze()
    request = _Server(listener).asked()
    if request is None:
        return
    module, arguments, variables, folder = json.loads(request)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.argv[1:] = arguments
    if "TORCH_LOGS" in variables:
        # torch reads it when it is imported, which was before the fork.
        from torch._logging import _internal

        _internal._init_logs()
    status = importlib.import_module(module).main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    if preload == TRAINER:
        # As the trainer's own modules end: no clean-up of a broken process group.
        os._exit(status or 0)


if __name__ == "__main__":
    main(sys.argv[1:])
