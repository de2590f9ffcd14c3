"""Processes forked from one that has imported what they need: python -m tests.forked PRELOAD PID

A command or a rank of a test spends more time on its imports than on its work. Here the module
PRELOAD imports them once, and each request is a fork: nothing of one start is left in the next. All
workers of the test session, the process PID, share the process, which ends with the session. It has
one thread when it forks, as OMP_NUM_THREADS=1 starts no others.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
# What is imported for each kind of process.
TRAINER, LAUNCHER = "tests.trainer.preloaded", "tests.launcher.preloaded"
# A request is one message, and it holds the environment.
LONGEST = 2**17
STARTED_S = 60
# The test session: this process, or the one that has started this worker of it.
SESSION = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()


class Fork:
    """A forked process, to be used as a subprocess.Popen is; it is killed with what started it."""

    def __init__(
        self,
        preload: str,
        module: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        out: IO[str] | IO[bytes] | int,
        err: IO[str] | IO[bytes] | int,
    ) -> None:
        """Start main(arguments) of a module, with no standard input."""
        request = json.dumps([module, list(arguments), dict(env), os.getcwd()]).encode()
        files = [each if isinstance(each, int) else each.fileno() for each in (out, err)]
        self._connection = connect(preload)
        socket.send_fds(self._connection, [request], files)
        try:
            self.pid = int(self._connection.recv(16))
        except (ConnectionResetError, ValueError):
            why = f"see: python -c 'import {preload}'"
            raise RuntimeError(f"the process that forks has ended: {why}") from None
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
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run main(arguments) of a module to its end; raises subprocess.TimeoutExpired."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = Fork(preload, module, arguments, env, out, err)
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
        if status is None:
            raise subprocess.TimeoutExpired([module, *arguments], timeout or 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess([module, *arguments], status, *texts)


def connect(preload: str) -> socket.socket:
    """A connection to the process that forks, which is started if nobody has."""
    deadline = time.monotonic() + STARTED_S
    process: subprocess.Popen[bytes] | None = None
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(_address(preload, SESSION))
        except ConnectionRefusedError:
            connection.close()
            if time.monotonic() > deadline:
                raise
        else:
            return connection
        # Of several that start at once one gets the name; the others end.
        if process is None or process.poll() is not None:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked", preload, str(SESSION)],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        time.sleep(0.05)


# The process that forks ---------------------------------------------------------------------------


def _address(preload: str, session: int) -> str:
    """The abstract name of its socket."""
    return f"\0cookbook-{preload}-{session}"


def _accepted(preload: str, session: int) -> socket.socket | None:
    """Fork at each connection; returns it in the fork, and None at the end of the session."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(_address(preload, session))
        alive = os.pidfd_open(session)
    except OSError:
        return None
    listener.listen()
    importlib.import_module(preload)
    # Objects that no fork's garbage collection visits stay in memory that all forks share.
    gc.collect()
    gc.freeze()
    # Nobody waits for these forks.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while alive not in select.select([listener.fileno(), alive], [], [])[0]:
        connection, _ = listener.accept()
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", peer)[1] == os.getuid() and not os.fork():
            listener.close()
            os.close(alive)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return connection
        connection.close()
    return None


def _forked(connection: socket.socket) -> bytes:
    """Fork what is asked for, and return the request there; here tell its exit status, and end."""
    request, files, *_ = socket.recv_fds(connection, LONGEST, 2)
    pid = os.fork() if request else None
    if pid is None:
        os._exit(0)
    if not pid:
        connection.close()
        for number, file in enumerate(files, 1):
            os.dup2(file, number)
            os.close(file)
        return request
    for file in files:
        os.close(file)
    with suppress(OSError):
        connection.send(str(pid).encode())
        # Who has asked for it has ended if the connection can be read.
        asks = connection.fileno()
        if asks in select.select([asks, os.pidfd_open(pid)], [], [])[0]:
            os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):
        connection.send(str(status).encode())
    os._exit(0)


def main(arguments: list[str]) -> None:
    """Be the process that forks, and then, in each fork, the one that was asked for."""
    preload, session = arguments
    connection = _accepted(preload, int(session))
    if connection is None:
        return
    module, arguments, variables, folder = json.loads(_forked(connection))
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
    if preload != LAUNCHER:
        # As the trainer's own modules end: no clean-up of a broken process group.
        os._exit(status or 0)


if __name__ == "__main__":
    main(sys.argv[1:])
