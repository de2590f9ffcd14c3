"""Ranks and commands forked from one process that has imported the trainer.

A rank spends more time on its imports than on the few steps of a test. Python's own fork server
imports `tests.trainer.preloaded` once and forks every process from there: nothing of one start is
left in the next. It has one thread when it forks, as OMP_NUM_THREADS=1 starts no others.
"""

import atexit
import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO

import psutil
from torch.distributed import TCPStore

ROOT = Path(__file__).parents[2]
CONTEXT = multiprocessing.get_context("forkserver")
# How long the other ranks of a failed one may take to end by themselves, as torchrun has it.
NOTICED_S, TERMINATED_S = 0.2, 30
# Those of the process that runs the tests, which would make a start a part of another run.
NOT_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def ensure_server() -> None:
    """Start the process that forks, unless it runs already."""
    CONTEXT.set_forkserver_preload(["tests.trainer.preloaded"])
    before = dict(os.environ)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def environment(**changes: str) -> dict[str, str]:
    """The environment of a start: that of the tests, one thread, and `changes`."""
    own = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
    return own | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | changes


def _child(
    module: str, arguments: list[str], variables: dict[str, str], out: Connection, err: Connection
) -> None:
    """What each fork runs: the module's main, with its output in two open files."""
    os.environ.clear()
    os.environ.update(variables)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    if "TORCH_LOGS" in variables:
        # torch reads it when it is imported, which was before the fork.
        from torch._logging import _internal

        _internal._init_logs()
    # The server keeps quiet about a preload that fails; here it is seen.
    importlib.import_module("tests.trainer.preloaded")
    status = importlib.import_module(module).main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        # As the trainer's own page does it: no clean-up of a broken process group.
        os._exit(status)


def _process(
    module: str, arguments: list[str], variables: dict[str, str], out: IO[str], err: IO[str]
) -> BaseProcess:
    """A fork that has been started."""
    # A connection is how an open file gets to a process that is no child of this one.
    files = (Connection(os.dup(file.fileno())) for file in (out, err))
    process = CONTEXT.Process(target=_child, args=(module, arguments, variables, *files))
    process.start()
    # What a failed test leaves behind must not be waited for.
    atexit.register(process.kill)
    return process


class Ranks:
    """A started module on one or several ranks, to be used as a subprocess.Popen is.

    One rank is started as by `python -m`, several as by torchrun: where one fails, the others are
    ended, and the exit status is 1.
    """

    def __init__(self, module: str, arguments: list[str], ranks: int = 1, **variables: str) -> None:
        ensure_server()
        self.returncode: int | None = None
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        # The ranks meet at a store that is here already, as at torchrun's.
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes = [
            _process(
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
        codes = [process.exitcode for process in self.processes]
        if self.returncode is None and any(codes):
            time.sleep(NOTICED_S)
            self.terminate()
            codes = [process.exitcode for process in self.processes]
            self.returncode = 1 if len(codes) > 1 else codes[0]
        elif self.returncode is None and None not in codes:
            self.returncode = 0
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait for the end; what all ranks printed. Raises subprocess.TimeoutExpired."""
        started = time.monotonic()
        while self.poll() is None:
            running = [process.sentinel for process in self.processes if process.exitcode is None]
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
            process.join(max(0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def run(module: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`python -m module arguments`, to its end."""
    ensure_server()
    line = list(map(str, arguments))
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = _process(module, line, environment(), out, err)
        process.join()
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(
            [module, *line], process.exitcode, out.read(), err.read()
        )
