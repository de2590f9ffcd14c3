"""slurm/rank.sh under a real torchrun: what it leaves of a rank that fails, and of its ranks."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slurm import faults
from tests.launcher.kit import until

ROOT = Path(__file__).parents[2]
# Rank 1 does what the argument says; rank 0 waits for torchrun to end it.
SCRIPT = """
import os, signal, sys, time
from runspec.variables import without_torchrun
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    print("this is rank", os.environ["RANK"], flush=True)
    if os.environ["RANK"] == "1":
        assert "TORCHELASTIC_USE_AGENT_STORE" in os.environ
        open("left", "w").write(" ".join(without_torchrun(os.environ)))
        while not os.path.exists("rank 0 has begun"): time.sleep(0.01)
        if sys.argv[1] == "fails":
            raise ValueError("no such thing")
        if sys.argv[1] == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
    open("rank 0 has begun", "w")
    time.sleep(600)

main()
"""


@pytest.fixture
def torchrun(tmp_path: Path):
    """Starts a program on two ranks as the job script does; its output is the node's log."""
    started = []

    def start(*program: str) -> subprocess.Popen:
        argv = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
        argv += ["--nproc-per-node=2", "--max-restarts=0", "--no-python"]
        argv += ["bash", str(ROOT / "slurm/rank.sh"), sys.executable, *program]
        own = {"COOKBOOK": str(ROOT), "PYTHONPATH": str(ROOT), "LOGS": str(tmp_path)}
        with (tmp_path / "node_0.log").open("w") as log:
            env = os.environ | own | {"OMP_NUM_THREADS": "1", "NODE_NAME": "n1"}
            started.append(subprocess.Popen(argv, env=env, cwd=tmp_path, stdout=log, stderr=log))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.mark.parametrize(
    ("deed", "kind", "message"),
    [
        ("fails", "ValueError", "no such thing (toy.py:14)"),
        ("is killed", "Killed", faults.SIGKILL),
    ],
)
def test_a_rank_that_fails_is_named_with_its_fault(torchrun, tmp_path, deed, kind, message):
    (tmp_path / "toy.py").write_text(SCRIPT)
    before = time.time()
    assert torchrun(str(tmp_path / "toy.py"), deed).wait(300) == 1
    errors = faults.on_nodes(faults.read_errors(tmp_path), ["n1"], 2)
    (error,) = [each for each in errors if each.get("type") != "Killed" or each["rank"] == 1]
    assert (error["rank"], error["host"], error["type"]) == (1, "n1", kind)
    assert error["message"] == message and before - 2 < error["time"] < time.time() + 1
    # What an engine may have that the rank starts, which makes a process group of its own.
    own = {"COOKBOOK", "PYTHONPATH", "LOGS", "OMP_NUM_THREADS", "NODE_NAME", *os.environ}
    left = (tmp_path / "left").read_text().split()
    assert {*left} - own <= {"TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    # The log of a rank, and that of its node.
    assert (tmp_path / "rank_0.log").read_text() == "this is rank 0\n"
    assert "[1] this is rank 1\n" in (tmp_path / "node_0.log").read_text()


# Rank 0 trains, rank 1 evaluates: they wait where they read their settings.
WAITS = """
import os, sys, time
from pathlib import Path
from plugins.evaluate import main as evaluate
from trainer import config, start
from trainer.methods.sft import SupervisedFineTuning

def load(*_):
    open("begun " + os.environ["RANK"], "w")
    time.sleep(600)

config.load = evaluate.load = load
if os.environ["RANK"] == "0":
    start.main(Path(sys.argv[1]), SupervisedFineTuning)
else:
    evaluate.main(sys.argv[1:])
"""


def test_ranks_end_with_a_torchrun_that_is_killed(torchrun, tmp_path):
    """Those of the kit: without Slurm nothing else would end them."""
    (tmp_path / "toy.py").write_text(WAITS)
    node = psutil.Process(torchrun(str(tmp_path / "toy.py"), str(tmp_path / "train.yaml")).pid)
    until(lambda: len(list(tmp_path.glob("begun *"))) == 2, 60, (tmp_path / "node_0.log").read_text)
    left = [each for each in node.children() if "toy.py" in " ".join(each.cmdline())]
    assert len(left) == 2
    os.kill(node.pid, signal.SIGKILL)
    assert psutil.wait_procs(left, 60)[1] == []
