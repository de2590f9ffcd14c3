"""A short job on some nodes, run to its end: what each node printed."""

import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from launcher.slurm.command import EXPORT, environment, missing, one_line


@dataclass
class Step:
    """What a short job on some nodes printed.

    message: srun's own messages. pending: the job did not start in time.
    """

    lines: list[str] = field(default_factory=list)
    message: str = ""
    pending: bool = False
    exit_code: int = 0

    def read(self, stream: Iterable[str]) -> None:
        for line in stream:
            self.lines.append(line.rstrip("\n"))


def run_on_nodes(options: Sequence[str], script: str, wait_s: float, limit_s: float) -> Step:
    """Run a shell script once on each node of a short job and return what it printed.

    The job is withdrawn if it has not started within wait_s, and ended if it takes longer than
    limit_s in all; nothing of it is left in the queue.
    """
    minutes = max(1, round(limit_s / 60 + 0.5))
    argv = ["srun", *options, "--ntasks-per-node=1", f"--time={minutes}", "--label"]
    argv += ["--unbuffered", f"--export={','.join(EXPORT)}", "bash", "-c", script]
    step = Step()
    with tempfile.TemporaryFile("w+", errors="replace") as stderr_file:
        try:
            process = subprocess.Popen(
                argv,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr_file,
                errors="replace",
                # Ctrl-C is passed on by us: once, and as a signal that srun does not ask about.
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise missing("srun") from error
        reader = threading.Thread(target=step.read, args=[process.stdout], daemon=True)
        reader.start()
        deadline = time.monotonic() + limit_s
        start_by = time.monotonic() + wait_s
        try:
            while process.poll() is None and not step.pending and time.monotonic() <= deadline:
                step.pending = not step.lines and time.monotonic() > start_by
                time.sleep(0.02)
        finally:
            # srun withdraws a job that waits, and ends one that runs.
            process.terminate()
            try:
                step.exit_code = process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        reader.join(timeout=2)
        stderr_file.seek(0)
        step.message = one_line(stderr_file.read())
    return step
