"""A short job on some nodes, run to its end: what each node printed."""

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.slurm.command import EXPORT, environment, missing, one_line


@dataclass(frozen=True)
class Step:
    """What a short job on some nodes printed.

    message: srun's own messages. pending: the job did not start in time.
    """

    lines: list[str]
    message: str
    pending: bool
    exit_code: int


def run_on_nodes(options: Sequence[str], script: str, wait_s: float, limit_s: float) -> Step:
    """Run a shell script once on each node of a short job and return what it printed.

    The job is withdrawn if it has not started within wait_s, and ended if it takes longer than
    limit_s in all; nothing of it is left in the queue.
    """
    minutes = max(1, round(limit_s / 60 + 0.5))
    argv = ["srun", *options, "--ntasks-per-node=1", f"--time={minutes}", "--label"]
    argv += ["--unbuffered", f"--export={','.join(EXPORT)}", "bash", "-c", script]
    pending, begin = False, time.monotonic()
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as messages:
        try:
            process = subprocess.Popen(
                argv,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=messages,
                # Ctrl-C is passed on by us: once, and as a signal that srun does not ask about.
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise missing("srun") from error
        try:
            while process.poll() is None and not pending and time.monotonic() <= begin + limit_s:
                silent = not os.fstat(printed.fileno()).st_size
                pending = silent and time.monotonic() > begin + wait_s
                time.sleep(0.02)
        finally:
            # srun withdraws a job that waits, and ends one that runs.
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        texts = []
        for file in (printed, messages):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Step(texts[0].splitlines(), one_line(texts[1]), pending, process.returncode)
