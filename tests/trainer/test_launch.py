"""trainer/launch.py: the ranks of a node, and what torchrun would have made of them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm import faults, rendezvous
from tests.launcher.kit import until

ROOT = Path(__file__).parents[2]
# Writes what it is as rank N, then does what the arguments say.
TOY = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(__file__).parent
with open(folder / "imports", "a") as file: print(os.getpid(), file=file)
def main(arguments):
    rank = os.environ.get("RANK")
    told = {"variables": dict(os.environ), "pid": os.getpid(), "parent": os.getppid(),
            "group": os.getpgrp(), "cpus": sorted(os.sched_getaffinity(0)),
            "name": pathlib.Path("/proc/self/comm").read_text().strip(),
            "handler": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL}
    (folder / f"new_{rank}").write_text(json.dumps(told))
    (folder / f"new_{rank}").rename(folder / f"rank_{rank}.json")
    print("this is rank", rank)
    if f"ignores TERM {rank}" in arguments: signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if f"fails {rank}" in arguments: raise ValueError("no such thing")
    if "sleeps" in arguments or f"sleeps {rank}" in arguments: time.sleep(600)
    if "waits" in arguments: time.sleep(float(rank))
    (folder / f"ended_{rank}").touch()
    return 0
if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
"""


class Place:
    """A folder with the toy, and the environment that slurm/node.sh sets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "toy.py").write_text(TOY)
        self.port = str(rendezvous.port_of(str(os.getpid()), 0))

    def environment(self, node: int = 0, nodes: int = 1, **more: str) -> dict[str, str]:
        own = {
            "PYTHONPATH": f"{ROOT}:{self.folder}",
            "COOKBOOK": str(ROOT),
            "LOGS": str(self.folder),
            "HEAD_ADDR": "localhost",
            "HEAD_PORT": self.port,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        numbers = {"NODES": nodes, "NODE_RANK": node, "RANKS_PER_NODE": 2}
        return os.environ | own | {k: str(v) for k, v in numbers.items()} | more

    def start(self, *arguments: str, node: int = 0, nodes: int = 1, **more: str):
        """The launcher of a node, which runs; its output is in node_N.log."""
        argv = [sys.executable, "-P", "-m", "trainer.launch", "toy", *arguments]
        with (self.folder / f"node_{node}.log").open("w") as log:
            own = self.environment(node, nodes, **more)
            return subprocess.Popen(argv, env=own, stdout=log, stderr=log)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def rank(self, number: int) -> dict:
        path = self.folder / f"rank_{number}.json"
        until(path.exists, 300, lambda: self.log("node_0"))
        return json.loads(path.read_text())


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path)


def test_ranks_have_the_variables_of_torchrun_and_one_import(place):
    cpus = sorted(os.sched_getaffinity(0))
    first = place.start(node=1, nodes=2, NEAR_CPUS=f"- {cpus[0]}", RANK_SOCKETS="/tmp/sockets")
    assert place.start(nodes=2).wait(300) == first.wait(300) == 0
    ranks = [place.rank(number) for number in range(4)]
    assert len((place.folder / "imports").read_text().split()) == 2
    assert [each["name"] for each in ranks] == [f"rank {number}" for number in range(4)]
    assert all(each["pid"] == each["group"] and each["handler"] for each in ranks)
    assert [ranks[2]["cpus"], ranks[3]["cpus"]] == [cpus, cpus[:1]]
    assert ranks[3]["variables"]["TORCH_WORKER_SERVER_SOCKET"] == "/tmp/sockets/rank_3"
    # The log of a rank, and that of its node.
    assert place.log("rank_3") == "this is rank 3\n" and "[3] this is rank 3\n" in place.log(
        "node_1"
    )
    ours = [each["variables"] for each in ranks]
    argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    argv += ["--rdzv-backend=static", "--master-addr=localhost", f"--master-port={place.port}"]
    argv += ["--max-restarts=0"]
    nodes = [
        subprocess.Popen([*argv, f"--node-rank={node}", str(place.folder / "toy.py")], env=env)
        for node, env in ((0, place.environment(0, 2)), (1, place.environment(1, 2)))
    ]
    assert [node.wait(300) for node in nodes] == [0, 0]
    for number, mine in enumerate(ours):
        theirs = place.rank(number)["variables"]
        # The trainer leaves its own records of errors, and a run has one id.
        new = {k: v for k, v in theirs.items() if os.environ.get(k) != v}
        for name in (
            "TORCHELASTIC_ERROR_FILE",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_SIGNALS_TO_HANDLE",
        ):
            new.pop(name, None)
        assert {name: mine.get(name) for name in new} == new


def test_outside_of_a_job_it_says_what_is_missing_and_what_to_use(place):
    for given, arguments, lacks in (
        ({"HEAD_PORT": "", "LOGS": ""}, ["toy"], "HEAD_PORT, LOGS"),
        ({}, [], "the name of a module"),
    ):
        argv = [sys.executable, "-P", "-m", "trainer.launch", *arguments]
        env = place.environment(**given)
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2 and f"lacks {lacks}: use cookbook submit" in line


def test_a_killed_rank_ends_the_others_and_is_reported(place):
    node = place.start("sleeps")
    os.kill(place.rank(1)["pid"], signal.SIGKILL)
    other = place.rank(0)["pid"]
    assert node.wait(300) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(other, 0)
    (error,) = faults.read_errors(place.folder)
    assert (error["rank"], error["type"]) == (1, "Killed")
    assert "killed by SIGKILL" in error["message"]


@pytest.mark.long
def test_an_exception_is_in_the_log_of_its_rank(place):
    assert place.start("fails 0", "sleeps 1").wait(300) == 1
    assert place.log("rank_0").rstrip().endswith("ValueError: no such thing")
    (error,) = faults.read_errors(place.folder)
    assert (error["rank"], error["type"]) == (0, "ValueError")


@pytest.mark.long
def test_what_cannot_be_imported_is_in_the_log_of_each_rank(place):
    (place.folder / "toy.py").write_text("import nowhere\n")
    assert place.start().wait(300) == 1
    logs = [path.read_text() for path in place.folder.glob("rank_*.log")]
    assert logs and all("No module named 'nowhere'" in log for log in logs)


def test_a_signal_ends_all_ranks_those_that_ignore_it_later(place):
    argv = [sys.executable, "-P", "-c", "import trainer.launch as launch, sys; launch._END_S = 1\n"]
    argv[-1] += "sys.exit(launch.main(['toy', 'sleeps', 'ignores TERM 1']))"
    node = subprocess.Popen(argv, env=place.environment(), stderr=subprocess.PIPE, text=True)
    pids = [place.rank(number)["pid"] for number in (0, 1)]
    time.sleep(0.5)
    node.terminate()
    _, said = node.communicate(timeout=300)
    assert node.returncode == 1 and said.startswith("SIGTERM: the ranks of this node are ended")
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_ranks_end_with_a_launcher_that_is_killed(place):
    node = place.start("sleeps", "ignores TERM 1")
    pids = [place.rank(number)["pid"] for number in (0, 1)]
    os.kill(pids[0], signal.SIGSTOP)
    node.kill()
    node.wait()
    for pid in pids:
        until(lambda pid=pid: not Path(f"/proc/{pid}/exe").exists(), 60)


def test_the_first_node_stays_until_the_ranks_of_the_others_have_ended(place):
    last = place.start("waits", node=1, nodes=2)
    first = place.start("waits", nodes=2)
    assert first.wait(300) == 0
    assert (place.folder / "ended_3").exists()
    assert last.wait(300) == 0


@pytest.mark.long
def test_a_port_that_is_taken_fails_the_node_and_leaves_no_rank(place):
    listener = f"import socket, time\nsocket.create_server(('', {place.port}))\ntime.sleep(600)"
    taken = subprocess.Popen(
        [sys.executable, "-c", f"s = 1\n{listener}".replace("\nsocket", "\ns = socket")]
    )
    time.sleep(0.5)
    node = place.start("sleeps")
    assert node.wait(300) == 1
    taken.kill()
    taken.wait()
    assert "EADDRINUSE" in place.log("node_0")
    for path in place.folder.glob("rank_*.json"):
        with pytest.raises(ProcessLookupError):
            os.kill(json.loads(path.read_text())["pid"], 0)
