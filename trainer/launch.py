"""Start a node's ranks: python -P -m trainer.launch MODULE ARGUMENT ...

For the kit's own trainer, in place of torchrun, which imports torch before each of its ranks does
so again. Here a node imports the module once, without threads and without starting CUDA, and forks
its ranks. They get torchrun's variables, and meet at a store in the first node's process, as with
torchrun. The first rank to fail ends those of its node, a signal ends all, and killed ranks are
reported in torchrun's words, which slurm/faults.py reads.

Needs the variables _NEEDED, and uses RANK_SOCKETS and NEAR_CPUS if slurm/node.sh has set them.
"""

import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from runspec.processes import end_with_parent

# How long ranks may take to end after TERM, and other nodes after this one, as with torchrun.
_END_S, _OTHERS_S = 30.0, 300.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_NEEDED = ("NODES", "NODE_RANK", "RANKS_PER_NODE", "HEAD_ADDR", "HEAD_PORT", "COOKBOOK", "LOGS")
_ASKS_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


class _Asked(Exception):
    """A signal asks for the end."""


class Ranks:
    """The processes of this node's ranks."""

    def __init__(self, module: str, arguments: list[str]) -> None:
        self._size = _number("RANKS_PER_NODE")
        self._first = _number("NODE_RANK") * self._size
        self._command = module, arguments
        self._running: dict[int, int] = {}
        # rank, process id, exit status (negative: the signal), time
        self.failed: list[tuple[int, int, int, float]] = []

    def start(self) -> None:
        """Fork all ranks."""
        for local in range(self._size):
            if (pid := os.fork()) == 0:
                _become(self._first + local, local, *self._command)
            self._running[pid] = self._first + local

    def wait(self) -> bool:
        """Wait until all have ended or one has failed; return whether all succeeded."""
        while self._running and not self.failed:
            self._reap(0)
        return not self.failed

    def end(self) -> None:
        """End those that are left: TERM, then KILL."""
        began, number = time.monotonic(), signal.SIGTERM
        self._signal(number)
        while self._running:
            if number == signal.SIGTERM and time.monotonic() - began > _END_S:
                number = signal.SIGKILL
                self._signal(number)
            if not self._reap(os.WNOHANG):
                time.sleep(0.05)

    def _reap(self, options: int) -> bool:
        pid, status = os.waitpid(-1, options)
        code = os.waitstatus_to_exitcode(status) if pid else 0
        if (rank := self._running.pop(pid, None)) is not None and code:
            self.failed.append((rank, pid, code, time.time()))
        return pid != 0

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._running:
            # A rank that has just been forked has no group of its own yet.
            for send in (os.killpg, os.kill):
                with suppress(ProcessLookupError):
                    send(pid, number)
                    break


def _become(rank: int, local: int, module: str, arguments: list[str]) -> NoReturn:
    """Be a rank, in a process that was just forked."""
    status = 1
    try:
        # Slurm may kill what started the ranks and not see them, whose session is their own.
        end_with_parent()
        os.setsid()
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.environ |= _variables(rank, local)
        # What ps and top show in place of the module.
        with suppress(OSError):
            Path("/proc/self/comm").write_text(f"rank {rank}", encoding="ascii")
        _write_to_the_log()
        _stay_near(local)
        if not _may_use_gpus():
            print(f"{module} used a GPU while it was imported: this rank imports it again")
            sys.stdout.flush()
            os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])
        sys.argv = [module, *arguments]
        status = importlib.import_module(module).main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(status)


def _variables(rank: int, local: int) -> dict[str, str]:
    """Return what torchrun sets for a rank."""
    nodes, size = _number("NODES"), _number("RANKS_PER_NODE")
    world = nodes * size
    values = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": _number("NODE_RANK"),
        "GROUP_WORLD_SIZE": nodes,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": os.environ["HEAD_ADDR"],
        "MASTER_PORT": os.environ["HEAD_PORT"],
        "TORCHELASTIC_RUN_ID": os.environ.get("SLURM_JOB_ID", "none"),
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        # The store is this process's, not rank 0's.
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
    }
    if "RANK_SOCKETS" in os.environ:
        values["TORCH_WORKER_SERVER_SOCKET"] = f"{os.environ['RANK_SOCKETS']}/rank_{rank}"
    return {name: str(value) for name, value in values.items()}


def _number(name: str) -> int:
    return int(os.environ[name])


