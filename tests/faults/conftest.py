"""A cluster, its user and an undisturbed run, which the tests of this folder share."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import paths
from tests.conftest import SlurmCluster
from tests.faults.kit import SHORT, Undisturbed
from tests.launcher.kit import Kit, report


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("faults")


def user_of(cluster: SlurmCluster, root: Path) -> Kit:
    """A user of a cluster whose runs are in root."""
    env = {key: value for key, value in cluster.env.items() if not key.startswith("COOKBOOK_")}
    env |= {"COOKBOOK_ROOT": str(root), "XDG_CACHE_HOME": str(root / "cache")}
    return Kit(env, root)


@pytest.fixture(scope="session")
def user(slurm, root) -> Kit:
    return user_of(slurm, root)


@pytest.fixture(scope="session")
def undisturbed(user: Kit) -> Iterator[Undisturbed]:
    """The short run without a fault: what the disturbed ones must end like."""
    _, run = user.submit(*SHORT)
    told = user.wait(run, "COMPLETED", "FAILED", "CANCELLED", "INTERRUPTED")
    assert told["state"] == "COMPLETED", report(run)
    log = (run / "logs" / "0" / "rank_0.log").read_text()
    assert "WorkerServer" not in log, "torch's server for the watchdog is no news to the user"
    return Undisturbed(run)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A tiny model that has learnt nothing."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    data = paths.REPO_ROOT / "configs" / "datasets" / "slurm_qa.jsonl"
    argv = [sys.executable, "-m", "trainer.demo", str(folder), "--dataset", str(data)]
    subprocess.run(argv, check=True, capture_output=True)
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for a run of a script under bash, without Slurm."""
    monkeypatch.setenv("COOKBOOK_ROOT", str(tmp_path / "shared"))
    return tmp_path
