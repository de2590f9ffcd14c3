"""What the tests of faults share: the run, how it is hit, and how it must end."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from launcher.paths import REPO_ROOT
from tests.conftest import SlurmCluster
from tests.launcher.kit import (
    Kit,
    checkpoints,
    command,
    losses,
    processes_of,
    ranks_of,
    report,
    until,
)

SAVE_EVERY = 5
SHORT = [
    *("--recipe", "demo", "--nodes", "2", "--gpus-per-node", "1"),
    *("max_steps=30", f"save_every_n_steps={SAVE_EVERY}", "log_every_n_steps=1"),
    # A checkpoint counts before the next step, so that no more than SAVE_EVERY steps can be lost.
    "enable_async_checkpointing=false",
]


def attempts(run: Path) -> list[dict[str, Any]]:
    path = run / "attempts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def trains(run: Path, steps: int = 1) -> None:
    """Wait until the run has written its first checkpoint."""
    until(lambda: len(checkpoints(run)) >= steps, 120, lambda: report(run))


def rank(run: Path, number: int) -> int:
    """The process of a rank, once it is there."""
    return until(lambda: ranks_of(run).get(number), 60, lambda: report(run))


def parent(pid: int) -> int:
    return psutil.Process(pid).ppid()


def processes_of_node(node: str, job: str, state: Path) -> list[int]:
    """What dies with a node: its slurmd, the job's tasks on it and the slurmstepd above them."""
    victims = set()
    for process in psutil.process_iter(["environ", "cmdline"]):
        environ, argv = process.info["environ"] or {}, process.info["cmdline"] or []
        if f"{state}/slurm.conf -N {node}" in " ".join(argv):
            victims.add(process.pid)
        if (environ.get("SLURMD_NODENAME"), environ.get("SLURM_JOB_ID")) == (node, job):
            victims.add(process.pid)
            with suppress(psutil.Error):
                if "slurmstepd" in command(process.ppid()):
                    victims.add(process.ppid())
    assert len(victims) >= 4, "slurmd, slurmstepd, torchrun and a rank"
    return sorted(victims)


def kill_node(cluster: SlurmCluster, node: str, job: str) -> None:
    """Kill all that dies with a node."""
    for pid in processes_of_node(node, job, cluster.state):
        os.kill(pid, signal.SIGKILL)


def lose_node(cluster: SlurmCluster, node: str, job: str) -> None:
    """Kill all that dies with a node, and wait until Slurm has noticed."""
    kill_node(cluster, node, job)
    # sinfo goes on saying "mixed*" for a while when it is asked often.
    show = ["scontrol", "show", "node", node]
    until(lambda: "State=DOWN" in cluster.run(show).stdout, 60)


def ended(user: Kit, run: Path, state: str, timeout: float = 180) -> list[dict[str, Any]]:
    """Wait for the run's one end; return its attempts."""
    words = ("COMPLETED", "FAILED", "CANCELLED")
    told = user.wait(run, *words, timeout=timeout)
    assert told["state"] == state, report(run)
    until(lambda: not processes_of(run), 30, lambda: f"left over: {processes_of(run)}")
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == state, report(run)
    lines = attempts(run)
    assert [line["attempt"] for line in lines] == list(range(len(lines))), lines
    return lines


def requeued(env: dict[str, str], run: Path, job: str) -> subprocess.CompletedProcess[str]:
    """Let a supervisor, which its job script starts again, put the job back into the queue."""
    status = {"state": "REQUEUED", "next": "requeue", "attempt": 0, "job_id": job}
    named = {"cluster": env.get("SLURM_CLUSTER_NAME"), "slurm_conf": env.get("SLURM_CONF")}
    named = {key: value for key, value in named.items() if value}
    (run / "status.json").write_text(json.dumps({**status, **named, "restart_count": 0}))
    own = {"RUN_DIR": str(run), "SLURM_JOB_ID": job, "NODES": "1", "MAX_RETRIES": "0"}
    own |= {"COOKBOOK_AGAIN": "yes", "PYTHONPATH": str(REPO_ROOT)}
    argv = [sys.executable, "-P", "-m", "slurm.supervise", "--", "srun", "true"]
    return subprocess.run(argv, env=env | own, capture_output=True, text=True, timeout=60)


@dataclass(frozen=True)
class Undisturbed:
    """A run that nothing happened to."""

    run: Path

    def is_equalled_by(self, run: Path) -> None:
        """Same losses, same export, and no more steps lost than a checkpoint is apart."""
        for line in attempts(run):
            beat = run / "logs" / str(line["attempt"]) / "heartbeat.json"
            done = json.loads(beat.read_text())["step"] if beat.exists() else 0
            assert done - max(line["checkpoint_step"], 0) <= SAVE_EVERY, line
        assert losses(run) == losses(self.run)
        export = Path("export", "model.safetensors")
        assert (run / export).read_bytes() == (self.run / export).read_bytes()
