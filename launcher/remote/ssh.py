"""ssh as the user has configured it: an existing master connection, and never a question.

COOKBOOK_SSH is the program with its options, as GIT_SSH_COMMAND is for git.
"""

import math
import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

from launcher.errors import RemoteFault
from launcher.remote import wire
from launcher.remote.hosts import Host

# ssh's own status if the connection failed, and not the command.
LOST = 255
# Used if the user's configuration names no control socket. %C: a hash of user, host and port.
_OWN_SOCKET = "~/.ssh/cookbook-%C"
# A host that has not answered for so long is said to be silent.
_SILENT_S = 10
# A lost connection is waited for so long.
_WAIT_S = 600
_WINDOWS = os.name == "nt"
_REMEDY = "install OpenSSH's client, or name it with COOKBOOK_SSH"


class Broken(Exception):
    """The connection ended before the answer did; its text is ssh's own words."""


class Session:
    """One ssh call: the cluster's side of the kit, with its input and its output.

    turns: how often an answer was waited for after something was sent.
    """

    def __init__(self, argv: list[str], silent: Callable[[], None] = lambda: None) -> None:
        self._words = tempfile.TemporaryFile()  # noqa: SIM115, closed in close()
        # Ctrl-C is for us: ssh must live on to carry the last words.
        apart: dict[str, Any] = {"start_new_session": True}
        if sys.platform == "win32":
            apart = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words, **apart
        )
        assert self._process.stdin and self._process.stdout
        self._stdin: IO[bytes] = self._process.stdin
        self._stdout: IO[bytes] = self._process.stdout
        self._came: queue.Queue[bytes] = queue.Queue(64)
        self._rest = b""
        self._ended, self._sent, self.turns, self.received = False, False, 0, 0
        self._silent, self._patient_until = silent, time.monotonic() + _SILENT_S
        threading.Thread(target=self._read_all, daemon=True).start()
        self.greeting: dict[str, Any] | None = None

    def _read_all(self) -> None:
        while data := os.read(self._stdout.fileno(), 2**16):
            self._came.put(data)
        self._came.put(b"")

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        self._sent = True
        try:
            wire.send(self._stdin, header, payload)
        except OSError as error:
            raise Broken(self.message()) from error

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """Return the next message of the cluster's side.

        Raises:
            Broken: the connection ended.
            RemoteFault: the other side reports faults.
        """
        try:
            self._greeted()
            header, payload = wire.receive(self)
        except EOFError as error:
            raise Broken(self.message()) from error
        if "faults" in header:
            raise RemoteFault(header["faults"], header.get("exit_code", 1))
        return header, payload

    def _greeted(self) -> None:
        while self.greeting is None:
            line = self.readline(2**16)
            if not line:
                raise EOFError
            if line.startswith(wire.GREETING):
                header, _ = wire.receive(self)
                self.greeting = header

    def some(self) -> bytes | None:
        """Return what has come, b"" at the end, None if nothing comes within a moment."""
        if not self._fill(once=True):
            return None
        data, self._rest = self._rest, b""
        return data

    def _fill(self, once: bool = False) -> bool:
        """Wait until there is something to read, or the end; once: or until a moment is over."""
        if self._sent:
            self._sent, self.turns = False, self.turns + 1
        while not self._rest and not self._ended:
            # With a time limit: Windows delivers no Ctrl-C to a thread that blocks without one.
            try:
                self._rest = self._came.get(timeout=0.2)
            except queue.Empty:
                if self.greeting is None and time.monotonic() > self._patient_until:
                    self._patient_until = math.inf
                    self._silent()
                if once:
                    return False
                continue
            self._ended = not self._rest
            self.received += len(self._rest)
        return True

    def readline(self, limit: int, /) -> bytes:
        line = b""
        while not line.endswith(b"\n") and len(line) < limit:
            self._fill()
            if not self._rest:
                break
            end = self._rest.find(b"\n") + 1 or len(self._rest)
            line, self._rest = line + self._rest[:end], self._rest[end:]
        return line

    def read(self, count: int, /) -> bytes:
        parts, left = [], count
        while left:
            self._fill()
            if not self._rest:
                break
            parts.append(self._rest[:left])
            self._rest = self._rest[left:]
            left -= len(parts[-1])
        return b"".join(parts)

    def message(self) -> str:
        """Return what ssh, or the shell there, said before it ended."""
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return ""
        self._words.seek(0)
        said = self._words.read().decode(errors="replace").split("\n")
        return "; ".join(line.strip() for line in said[-4:] if line.strip())

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def close(self) -> None:
        """End the call; what runs there is not ended by this."""
        for stream in (self._stdin, self._words):
            with suppress(OSError):
                stream.close()
        self._process.terminate()
        self._process.wait()


