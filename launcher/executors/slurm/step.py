"""A short job on some nodes, run to its end: what each node printed."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from launcher.executors.slurm.command import EXPORT, environment, missing, one_line


@dataclass
class Step:
    """What a short job on some nodes printed.

    lines: each line with the time at which it arrived. words: srun's own messages. pending: the
    job did not start in time. cut_off: it did not end in time.
    """

    lines: list[tuple[float, str]] = field(default_factory=list)
    words: str = ""
    pending: bool = False
    cut_off: bool = False
    exit_code: int = 0


def run_on_nodes(options: Sequence[str], script: str, wait_s: float, limit_s: float) -> Step:
    """Run a shell script once on each node of a short job and return what it printed.

    The job is withdrawn if it has not started within wait_s, and ended if it takes longer than
    limit_s in all; nothing of it is left in the queue.
    """
    minutes = max(1, round(limit_s / 60 + 0.5))
    argv = ["srun", *options, "--ntasks-per-node=1", f"--time={minutes}", "--label"]
    argv += ["--unbuffered", f"--export={','.join(EXPORT)}", "bash", "-c", script]
    step = Step()
    try:
        process = subprocess.Popen(
            argv,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # Ctrl-C is passed on by us: once, and as a signal that srun does not ask about.
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise missing("srun") from error
    words: list[str] = []

    def read_lines(stream: Iterable[str]) -> None:
        for line in stream:
            step.lines.append((time.time(), line.rstrip("\n")))

    readers = [
        threading.Thread(target=read_lines, args=[process.stdout], daemon=True),
        threading.Thread(target=words.extend, args=[process.stderr], daemon=True),
    ]
    for reader in readers:
        reader.start()
    started = time.monotonic()
    try:
        while process.poll() is None:
            waited = time.monotonic() - started
            step.pending = not step.lines and waited > wait_s
            step.cut_off = waited > limit_s
            if step.pending or step.cut_off:
                break
            time.sleep(0.02)
    finally:
        # srun withdraws a job that waits, and ends one that runs.
        process.terminate()
        try:
            step.exit_code = process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for reader in readers:
        reader.join(timeout=2)
    step.words = one_line("".join(words))
    return step
