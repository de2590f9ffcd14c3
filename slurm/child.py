"""A command that outlives the supervisor: a new one goes on with the same process."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from runspec import files
from runspec.states import process_start

# Runs the command and writes its exit status, which only a parent could ask for. bash acts on a
# TERM, which Slurm sends to all processes of a job at once, after the command has ended.
_KEEPER = 'trap : TERM USR1 USR2; file=$1; shift; "$@"; rc=$?; echo $rc >"$file"; exit $rc'
_POLL_S, _KEEPER_S = 0.1, 5.0


@dataclass
class Child:
    """The bash above the command, and the folder in which it leaves what is known of it."""

    folder: Path
    pid: int
    started: str | None
    process: subprocess.Popen[bytes] | None = None  # None if another process has started it

    @classmethod
    def start(
        cls, argv: Sequence[str], env: Mapping[str, str], folder: Path, log: Path | None = None
    ) -> "Child":
        """Start a command; log: a file for its output, None for this process's."""
        status = folder / files.EXIT_STATUS
        status.unlink(missing_ok=True)
        keeper = ["bash", "-c", _KEEPER, "bash", str(status), *argv]
        with open(log, "ab") if log else nullcontext() as output:
            process = subprocess.Popen(
                keeper, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        child = cls(folder, process.pid, process_start(process.pid), process)
        # On a full disk the command runs nevertheless.
        with suppress(OSError):
            files.write_json(folder / files.CHILD, {"pid": child.pid, "start": child.started})
        return child

    @classmethod
    def of_before(cls, folder: Path) -> "Child | None":
        """Return the command that an earlier supervisor has started, None if it had not."""
        known = files.peek(folder / files.CHILD)
        if not isinstance(known.get("pid"), int):
            return None
        return cls(folder, known["pid"], known.get("start"))

    def poll(self) -> int | None:
        """Return its exit status once it has ended; 137 if nobody could write it down."""
        if self.process is not None:
            status = self.process.poll()
            return 128 - status if status is not None and status < 0 else status
        if self.started is not None and process_start(self.pid) == self.started:
            return None
        with suppress(OSError, ValueError):
            return int((self.folder / files.EXIT_STATUS).read_text())
        return 128 + signal.SIGKILL

    def wait(self, seconds: float) -> bool:
        """Wait so long for its end at most; return whether it has ended."""
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _send(self, number: int) -> None:
        with suppress(OSError):
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            for pid in children:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), number)

    def terminate(self, wait_s: float) -> bool:
        """Ask the command to end; return whether it has within this many seconds."""
        self._send(signal.SIGTERM)
        return self.wait(wait_s)

    def kill(self, wait_s: float) -> None:
        """Kill the command, and wait so long for its end at most."""
        self._send(signal.SIGKILL)
        if not self.wait(_KEEPER_S):
            # bash itself may be stopped.
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait(wait_s)

    def end(self, wait_s: float, kill_wait_s: float) -> bool:
        """End the command by TERM, else by KILL; return whether TERM was enough."""
        if self.terminate(wait_s):
            return True
        self.kill(kill_wait_s)
        return False
