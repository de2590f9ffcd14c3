"""slurm/companion.py: what the supervisor calls beside the ranks, from the job's own code alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm import companion

ROOT = Path(__file__).parents[2]
TOY = """from slurm.companion import Companion

class Toy(Companion):
    def note(self, *words):
        with (self.run_dir / "moments").open("a") as file:
            print(*words, file=file)

    def prepare(self): self.note("prepare")
    def begin(self, attempt, nodes, step): self.note("begin", attempt, *nodes.hosts, *step)
    def look(self):
        self.note("look")
        raise ValueError("a fault of its own")
    def end(self): self.note("end")
    def settle(self, *ended): self.note("settle", *ended)
"""


def test_the_supervisor_calls_it_in_order_and_its_fault_ends_no_attempt(tmp_path: Path) -> None:
    run, kit = tmp_path / "run", tmp_path / "kit"
    kit.mkdir()
    for name in ("slurm", "runspec"):
        (kit / name).symlink_to(ROOT / name)
    (kit / "toy.py").write_text(TOY)
    (run / "logs").mkdir(parents=True)
    env = {**os.environ, "RUN_DIR": str(run), "COOKBOOK": str(kit), "PYTHONPATH": str(kit)}
    env |= {"NODES": "1", "RANKS_PER_NODE": "1", "MAX_RETRIES": "1", "JOB_PID": str(os.getpid())}
    argv = [sys.executable, "-P", "-m", "slurm.supervise", "--companion", "toy:Toy"]
    rank = "k=$COOKBOOK_ATTEMPT; "
    rank += 'until [ "$(grep -c look "$RUN_DIR/moments")" -gt "$k" ]; do sleep 0.05; done; '
    argv += ["--", "srun", "--wait=1", "bash", "-c", f'{rank} exit "$((k == 0))"']
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    host = os.uname().nodename.partition(".")[0]
    moments = (run / "moments").read_text().splitlines()
    assert done.stderr.count("ValueError: a fault of its own") == 2
    assert moments == [
        "prepare",
        f"begin 0 {host}",
        "look",
        "settle 0 1 False",
        "prepare",
        f"begin 1 {host}",
        "look",
        "settle 1 0 False",
        "end",
    ]


def test_only_what_was_submitted_with_the_run_is_loaded(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("COOKBOOK", str(tmp_path))
    for name in ("plugins.rl.slurm.samplers:SamplerProcesses", "no.such:Thing"):
        with pytest.raises(ImportError):
            companion.load(name, tmp_path)
    monkeypatch.setenv("COOKBOOK", str(ROOT))
    assert companion.load("plugins.engines.slurm.engine:Follower", tmp_path).run_dir == tmp_path
