"""Faults that cookbook doctor --drill causes in a job of this user's own."""

import shlex
from collections.abc import Sequence

from launcher.errors import SlurmFault
from launcher.executors.slurm.command import run


def kill_on_node(job_id: str, node: str, pids: Sequence[int], parents: bool = False) -> None:
    """Kill processes on a node of a job with SIGKILL, by a step beside those that run.

    Args:
        parents: kill their parents first, which started them.

    Raises:
        SlurmFault: the step cannot be started, or a process is gone.
    """
    named = shlex.join(map(str, pids))
    above = f"kill -KILL $(ps -o ppid= -p {','.join(map(str, pids))} | sort -u) && " * parents
    # --mem=0: the step shares the memory of the others.
    argv = ["srun", f"--jobid={job_id}", "--overlap", "--mem=0", "--nodes=1", "--ntasks=1"]
    run([*argv, f"--nodelist={node}", "bash", "-c", f"{above}kill -KILL {named}"], timeout_s=60)


def cancel_step(job_id: str, name: str) -> None:
    """Cancel the step of a job that has this name.

    Raises:
        SlurmFault: there is no such step.
    """
    text = run(["squeue", "--noheader", "--steps", f"--jobs={job_id}", "--format=%i|%j"])
    rows = (line.strip().partition("|") for line in text.splitlines())
    steps = [step for step, _, named in rows if named == name]
    if not steps:
        raise SlurmFault(f"job {job_id} has no step {name}: look with: squeue --steps")
    run(["scancel", "--signal=KILL", steps[-1]])


def warn(job_id: str, signal: str) -> None:
    """Send a job's script the signal that Slurm sends before the time limit."""
    run(["scancel", "--batch", f"--signal={signal}", job_id])
