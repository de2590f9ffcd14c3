"""Ranks and commands of the trainer, forked from one process that has imported it."""

import os
import subprocess
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

import psutil
from torch.distributed import TCPStore

from tests import forked

ROOT = Path(__file__).parents[2]
# How long the other ranks of a failed one may take to end by themselves, as torchrun has it.
NOTICED_S, TERMINATED_S = 0.2, 30
# Those of the process that runs the tests, which would make a start a part of another run.
NOT_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(**changes: str) -> dict[str, str]:
    """The environment of a start: that of the tests, one thread, and `changes`."""
    own = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
    return own | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | changes


class Ranks:
    """A started module on one or several ranks, to be used as a subprocess.Popen is.

    One rank is started as by `python -m`, several as by torchrun: where one fails, the others are
    ended, and the exit status is 1.
    """

    def __init__(self, module: str, arguments: list[str], ranks: int = 1, **variables: str) -> None:
        self.returncode: int | None = None
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        # The ranks meet at a store that is here already, as at torchrun's.
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes = [
            forked.Fork(
                forked.TRAINER,
                module,
                arguments,
                environment(**variables, **self._place(rank, ranks)),
                self.output,
                self.output,
            )
            for rank in range(ranks)
        ]

    def _place(self, rank: int, ranks: int) -> dict[str, str]:
        """torchrun's variables for a rank; none where it is alone."""
        if ranks == 1:
            return {}
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }

    @property
    def ranks(self) -> list[psutil.Process]:
        """The processes by rank."""
        return [psutil.Process(process.pid) for process in self.processes]

    def poll(self) -> int | None:
        """The exit status, None while it runs; a failed rank ends the others."""
        codes = [process.poll() for process in self.processes]
        if self.returncode is None and any(codes):
            time.sleep(NOTICED_S)
            self.terminate()
            codes = [process.poll() for process in self.processes]
            self.returncode = 1 if len(codes) > 1 else codes[0]
        elif self.returncode is None and None not in codes:
            self.returncode = 0
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait for the end; what all ranks printed. Raises subprocess.TimeoutExpired."""
        started = time.monotonic()
        while self.poll() is None:
            running = [process for process in self.processes if process.poll() is None]
            left = None if timeout is None else timeout - (time.monotonic() - started)
            # None is left where the last one ended since the line above; `wait` would then sleep.
            if running and not wait(running, left):
                raise subprocess.TimeoutExpired("ranks", timeout)
        self.output.seek(0)
        return self.output.read(), None

    def terminate(self) -> None:
        """End all ranks, first by a request, then by force."""
        for process in self.processes:
            process.terminate()
        deadline = time.monotonic() + TERMINATED_S
        for process in self.processes:
            process.wait(max(0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def run(module: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`python -m module arguments`, to its end."""
    return forked.run(forked.TRAINER, module, list(map(str, arguments)), environment())
