"""Starts a rank of another trainer, which answers if it hangs: rank.py PROGRAM [ARGUMENT ...]

PROGRAM is a module or a file, and runs as `python -m` or `python` would run it. On SIGUSR2, which
slurm/node.sh sends for the watchdog, all threads write their stacks to logs/<attempt>. It runs in
the engine's environment, and needs nothing of the kit.
"""

import faulthandler
import os
import runpy
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path


def answer_for_stacks() -> None:
    """Write the stacks at SIGUSR2; the file's first line says whom to ask: node and process.

    The signal is handled in C, so that it is answered while Python waits for another rank.
    """
    folder, rank = Path(os.environ.get("LOGS", "")), os.environ.get("RANK", "0")
    # A container may not see the folder: the rank runs, and is named without its stacks.
    with suppress(OSError):
        file = open(folder / f"stack_rank_{rank}.log", "w", encoding="utf-8")  # noqa: SIM115
        file.write(f"{os.environ.get('NODE_NAME') or socket.gethostname()} {os.getpid()}\n")
        file.flush()
        faulthandler.register(signal.SIGUSR2, file)


def main() -> None:
    answer_for_stacks()
    program = sys.argv[1]
    sys.argv[:] = sys.argv[1:]
    if program.endswith(".py"):
        place = Path(program).resolve().parent
        # The kit's own modules beside this one would hide packages of their names.
        if place != Path(__file__).resolve().parent:
            sys.path.insert(0, str(place))
        runpy.run_path(program, run_name="__main__")
    else:
        # A config may name the user's own modules beside it.
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
