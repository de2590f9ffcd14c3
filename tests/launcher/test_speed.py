"""The command stays quick: the committed benchmark, held to its targets."""

import subprocess
import sys

import pytest

from launcher import paths


@pytest.mark.alone
def test_the_benchmark_meets_its_targets(kit):
    done = subprocess.run(
        [sys.executable, paths.REPO_ROOT / "benchmarks" / "launcher.py", "--check"],
        env=kit.env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cookbook submit minus sbatch" in done.stdout, done.stderr
