"""Faults at random times in one long run on the one-host Slurm, and what they cost.

    python -m tests.faults.soak --each                    every kind of fault once: the table
    python -m tests.faults.soak --minutes 60 --every 60   random ones, a minute apart on average

Prints what each fault cost, and the goodput: the time of the steps that count, over all time. At
the end a second run, which nothing happens to, must have the same losses. Exit status 1 if it has
not, or if the run does not recover from a fault.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.conftest import SlurmCluster, running_cluster
from tests.faults.conftest import user_of
from tests.faults.kit import SHORT, attempts, parent, processes_of, processes_of_node, rank
from tests.launcher.kit import Kit, losses, report, until

# SlurmdTimeout is Slurm's time until a silent node counts as down; KillWait that until it kills.
SHAPE = ("--nodes", "3", "--requeue-delay", "5", "--set", "SlurmdTimeout=6")
LONG = ["max_steps=1000000", "epochs=1000000", "save_every_n_steps=20", "hang_timeout_s=10"]
RECOVERED_S = 600


@dataclass(frozen=True)
class Scene:
    """A run that trains, on a cluster."""

    cluster: SlurmCluster
    user: Kit
    run: Path

    @property
    def job(self) -> str:
        return str(json.loads((self.run / "status.json").read_text())["job_id"])

    @property
    def nodes(self) -> list[str]:
        return list(json.loads((self.run / "status.json").read_text())["nodes"])

    @property
    def attempt(self) -> int:
        return int(json.loads((self.run / "status.json").read_text())["attempt"])

    def beat(self) -> dict:
        """What the newest attempt says of itself; {} while it says nothing."""
        try:
            path = self.run / "logs" / str(self.attempt) / "heartbeat.json"
            return {"attempt": self.attempt, **json.loads(path.read_text())}
        except (OSError, ValueError):
            return {}

    def last_step(self) -> int:
        """The last logged step; 0 before the first."""
        return max(losses(self.run), default=0) if (self.run / "metrics.jsonl").exists() else 0


@dataclass(frozen=True)
class Cost:
    """What a fault cost: steps that were taken twice, and seconds until a step was taken again.

    noticed_s: of these, how long Slurm took to notice that a node is lost; None for other faults.
    """

    fault: str
    cause: str
    lost_steps: int
    seconds: float
    noticed_s: float | None


def _kill(pids: list[int], how: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        os.kill(pid, how)


def _named(scene: Scene, name: str) -> list[int]:
    found = []
    for pid in processes_of(scene.run):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.path.basename(words[0].decode(errors="replace")) == name:
            found.append(pid)
    return sorted(found)


def kill_a_rank(scene: Scene) -> None:
    _kill([rank(scene.run, random.randrange(2))])


def stop_a_rank(scene: Scene) -> None:
    _kill([rank(scene.run, random.randrange(2))], signal.SIGSTOP)


def kill_torchrun(scene: Scene) -> None:
    _kill([parent(rank(scene.run, random.randrange(2)))])


def kill_srun(scene: Scene) -> None:
    _kill(_named(scene, "srun")[:1])


def warn_of_the_time_limit(scene: Scene) -> None:
    scene.cluster.run(["scancel", "--batch", "--signal=USR1", scene.job])


def requeue(scene: Scene) -> None:
    scene.cluster.run(["scontrol", "requeue", scene.job])


def lose(scene: Scene, node: str) -> float:
    """Kill all that runs on a node; start its daemon again once Slurm has noticed."""
    began = time.time()
    _kill(processes_of_node(node, scene.job, scene.cluster.state))
    while "DOWN" not in scene.cluster.run(["scontrol", "show", "node", node]).stdout:
        time.sleep(0.5)
    noticed_s = time.time() - began
    scene.cluster.start_dead_daemons()
    return noticed_s


def kill_the_controller_and_a_rank(scene: Scene) -> None:
    (pid,) = [int(path.read_text()) for path in scene.cluster.state.rglob("slurmctld.pid")]
    _kill([pid, rank(scene.run, 1)])
    time.sleep(15)
    scene.cluster.start_dead_daemons()


FAULTS: dict[str, Callable[[Scene], float | None]] = {
    "a rank is killed": kill_a_rank,
    "a rank stops (hang_timeout_s is 10)": stop_a_rank,
    "torchrun is killed": kill_torchrun,
    "srun is killed": kill_srun,
    "the time limit is near": warn_of_the_time_limit,
    "somebody requeues the job": requeue,
    "a node is lost (SlurmdTimeout is 6)": lambda scene: lose(scene, scene.nodes[-1]),
    # It takes the job script with it.
    "the first node is lost": lambda scene: lose(scene, scene.nodes[0]),
    "a rank is killed while the controller is away for 15 s": kill_the_controller_and_a_rank,
}


def inject(scene: Scene, name: str) -> Cost:
    """Let a fault happen, and wait until the run trains again."""
    number, began = scene.attempt, time.time()
    noticed_s = FAULTS[name](scene)
    before = scene.last_step()

    def again() -> bool:
        beat = scene.beat()
        return bool(beat.get("attempt", 0) > number and beat.get("steps", 0) >= 1)

    until(again, RECOVERED_S, lambda: f"{name}: no step\n{report(scene.run)}")
    seconds = time.time() - began
    ended = next(line for line in attempts(scene.run) if line["attempt"] == number)
    lost = before - max(int(ended["checkpoint_step"]), 0)
    return Cost(name, str(ended["cause"]), max(lost, 0), seconds, noticed_s)


def trains(scene: Scene, steps: int) -> None:
    """Wait until so many more steps are done."""
    first = scene.last_step()
    until(lambda: scene.last_step() >= first + steps, RECOVERED_S, lambda: report(scene.run))


def goodput(run: Path) -> float:
    """The time of the steps that count, each once, over all time since the first began."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = {row["step"]: row["step_time_s"] for row in rows}
    began = rows[0]["time"] - rows[0]["step_time_s"]
    return sum(steps.values()) / (rows[-1]["time"] - began)


