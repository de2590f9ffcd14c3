"""ssh and rsync as the user has configured them, through one connection that stays open.

COOKBOOK_SSH is the ssh program with its options, as GIT_SSH_COMMAND is for git.
"""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from launcher.errors import RemoteFault
from launcher.remote.hosts import Host

# ssh's own status if the connection failed, and not the command.
LOST = 255
NO_KIT, _NO_RSYNC, IS_CHECKOUT = 96, 97, 98
# Used if the user's configuration names no control socket. %C: a hash of user, host and port.
_OWN_SOCKET = "~/.ssh/cookbook-%C"
_OPEN_FOR = "12h"
# macOS has another program of this name.
_RSYNC = "install rsync 3.1 or newer (apt install rsync, brew install rsync, or conda-forge's)"


class Connection:
    """The way to a host: the user's open connection, else one that ssh opens, asking once."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._ssh = shlex.split(os.environ.get("COOKBOOK_SSH") or "ssh")
        if shutil.which(self._ssh[0]) is None:
            raise RemoteFault(
                f"there is no {self._ssh[0]} on this machine: install OpenSSH's client, or name it "
                "with COOKBOOK_SSH"
            )
        self._plain = shlex.join([*self._ssh, host.name])
        self._ssh += ["-o", "ServerAliveInterval=15", "-o", "ConnectTimeout=20"]
        known = self._run(["-G", host.name])
        if not re.search(r"(?im)^controlpath (?!none$)", known.stdout):
            self._ssh += ["-o", f"ControlPath={_OWN_SOCKET}"]
            Path(_OWN_SOCKET).expanduser().parent.mkdir(mode=0o700, exist_ok=True)
        if self._run(["-O", "check", host.name]).returncode:
            self._open()
        self._ssh += ["-o", "ControlMaster=no", "-o", "BatchMode=yes"]

    def _run(self, arguments: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        argv = [*self._ssh, *arguments]
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )

    def _open(self) -> None:
        """Open a connection that outlives this command; ssh asks on the terminal."""
        shared = ["-o", "ControlMaster=auto", "-o", f"ControlPersist={_OPEN_FOR}"]
        argv = [*self._ssh, *shared, "-T", self.host.name, "true"]
        # Not a pipe, which the connection of an older ssh would keep open.
        with tempfile.TemporaryFile() as words:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=words
            )
            words.seek(0)
            said = _last(words.read().decode(errors="replace"))
        if done.returncode == LOST:
            raise RemoteFault(
                f"cannot connect to {self.host.name}: {said}: see why with: {self._plain} (a "
                "second factor is asked for once a day, in a terminal)"
            )

    def argv(self, inner: str) -> list[str]:
        """Return the ssh call that runs a script in a login shell there."""
        return [*self._ssh, "-T", self.host.name, _login(inner)]

    def far(self, *words: str, terminal: bool = False) -> list[str]:
        """Return the ssh call that starts the cluster's side with these words."""
        argv = self.argv(f"{far(self.host, *words)} {_OUT}")
        # -q: without ssh's own last line.
        return [*argv[:-3], "-qt", *argv[-2:]] if terminal else argv

    def ask(self, *words: str) -> bytes:
        """Return what the cluster's side prints.

        Raises:
            RemoteFault: it reports a fault, or there is no connection.
        """
        done = subprocess.run(self.far(*words), stdin=subprocess.DEVNULL, capture_output=True)
        if done.returncode:
            raise self.fault(done.returncode, done.stderr.decode(errors="replace"))
        return done.stdout

    def fault(self, code: int, said: str) -> RemoteFault:
        """Return what to tell about a call that failed."""
        name = self.host.name
        if code == NO_KIT:
            return RemoteFault(
                f"{name} has no working kit in {self.host.kit}: install it with: cookbook init "
                f"--host {name}, or name its folder in ~/.config/slurm-cookbook/config.yaml"
            )
        if code == _NO_RSYNC:
            return RemoteFault(f"{name} has no rsync for login shells: there, {_RSYNC}")
        if code == LOST:
            return RemoteFault(
                f"the connection to {name} was lost: runs there go on; see them with: cookbook "
                f"--host {name} status"
            )
        found = re.findall(r"(?m)^error: (.+)$", said)
        return RemoteFault(found or f"on {name}: {_last(said)}", 2 if code == 2 else 1)

    def push(self, folder: Path, enter: str, *options: str, progress: bool = False) -> int:
        """Copy what the links of a folder point to into the folder there that a script enters.

        Returns 0, or IS_CHECKOUT if the script ended with that.
        """
        words = [*options, "-rLtz", f"{folder}/", f"{self.host.name}:./"]
        return self._rsync(enter, words, progress)

    def pull(self, there: str, folder: Path) -> None:
        """Copy the files of a folder there into one here. Links are left out: what comes lies in
        that folder, whatever the other side sends."""
        folder.mkdir(parents=True, exist_ok=True)
        options = ["--partial-dir=.rsync-partial", "--no-inc-recursive", "-rt"]
        enter = f"cd {shlex.quote(there)}"
        self._rsync(enter, [*options, f"{self.host.name}:./", f"{folder}/"], True)

    def _rsync(self, enter: str, words: list[str], progress: bool) -> int:
        program = shutil.which("rsync") or "rsync"
        with suppress(OSError):
            known = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
            if not re.match(r"rsync +version 3\.[1-9]", known):
                program = ""
        if not program or shutil.which(program) is None:
            raise RemoteFault(f"there is no rsync 3.1 on this machine: {_RSYNC}")
        has = f"command -v rsync >/dev/null || exit {_NO_RSYNC}"
        # rsync's own status may be another than that of the shell there.
        tells = f"""trap 'echo "{_STATUS} $?" >&2' EXIT"""
        inner = f'{tells}; {{ {enter}; }} && {{ {has}; }} && exec rsync "$@" {_OUT}'
        argv = [program, "-e", shlex.join(self._ssh), "--rsync-path", _login(inner), *words]
        if progress and sys.stderr.isatty():
            argv.insert(1, "--info=progress2")
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, errors="replace"
        )
        told = re.search(rf"(?m)^{_STATUS} (\d+)$", done.stderr)
        code = int(told[1]) if told else done.returncode
        if code not in (0, IS_CHECKOUT):
            # What the host said, before rsync's own words about it.
            lines = done.stderr.splitlines()
            said = [line for line in lines if not line.startswith(("rsync", _STATUS))]
            raise self.fault(code, "\n".join(said) or done.stderr)
        return code

    @contextmanager
    def forwarded(self, host: str, port: int) -> Iterator[int]:
        """Forward a port of 127.0.0.1 to host and port as the login node sees them; yield the port.

        It is the same number if that is free here.
        """
        own = _free(port)
        rule = ["-L", f"127.0.0.1:{own}:{host}:{port}", self.host.name]
        done = self._run(["-O", "forward", *rule])
        if done.returncode:
            raise RemoteFault(f"ssh cannot forward port {own} to {host}:{port}: {done.stderr}")
        try:
            yield own
        finally:
            self._run(["-O", "cancel", *rule])


