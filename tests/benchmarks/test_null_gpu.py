"""The trainer on a GPU that computes nothing: GPU paths and their memory where there is no GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks import null_gpu
from benchmarks.null_gpu import __main__ as command
from launcher import estimate as estimates
from launcher import recipe as recipes
from launcher.memory import Estimate

ROOT = Path(null_gpu.__path__[0]).parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess:
    """`python -m benchmarks.null_gpu` with these arguments."""
    line = [sys.executable, "-m", "benchmarks.null_gpu", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True)


def test_what_is_missing_is_said() -> None:
    assert run().returncode == run("--help").returncode == 2
    if lack := command.missing():
        done = run(sys.executable, "-c", "raise SystemExit('not reached')")
        assert (done.returncode, done.stderr) == (1, f"error: {lack}\n")


@pytest.mark.long
@pytest.mark.skipif(command.missing() is not None, reason=str(command.missing()))
def test_the_trainer_runs_as_on_a_gpu(tmp_path: Path) -> None:
    endless = "max_non_finite_steps=9223372036854775807"
    compared = ["--device", "cuda", "--dtype", "bf16", "--steps", "2", "--out", str(tmp_path)]
    compared += ["--workload", "tiny_full", "tiny_lora", "tiny_qlora", "--budget-s", "900"]
    peers = [f"ours:{endless}", f"ours:{endless}:activation_checkpointing=true"]
    # Its status is 1, as no two curves of what the memory held are the same.
    run(sys.executable, "-m", "benchmarks.train", *compared, "--peers", *peers)
    for workload in json.loads((tmp_path / "train.json").read_text())["workloads"]:
        plain, recomputed = workload["rows"]
        assert plain["status"] == recomputed["status"] == "ok"
        assert plain["peak_allocated_gib"] > recomputed["peak_allocated_gib"] > 0


@pytest.mark.long
@pytest.mark.skipif(command.missing() is not None, reason=str(command.missing()))
@pytest.mark.parametrize("name", recipes.names())
def test_the_estimate_is_what_the_allocator_counts(name: str, tmp_path: Path) -> None:
    """One GPU of each recipe as it stands, its layers compiled; docs/memory.md has the figures."""
    loaded = recipes.load(name)
    config = loaded.train_config(tmp_path, str(tmp_path / "run"))
    file, shape = tmp_path / "train.yaml", loaded.resources
    file.write_text(yaml.safe_dump(config))
    counting = [sys.executable, "-m", "tests.benchmarks.allocated", str(file)]
    done = run(*counting, str(shape.world_size))
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout.splitlines()[-1])["peak"]
    plan = estimates.plan_of(config, shape.nodes, shape.gpus_per_node)
    assert Estimate(plan).peak == pytest.approx(counted, rel=0.05)
