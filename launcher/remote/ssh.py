"""ssh and rsync as the user has configured them, through one connection that stays open.

COOKBOOK_SSH is the ssh program with its options, as GIT_SSH_COMMAND is for git. What ssh, rsync and
the cluster's side say is shown as it is.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from launcher.errors import RemoteFault
from launcher.remote import KIT

# ssh's own status if the connection failed, and not the command.
LOST = 255


class Connection:
    """The way to a host: the user's open connection, else one that ssh opens, asking once."""

    def __init__(self, host: str) -> None:
        self.name, _, kit = host.partition(":")
        self.kit = kit.removeprefix("~/") or KIT
        self._ssh = shlex.split(os.environ.get("COOKBOOK_SSH") or "ssh")
        self._ssh += ["-o", "ServerAliveInterval=15", "-o", "ConnectTimeout=20"]
        known = self._quietly("-G", self.name).stdout
        if not re.search(r"(?im)^controlpath (?!none$)", known):
            # %C: a hash of user, host and port.
            self._ssh += ["-o", "ControlPath=~/.ssh/cookbook-%C"]
            Path("~/.ssh").expanduser().mkdir(mode=0o700, exist_ok=True)
        if self._quietly("-O", "check", self.name).returncode:
            kept = ["-o", "ControlMaster=auto", "-o", "ControlPersist=12h"]
            argv, nothing = [*self._ssh, *kept, self.name, "true"], subprocess.DEVNULL
            if subprocess.run(argv, stdin=nothing, stdout=nothing).returncode == LOST:
                raise RemoteFault(f"no connection to {self.name}, for the reason above")
        self._ssh += ["-o", "ControlMaster=no", "-o", "BatchMode=yes"]

    def _quietly(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        argv = [*self._ssh, *arguments]
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)

    def argv(self, script: str, terminal: bool = False) -> list[str]:
        """Return the ssh call that runs a script of bash there, after the user's login files.

        On many clusters Slurm's commands come from /etc/profile.d. What such files print must not
        come between the bytes of an answer.
        """
        inner = shlex.quote(f"exec 1>&3 3>&-; {script}")
        # -q: without ssh's own last line.
        how = "-qt" if terminal else "-T"
        return [*self._ssh, how, self.name, f"sh -c 'exec bash -lc \"$0\" 3>&1 1>&2' {inner}"]

    def module(self, *words: str, before: str = ":") -> str:
        """Return the script that runs a module of the kit there, with the kit's own Python, after
        other words of the shell."""
        where = f"{self.name}:{self.kit}"
        fault = shlex.quote(f"error: no kit in {where}: cookbook init --host {where} installs it")
        return (
            f"cd; cd {shlex.quote(self.kit)} 2>&-"
            ' && p="${COOKBOOK_VENV:-$PWD/.venv}/bin/python" && [ -x "$p" ]'
            f' || {{ echo {fault} >&2; exit 1; }}; export COOKBOOK_HOST=local PYTHONPATH="$PWD"'
            f'; {before}; exec "$p" -P -m {shlex.join(words)}'
        )

    def output(self, script: str, given: bytes = b"") -> bytes:
        """Return what a script there prints, given this as its input. If it fails, this command
        ends with its status."""
        done = subprocess.run(self.argv(script), input=given, stdout=subprocess.PIPE)
        if done.returncode:
            sys.exit(1 if done.returncode == LOST else done.returncode)
        return done.stdout

    def push(self, names: Iterable[str], start: str, there: str, *more: str) -> None:
        """Send files by their names below a folder here. A link is sent as a link, not as what it
        leads to, and an absolute one not at all."""
        words = ["-0", "--files-from=-", "--no-implied-dirs", "-ltz", "--safe-links", *more]
        self._rsync([*words, f"{start}/", f"{self.name}:{there}/"], names)

    def pull(self, there: str, here: Path) -> None:
        """Copy the files of a folder there into one here. Links are left out: all files stay in
        that folder, whatever the other side sends."""
        here.mkdir(parents=True, exist_ok=True)
        words = ["--partial-dir=.rsync-partial", "--no-inc-recursive", "-rt"]
        self._rsync([*words, f"{self.name}:{there}/", f"{here}/"])

    def _rsync(self, words: list[str], names: Iterable[str] = ()) -> None:
        shown = ["--info=progress2"] if sys.stderr.isatty() else []
        argv = ["rsync", "-e", shlex.join(self._ssh), *shown, *words]
        done = subprocess.run(argv, input=b"\0".join(map(os.fsencode, names)), stdout=2)
        if done.returncode:
            raise RemoteFault(f"rsync with {self.name} failed, for the reason above")