_STATUS = "cookbook-status"
# What a login shell's own files print must not come between the bytes of an answer.
_OUT = "1>&3 3>&-"


def _login(inner: str) -> str:
    """Return the command, for any user's shell, that runs a script in a login shell of bash.

    A login shell: on many clusters Slurm's commands come from /etc/profile.d.
    """
    return f"""sh -c 'exec bash -lc "$0" kit "$@" 3>&1 1>&2' {shlex.quote(inner)}"""


def far(host: Host, *words: str, module: str = "launcher.remote.far") -> str:
    """Return the script that runs a module of the kit on the host."""
    enter = f'cd {folder(host.kit)} && p="${{COOKBOOK_VENV:-$PWD/.venv}}/bin/python"'
    start = f'PYTHONPATH="$PWD" "$p" -P -m {module} {shlex.join(words)}'
    return f'{{ {{ {enter} && [ -x "$p" ]; }} 2>/dev/null || exit {NO_KIT}; }}; {start}'


def folder(path: str) -> str:
    """Return a folder of the cluster for a shell: from the home directory, unless it is whole."""
    path = path.removeprefix("~/")
    return shlex.quote(path) if path.startswith("/") else f'"$HOME"/{shlex.quote(path)}'


def _free(wanted: int) -> int:
    """Return a port of 127.0.0.1 on which nothing listens, the wanted one if it can be had."""
    for port in (wanted, 0):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)) as server:
            return int(server.getsockname()[1])
    raise RemoteFault("there is no free port on 127.0.0.1")


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]
