"""One start of a run on one rank: from the config to an exit status that the job can act on."""

import atexit
import faulthandler
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from runspec import files
from runspec.files import patient_json
from runspec.processes import end_with_torchrun
from runspec.redact import redacted
from trainer import config as configs
from trainer.config import TrainConfig
from trainer.errors import TrainerError, describe, write_error_record
from trainer.loop import Trainer
from trainer.methods.base import Objective
from trainer.parallel import fitness
from trainer.parallel import world as distributed


def main(path: Path, objective: type[Objective]) -> int:
    """Train by the given train.yaml; a fault becomes a record, a message and an exit status."""
    end_with_torchrun()
    rank, attempt = int(os.environ.get("RANK", 0)), attempt_number()
    run_dir = path.absolute().parent
    _show_stacks_when_asked(run_dir / files.LOGS / str(attempt), rank)
    faulthandler.enable()  # the rank's log says where Python was when a library crashed
    try:
        config = configs.load(path, objective.config_class)
        run_dir = config.output_dir
        run(config, attempt, objective)
    except Exception as error:
        report(error, run_dir, rank, attempt)
        return error.exit_status if isinstance(error, TrainerError) else 1
    distributed.stop()
    return 0


def run(config: TrainConfig, attempt: int, objective: type[Objective]) -> None:
    """Train from where the last start of the run stopped, then export."""
    if config.cudnn_deterministic_mode:
        # cuBLAS reads it at its first product; without it torch refuses its products in this mode.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    world = distributed.start(config.device, vars(config))
    if world.gather(_is_finished(config))[0]:
        world.say(f"already finished: see {config.output_dir / files.EXPORT}")
        return
    if line := fitness.check(world):
        world.say(line)
    trainer = Trainer(config, world, attempt, objective)
    try:
        if trainer.train():
            trainer.finish()
    except Exception:
        trainer.checkpoints.settle()
        raise


def leave(status: int) -> None:
    """End the process without Python's own clean-up.

    A rank that failed would hang in it, in the broken process group. A rank that succeeded may be
    killed in it: a thread of gloo that frees the tensor of its last all-gather while Python ends
    calls std::terminate (seen with torch 2.13 as SIGABRT after the export).
    """
    if not status:
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


def _show_stacks_when_asked(logs: Path, rank: int) -> None:
    """Write the stacks of all threads at SIGUSR2, which slurm/node.sh sends when a run hangs.

    The signal is handled in C, so that it is answered while Python waits for another rank. The
    file's first line says whom to ask: the node and the process.
    """
    if not logs.is_dir():
        return
    try:
        file = open(logs / files.STACKS.format(rank), "w", encoding="utf-8")  # noqa: SIM115
        file.write(f"{os.environ.get('NODE_NAME') or socket.gethostname()} {os.getpid()}\n")
        file.flush()
    except OSError:
        return
    faulthandler.register(signal.SIGUSR2, file)


def _is_finished(config: TrainConfig) -> bool:
    recorded = patient_json(config.output_dir / files.PROGRESS) or {}
    return recorded.get("state") == "finished" and (config.output_dir / files.EXPORT).is_dir()


def report(error: Exception, run_dir: Path, rank: int, attempt: int) -> None:
    """Say what went wrong, and leave a record for whoever decides on a retry."""
    lines = [f"[rank {rank}] error: {describe(error)}\n"]
    if not isinstance(error, TrainerError):
        lines += traceback.format_exception(error)
    try:
        write_error_record(run_dir / files.LOGS / str(attempt), rank, error)
    except OSError as fault:
        lines.append(f"[rank {rank}] the error record failed: {fault}\n")
    # What reads the output may be gone, which is perhaps the very fault.
    with suppress(OSError):
        # One write, so that the lines of several ranks do not mix.
        sys.stderr.write(redacted("".join(lines)))
        sys.stderr.flush()


def attempt_number() -> int:
    """The number of this attempt of the run, from its job; 0 without one."""
    text = os.environ.get("COOKBOOK_ATTEMPT", "0")
    return int(text) if text.isdigit() else 0
