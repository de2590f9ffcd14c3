"""The trainer on the null GPU: GPU code paths and their memory on a machine without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks import null_gpu
from benchmarks.null_gpu import __main__ as command
from launcher.recipes import recipe as recipes
from launcher.sizing.memory import StepMemory
from launcher.sizing.recipe_step import step_of

ROOT = Path(null_gpu.__path__[0]).parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess:
    """`python -m benchmarks.null_gpu` with these arguments."""
    line = [sys.executable, "-m", "benchmarks.null_gpu", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True)


def test_a_missing_requirement_is_reported() -> None:
    assert run().returncode == run("--help").returncode == 2
    if reason := command.missing():
        done = run(sys.executable, "-c", "raise SystemExit('not reached')")
        assert (done.returncode, done.stderr) == (1, f"error: {reason}\n")


@pytest.mark.long
@pytest.mark.skipif(command.missing() is not None, reason=str(command.missing()))
def test_the_trainer_runs_as_on_a_gpu(tmp_path: Path) -> None:
    never_stop = "max_non_finite_steps=9223372036854775807"
    options = ["--device", "cuda", "--dtype", "bf16", "--steps", "2", "--out", str(tmp_path)]
    options += ["--workload", "tiny_full", "tiny_lora", "tiny_qlora", "--budget-s", "900"]
    peers = [f"ours:{never_stop}", f"ours:{never_stop}:activation_checkpointing=true"]
    # The exit status is not checked: losses on the null GPU mean nothing.
    run(sys.executable, "-m", "benchmarks.train", *options, "--peers", *peers)
    for workload in json.loads((tmp_path / "train.json").read_text())["workloads"]:
        plain, recomputed = workload["rows"]
        assert plain["status"] == recomputed["status"] == "ok"
        assert plain["peak_allocated_gib"] > recomputed["peak_allocated_gib"] > 0


def _has_experts(name: str) -> bool:
    """Ranks read from the device how many rows go where; the null GPU computes nothing."""
    loaded = recipes.load(name)
    config = loaded.resolved(Path("models"), "run")
    step = step_of(config, loaded.resources.nodes, loaded.resources.gpus_per_node)
    return step.shape.experts is not None


@pytest.mark.long
@pytest.mark.skipif(command.missing() is not None, reason=str(command.missing()))
@pytest.mark.parametrize("name", [name for name in recipes.names() if not _has_experts(name)])
def test_the_estimate_matches_the_cuda_allocator(name: str, tmp_path: Path) -> None:
    """One GPU of each unchanged recipe, layers compiled; docs/memory.md has the figures."""
    loaded = recipes.load(name)
    config = loaded.train_config(tmp_path, str(tmp_path / "run"))
    file, shape = tmp_path / "train.yaml", loaded.resources
    file.write_text(yaml.safe_dump(config))
    command_line = [sys.executable, "-m", "tests.benchmarks.allocated", str(file)]
    done = run(*command_line, str(shape.world_size))
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout.splitlines()[-1])["peak"]
    step = step_of(config, shape.nodes, shape.gpus_per_node)
    assert StepMemory(step).peak == pytest.approx(counted, rel=0.05)