def _write_to_the_log() -> None:
    """Send output through slurm/rank.sh, which writes it to the rank's log and the node's."""
    script = Path(os.environ["COOKBOOK"], "slurm", "rank.sh")
    reader, writer = os.pipe()
    subprocess.Popen(["bash", script], stdin=reader)
    for stream in (1, 2):
        os.dup2(writer, stream)
    os.close(reader)
    os.close(writer)


def _stay_near(local: int) -> None:
    """Bind this process to the CPUs near its GPU: slurm/near.py."""
    near = os.environ.get("NEAR_CPUS", "").split()
    if local < len(near) and near[local] != "-":
        with suppress(OSError):
            os.sched_setaffinity(0, map(int, near[local].split(",")))


def _may_use_gpus() -> bool:
    """Whether CUDA starts here; it does not if the process that forked this one has started it."""
    import torch

    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        # Without GPUs or a driver it does not start either, of which the trainer itself reports.
        return "forked" not in str(error)
    return True


def _leave(status: int) -> NoReturn:
    """End this rank as the trainer does when it is started by itself."""
    try:
        importlib.import_module("trainer.start").leave(status)
    finally:
        os._exit(status or 1)


class _Store:
    """Where ranks meet: in the first node's process, which outlives the ranks of all nodes."""

    def __init__(self) -> None:
        self._node, self._nodes = _number("NODE_RANK"), _number("NODES")
        self._store = self._open() if self._node == 0 else None

    def _open(self) -> Any:
        from torch.distributed import TCPStore

        return TCPStore(
            os.environ["HEAD_ADDR"],
            _number("HEAD_PORT"),
            is_master=self._node == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=30),
        )

    def leave(self) -> None:
        """Wait on the first node until the ranks of the others have ended, too."""
        if self._store is None:
            # The first node may have gone because its ranks failed.
            with suppress(RuntimeError):
                self._open().set(f"ended/{self._node}", "")
            return
        deadline = time.monotonic() + _OTHERS_S
        others = [f"ended/{node}" for node in range(1, self._nodes)]
        while others and not self._store.check(others) and time.monotonic() < deadline:
            time.sleep(0.1)


def _import(module: str, arguments: list[str]) -> None:
    """Import the trainer's module, and what it will import for its train.yaml."""
    # A package that asks for GPUs while it is imported is answered by NVML, which starts no CUDA.
    kept = os.environ.get(_ASKS_NVML)
    os.environ[_ASKS_NVML] = "1"
    gc.disable()
    # What cannot be imported is reported by each rank.
    with suppress(Exception):
        importlib.import_module(module)
        # One rank alone may as well import the rest when it needs it.
        if _number("RANKS_PER_NODE") > 1:
            importlib.import_module("trainer.imports").prepare(Path(arguments[0]))
    gc.freeze()
    gc.enable()
    del os.environ[_ASKS_NVML]
    if kept is not None:
        os.environ[_ASKS_NVML] = kept


def _ask(number: int, frame: object) -> NoReturn:
    raise _Asked(signal.Signals(number).name)


def _report(failed: list[tuple[int, int, int, float]]) -> None:
    """Print what torchrun prints of ranks that have failed."""
    for index, (rank, pid, code, ended) in enumerate(failed):
        name = f"({signal.Signals(-code).name})" if code < 0 else ""
        when = time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(ended))
        local = rank % _number("RANKS_PER_NODE")
        print(
            f"[{index}]:\n  time      : {when}\n  host      : {socket.gethostname()}\n"
            f"  rank      : {rank} (local_rank: {local})\n  exitcode  : {code} (pid: {pid}) {name}",
            file=sys.stderr,
            flush=True,
        )


def main(argv: list[str]) -> int:
    """Start the ranks of this node; exit status 0 if all succeed, 1 if one fails or on a signal.

    2: it was not started by a job.
    """
    missing = [name for name in _NEEDED if not os.environ.get(name)]
    if missing or not argv:
        lacks = ", ".join(missing) or "the name of a module"
        use = "use cookbook submit, or torchrun -m trainer.sft <run>/train.yaml"
        print(f"trainer.launch is part of a job, and lacks {lacks}: {use}", file=sys.stderr)
        return 2
    module, *arguments = argv
    _import(module, arguments)
    ranks = Ranks(module, arguments)
    for number in _SIGNALS:
        signal.signal(number, _ask)
    try:
        ranks.start()
        store = _Store()
        if ranks.wait():
            store.leave()
            return 0
        _report(ranks.failed)
    except _Asked as error:
        print(f"{error}: the ranks of this node are ended", file=sys.stderr, flush=True)
    finally:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        ranks.end()
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