def undisturbed_losses(cluster: SlurmCluster, user: Kit, steps: int) -> dict[int, float]:
    """The first losses of a run that nothing happens to."""
    _, run = user.submit(*SHORT, *LONG)
    scene = Scene(cluster, user, run)
    until(lambda: scene.last_step() >= steps, 1800, lambda: report(run))
    user.cookbook("cancel", run.name)
    return {step: loss for step, loss in losses(run).items() if step <= steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--each", action="store_true", help="every kind of fault once")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--every", type=float, default=60, help="mean seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="faults whose name holds this text")
    parser.add_argument("--json", type=Path, help="write the result to this file, too")
    given = parser.parse_args()
    random.seed(given.seed)
    names = [name for name in FAULTS if not given.only or given.only in name]
    with tempfile.TemporaryDirectory() as folder, running_cluster("soak", *SHAPE) as cluster:
        user = user_of(cluster, Path(folder))
        # A node is left out for good after two faults in a row; here all of them are good.
        _, run = user.submit(*SHORT, *LONG, "max_retries=100")
        scene, costs = Scene(cluster, user, run), []
        trains(scene, 25)
        began = due = time.time()
        end = began if given.each else began + 60 * given.minutes
        print(
            f"{'fault':56} {'told as':14} {'lost steps':>10} {'trains again':>13}  Slurm noticed",
            flush=True,
        )
        todo = list(names)
        while todo if given.each else time.time() < end:
            if given.each:
                name = todo.pop(0)
            else:
                # From fault to fault: a recovery that takes longer is followed by the next at once.
                due += random.expovariate(1 / given.every)
                time.sleep(max(0.0, min(due, end) - time.time()))
                name = random.choice(names)
            cost = inject(scene, name)
            costs.append(cost)
            told = f"{cost.fault:56} {cost.cause:14} {cost.lost_steps:10}"
            noticed = "" if cost.noticed_s is None else f" {cost.noticed_s:12.1f} s"
            print(f"{told} {cost.seconds:11.1f} s{noticed}", flush=True)
            trains(scene, 5)
        seconds = time.time() - began
        share, redone = goodput(run), sum(cost.lost_steps for cost in costs)
        print(
            f"{len(costs)} faults in {seconds / 60:.1f} minutes; {redone} steps were taken twice, "
            f"{max(losses(run))} count; goodput {share:.2f}"
        )
        user.cookbook("cancel", run.name)
        steps = min(max(losses(run)), 2000)
        same = undisturbed_losses(cluster, user, steps) == {
            step: loss for step, loss in losses(run).items() if step <= steps
        }
        left = processes_of(run)
        print(
            f"losses of {steps} steps are {'the same' if same else 'NOT the same'} as undisturbed"
        )
        if given.json:
            told = {"faults": [asdict(c) for c in costs], "goodput": share, "same_losses": same}
            given.json.write_text(json.dumps(told, indent=1) + "\n")
        sys.exit(0 if same and not left else 1)


if __name__ == "__main__":
    main()