class Connection:
    """The way to a host: through the user's master connection, else without any question."""

    def __init__(self, host: Host, say: Callable[[str], None]) -> None:
        self.host = host
        self._say = say
        # On Windows \ is no escape, and quotes around a path stay.
        given = shlex.split(os.environ.get("COOKBOOK_SSH") or "ssh", posix=not _WINDOWS)
        self._program = [part.strip('"') for part in given] if _WINDOWS else given
        if shutil.which(self._program[0]) is None:
            raise RemoteFault(f"there is no {self._program[0]} on this machine: {_REMEDY}")
        self._socket = (
            [] if _WINDOWS or self._configured() else ["-o", f"ControlPath={_OWN_SOCKET}"]
        )
        self.master = self._has_master()
        self.sessions: list[Session] = []

    def _configured(self) -> bool:
        """Whether the user's own configuration names a control socket for the host."""
        done = self._run(["-G", self.host.name])
        if done is None or done.returncode:
            message = _last(done.stderr) if done else "ssh -G gives no answer"
            raise RemoteFault(f"ssh cannot read its configuration: {message}")
        lines = done.stdout.decode(errors="replace").lower().splitlines()
        paths = [line.split()[1] for line in lines if line.startswith("controlpath ")]
        return bool(paths) and paths[0] != "none"

    def _run(self, arguments: list[str]) -> "subprocess.CompletedProcess[bytes] | None":
        argv = [*self._program, *arguments]
        try:
            return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
        except subprocess.TimeoutExpired:
            return None

    def _has_master(self) -> bool:
        if _WINDOWS:  # its OpenSSH shares no connections
            return False
        done = self._run([*self._socket, "-O", "check", self.host.name])
        return done is not None and done.returncode == 0

    def dropped(self) -> bool:
        """Whether there was a master connection, and is none any more."""
        return self.master and not self._has_master()

    @property
    def opening(self) -> str:
        """The command that opens a master connection, with one authentication."""
        # Not -M, which leaves the socket of a connection that died, and then shares nothing.
        argv = [*self._program, "-Nf", "-o", "ControlMaster=auto"]
        argv += ["-o", "ServerAliveInterval=15", *self._socket]
        return shlex.join([*argv, self.host.name])

    def argv(self, command: str) -> list[str]:
        """Return the ssh call that runs a shell's command there."""
        # Never a question, nor a master; and a connection without one notices that it is dead.
        settings = (
            "BatchMode=yes",
            "ControlMaster=no",
            "ConnectTimeout=20",
            "ServerAliveInterval=15",
        )
        options = [part for each in settings for part in ("-o", each)]
        return [*self._program, *self._socket, "-T", *options, self.host.name, command]

    def control(self, what: str, rule: list[str]) -> None:
        """Ask the master connection to forward a port, or to end that."""
        done = self._run([*self._socket, "-O", what, *rule, self.host.name])
        if done is None or done.returncode:
            message = _last(done.stderr) if done else "no answer"
            raise RemoteFault(f"ssh -O {what} {' '.join(rule)}: {message}")

    def forwarding(self, rule: list[str]) -> list[str]:
        """Return the ssh call that only forwards a port, without a master connection."""
        return [*self.argv("")[:-2], "-N", "-o", "ExitOnForwardFailure=yes", *rule, self.host.name]

    def open(self) -> Session:
        """Start the cluster's side of the kit."""
        argv = self.argv(shell(self.host, "launcher.remote.far"))
        self.sessions.append(Session(argv, self._say_silent))
        return self.sessions[-1]

    def _say_silent(self) -> None:
        name = self.host.name
        message = f"{name} has not answered for {_SILENT_S} s; waiting (Ctrl-C stops this)"
        if self.master:
            ends = shlex.join([*self._program, *self._socket, "-O", "exit", name])
            message += f". A connection that died is ended with: {ends}"
        self._say(message)

    def fault(self, exit_code: int | None, message: str) -> RemoteFault:
        """Return what to tell if a call ended before the cluster's side had begun."""
        name = self.host.name
        if exit_code != LOST:
            summary = f"{name} has no working kit in {self.host.kit} ({message or 'no answer'})"
            return RemoteFault(
                f"{summary}: install it with: cookbook init --host {name}, or name its folder in "
                "~/.config/slurm-cookbook/config.yaml"
            )
        if self.master or not ("denied" in message or "authentication" in message.lower()):
            return RemoteFault(
                f"cannot connect to {name}: {message or 'ssh gave no reason'}: see why with: "
                f"{shlex.join([*self._program, name])}"
            )
        if _WINDOWS:
            remedy = "load your key with: ssh-add (OpenSSH for Windows shares no connections)"
        else:
            remedy = f"authenticate once, for all commands of the day, with: {self.opening}"
        return RemoteFault(f"there is no open connection to {name}: {remedy}")

    def again(self, attempt: int) -> None:
        """Wait until a lost connection can be tried again.

        Raises:
            RemoteFault: nobody opened the master connection again.
        """
        self._say(f"the connection to {self.host.name} was lost; reconnecting (Ctrl-C stops this)")
        if not self.master:
            time.sleep(min(30, 2**attempt / 2))
            return
        deadline, warned = time.monotonic() + _WAIT_S, False
        while not self._has_master():
            if not warned:
                warned = True
                self._say(f"open it again, in another terminal, with: {self.opening}")
            if time.monotonic() > deadline:
                raise RemoteFault(f"there is no connection to {self.host.name}: {self.opening}")
            time.sleep(1)


def shell(host: Host, module: str, *message: str) -> str:
    """Return the command that runs a module of the kit on the host, in a login shell.

    A login shell: on many clusters Slurm's commands come from /etc/profile.d.
    """
    python = '"${COOKBOOK_VENV:-$PWD/.venv}/bin/python"'
    inner = f'cd {folder(host.kit)} && PYTHONPATH="$PWD" exec {python} -P -m {module}'
    inner = " ".join([inner, *map(shlex.quote, message)])
    return f"exec bash -lc {shlex.quote(inner)}"


def folder(path: str) -> str:
    """Return a folder of the cluster for a shell: from the home directory, unless it is whole."""
    path = path.removeprefix("~/")
    return shlex.quote(path) if path.startswith("/") else f'"$HOME"/{shlex.quote(path)}'


def _last(text: bytes) -> str:
    return (text.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
