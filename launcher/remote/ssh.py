"""ssh and rsync as the user has configured them, through one connection that stays open.

COOKBOOK_SSH is the ssh program with its options, as GIT_SSH_COMMAND is for git.
"""

import json
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
from typing import Any

from launcher import __version__
from launcher.errors import RemoteFault
from launcher.remote.hosts import Host

# ssh's own status if the connection failed, and not the command; ours without a kit there.
LOST, _NO_KIT = 255, 96
# macOS has another program of this name.
RSYNC = "install rsync 3.1 or newer (apt install rsync, brew install rsync, or conda-forge's)"


class Connection:
    """The way to a host: the user's open connection, else one that ssh opens, asking once."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._ssh = shlex.split(os.environ.get("COOKBOOK_SSH") or "ssh")
        if shutil.which(self._ssh[0]) is None:
            raise RemoteFault(f"there is no {self._ssh[0]} here: install OpenSSH's client")
        plain = shlex.join([*self._ssh, host.name])
        self._ssh += ["-o", "ServerAliveInterval=15", "-o", "ConnectTimeout=20"]
        if not re.search(r"(?im)^controlpath (?!none$)", self._call("-G", host.name).stdout):
            # %C: a hash of user, host and port.
            self._ssh += ["-o", "ControlPath=~/.ssh/cookbook-%C"]
            Path("~/.ssh").expanduser().mkdir(mode=0o700, exist_ok=True)
        if self._call("-O", "check", host.name).returncode:
            done = self._call(
                *("-o", "ControlMaster=auto", "-o", "ControlPersist=12h", host.name, "true")
            )
            if done.returncode == LOST:
                raise RemoteFault(
                    f"cannot connect to {host.name}: {last(done.stderr)}: see why with: {plain} (a "
                    "second factor is asked for once a day, in a terminal)"
                )
        self._ssh += ["-o", "ControlMaster=no", "-o", "BatchMode=yes"]

    def _call(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        # Files, not pipes, which the connection of an older ssh would keep open.
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            argv = [*self._ssh, *arguments]
            code = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err).returncode
            out.seek(0), err.seek(0)
            return subprocess.CompletedProcess(argv, code, out.read(), err.read())

    def argv(self, script: str, terminal: bool = False) -> list[str]:
        """Return the ssh call that runs a script of bash there, after the user's login files.

        On many clusters Slurm's commands come from /etc/profile.d. What such files print must not
        come between the bytes of an answer.
        """
        inner = shlex.quote(f"exec 1>&3 3>&-; {script}")
        # -q: without ssh's own last line.
        how = "-qt" if terminal else "-T"
        return [*self._ssh, how, self.host.name, f"sh -c 'exec bash -lc \"$0\" 3>&1 1>&2' {inner}"]

    def far(self, *words: str, module: str = "launcher.remote.far") -> str:
        """Return the script that runs a module of the kit there, with the kit's own Python."""
        enter = f'cd {folder(self.host.kit)} && p="${{COOKBOOK_VENV:-$PWD/.venv}}/bin/python"'
        # Ctrl-C is ignored until the module handles it.
        start = f'PYTHONPATH="$PWD" exec "$p" -P -m {module} {shlex.join(words)}'
        return f'{{ {enter} && [ -x "$p" ]; }} 2>/dev/null || exit {_NO_KIT}; trap "" INT; {start}'

    def ask(self, *words: str) -> Any:
        """Return what the cluster's side answers to these words."""
        return json.loads(self.output(self.far(__version__, *words)))

    def output(self, script: str, given: bytes = b"") -> bytes:
        """Return what a script there prints to its standard output, given this as its input.

        Raises:
            RemoteFault: it failed, or there is no connection.
        """
        done = subprocess.run(self.argv(script), input=given, capture_output=True)
        self.require(done.returncode)
        if done.returncode:
            said = done.stderr.decode(errors="replace")
            faults = re.findall(r"(?m)^error: (.+)$", said)
            raise RemoteFault(faults or f"on {self.host.name}: {last(said)}", done.returncode)
        return done.stdout

    def require(self, code: int) -> None:
        """Raise RemoteFault if a call's status says that the script there did not end."""
        name = self.host.name
        if code == _NO_KIT:
            raise RemoteFault(
                f"{name} has no working kit in {self.host.kit}: install it with: cookbook init "
                f"--host {name}, or name its folder in ~/.config/slurm-cookbook/config.yaml"
            )
        if code == LOST:
            raise RemoteFault(
                f"the connection to {name} was lost: runs there go on; see them with: cookbook "
                f"--host {name} status"
            )

    def push(self, names: Sequence[str], start: str, rsync: str, there: str, *more: str) -> None:
        """Send files by their names below a folder here. A link is sent as the file that it leads
        to: the caller chooses which may be followed."""
        words = ["-0", "--files-from=-", "--no-implied-dirs", "-Ltz", *more]
        self._rsync(rsync, [*words, f"{start}/", f"{self.host.name}:{there}/"], names)

    def pull(self, rsync: str, there: str, here: Path) -> None:
        """Copy the files of a folder there into one here. Links are left out: what comes lies in
        that folder, whatever the other side sends."""
        here.mkdir(parents=True, exist_ok=True)
        words = ["--partial-dir=.rsync-partial", "--no-inc-recursive", "-rt"]
        self._rsync(rsync, [*words, f"{self.host.name}:{there}/", f"{here}/"])

    def _rsync(self, there: str, words: list[str], names: Sequence[str] = ()) -> None:
        if not there:
            raise RemoteFault(f"{self.host.name} has no rsync for login shells: there, {RSYNC}")
        with suppress(FileNotFoundError):
            known = subprocess.run(["rsync", "--version"], capture_output=True, text=True).stdout
            if re.match(r"rsync +version 3\.[1-9]", known):
                shown = ["--info=progress2"] if sys.stderr.isatty() else []
                argv = ["rsync", "-e", shlex.join(self._ssh), f"--rsync-path={there}", *shown]
                done = subprocess.run(
                    [*argv, *words], input=b"\0".join(map(os.fsencode, names)), stdout=2
                )
                if done.returncode:
                    raise RemoteFault(f"rsync with {self.host.name} failed, for the reason above")
                return
        raise RemoteFault(f"there is no rsync 3.1 on this machine: {RSYNC}")

    @contextmanager
    def forwarded(self, host: str, port: int) -> Iterator[int]:
        """Forward a port of 127.0.0.1 to host and port as the login node sees them; yield the port.

        It is the same number if that is free here.
        """
        own = _free(port)
        rule = ["-L", f"127.0.0.1:{own}:{host}:{port}", self.host.name]
        done = self._call("-O", "forward", *rule)
        if done.returncode:
            raise RemoteFault(f"ssh cannot forward port {own} to {host}:{port}: {done.stderr}")
        try:
            yield own
        finally:
            self._call("-O", "cancel", *rule)


def folder(path: str) -> str:
    """Return a folder of the cluster for a shell: in the home directory, unless it is absolute."""
    path = path.removeprefix("~/")
    return shlex.quote(path) if path.startswith("/") else f'"$HOME"/{shlex.quote(path)}'


def last(text: str) -> str:
    """Return the last line of what a program said."""
    return (text.strip().splitlines() or ["no reason given"])[-1]


def _free(wanted: int) -> int:
    """Return a port of 127.0.0.1 on which nothing listens, the wanted one if it can be had."""
    for port in (wanted, 0):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)) as server:
            return int(server.getsockname()[1])
    raise RemoteFault("there is no free port on 127.0.0.1")
