"""slurm/dev-cluster/cluster.sh --release: other releases of Slurm, from Debian's packages."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.test_dev_cluster import cluster_sh, processes_of, wait_for


@pytest.mark.parametrize(
    "arguments", [["up", "--release", "21.08"], ["up", "--release", "24.11; id"]]
)
def test_an_unknown_release_is_refused_with_the_list(arguments: list[str]) -> None:
    answer = cluster_sh(*arguments)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr == (
        f"cluster.sh: --release must be one of 22.05 24.11 26.05, got '{arguments[-1]}' "
        "(see cluster.sh up --help)\n"
    )


def test_a_release_that_cannot_be_downloaded_leaves_nothing(
    cluster_root: Path, tmp_path: Path, plain_env
) -> None:
    (tmp_path / "apt-get").write_text('#!/bin/sh\necho "E: no network"\nexit 100\n')
    (tmp_path / "apt-get").chmod(0o755)
    env = plain_env | {
        "XDG_CACHE_HOME": str(cluster_root / "cache"),
        "PATH": f"{tmp_path}:{plain_env['PATH']}",
    }
    release = next(name for name in ("24.11", "26.05") if name not in installed_slurm())
    up = cluster_sh("up", "--state", cluster_root, "--release", release, env=env)
    assert up.returncode == 1
    assert up.stderr.startswith(f"cluster.sh: cannot make Slurm {release}: Debian's ")
    assert ": E: no network; see " in up.stderr
    assert len(up.stderr.splitlines()) == 1
    kept = [entry.name for entry in (cluster_root / "cache" / "slurm-cookbook").iterdir()]
    assert sorted(kept) == [".lock", f"slurm-{release}.log"]
    assert processes_of(cluster_root) == {}


def installed_slurm() -> str:
    slurmctld = shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin") or "false"
    return subprocess.run([slurmctld, "-V"], capture_output=True, text=True).stdout


@pytest.mark.long
@pytest.mark.parametrize("release", ["22.05", "24.11", "26.05"])
def test_another_release_runs_steps_in_the_hosts_environment(
    cluster_root: Path, tmp_path: Path, new_cluster, release: str
) -> None:
    options = ["--name", release.replace(".", "-"), "--state", str(cluster_root)]
    try:
        with new_cluster(options[1], "--release", release) as cluster:
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
            # A shell that goes from one release to another has only one's commands.
            again = cluster_sh(
                "env",
                *options,
                env=cluster.env | {"PATH": f"/x/slurm-cookbook/slurm-9/bin:{cluster.env['PATH']}"},
            )
            path = again.stdout.splitlines()[1].partition("=")[2].split(":")
            assert sum("slurm-cookbook" in folder for folder in path) == (
                release not in installed_slurm()
            )
            # Another `up` in a shell that uses this release does not take it for the installed one.
            other = cluster_sh("up", *options, env=cluster.env)
            assert (other.returncode == 1) is (release not in installed_slurm()), other.stderr
    except pytest.fail.Exception as failure:
        missing = ("cannot be read", "cannot be downloaded", "' now", "apt-get")
        if any(words in str(failure) for words in missing):
            pytest.skip(f"Slurm {release} is neither kept nor can it be downloaded")
        raise
    assert processes_of(cluster_root) == {}
