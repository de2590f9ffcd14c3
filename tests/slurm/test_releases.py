"""tests/slurm/release.sh: other releases of Slurm, from Debian's packages."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.test_dev_cluster import processes_of, wait_for


@pytest.mark.long
@pytest.mark.parametrize("release", ["22.05", "24.11", "26.05"])
def test_another_release_runs_steps_in_the_hosts_environment(
    cluster_root: Path, tmp_path: Path, new_cluster, release: str
) -> None:
    try:
        with new_cluster(release.replace(".", "-"), "--release", release) as cluster:
            assert f" {release}." in cluster.run(["sinfo", "--version"]).stdout
            # Job steps have this release's commands, and otherwise the host's programs.
            step = "import os, sys; print(sys.prefix, *(k for k in os.environ if k[:3] == 'LD_'))"
            argv = [sys.executable, "-c", step]
            host = subprocess.run(argv, env=cluster.env, capture_output=True, text=True).stdout
            ran = cluster.run(["srun", "--nodes=2", "--gpus-per-node=8", *argv])
            assert (ran.returncode, ran.stdout) == (0, 2 * host), ran.stderr
            job = "srun --nodes=2 sh -c 'srun --version; exec sleep 600'"
            batch = ["sbatch", "--parsable", "--nodes=2", "--export=PATH", "--output=out"]
            job_id = cluster.run([*batch, f"--wrap={job}"], cwd=tmp_path).stdout.strip()
            wait_for(
                lambda: (tmp_path / "out").exists() and release in (tmp_path / "out").read_text()
            )
            assert cluster.run(["scancel", job_id]).returncode == 0
            wait_for(lambda: "CANCELLED" in cluster.run(["scontrol", "show", "job", job_id]).stdout)
    except pytest.fail.Exception as failure:
        missing = ("cannot be read", "cannot be downloaded", "' now", "apt-get")
        if any(words in str(failure) for words in missing):
            pytest.skip(f"Slurm {release} is neither kept nor can it be downloaded")
        raise
    assert processes_of(cluster_root) == {}
