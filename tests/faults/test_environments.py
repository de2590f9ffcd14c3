"""The same recipe in each kind of environment: killed, out of time, resumed, cancelled, served."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import paths
from runspec import files
from runspec.keys.environment import CONTAINERS
from tests.conftest import SlurmCluster, running_cluster
from tests.faults import containers
from tests.faults.conftest import user_of
from tests.faults.kit import SHORT, attempts, ended, rank, trains
from tests.launcher.kit import Kit, command, processes_of, ranks_of, report, until

SHORTEST = ("pyxis", "apptainer")
KINDS = ("venv", "modules", "pyxis", "apptainer")

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not containers.SPANK.exists() or not shutil.which("gcc"),
    reason="the containers of the tests need root, gcc and libslurm-dev",
)


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    """A folder with an image, and all that the kinds need."""
    place = tmp_path_factory.mktemp("kinds")
    containers.make(place)
    (place / "modules").mkdir()
    (place / "modules/llm").write_text(f"#%Module1.0\nprepend-path PATH {sys.prefix}/bin\n")
    return place


@pytest.fixture(scope="session")
def pyxis(place) -> Iterator[SlurmCluster]:
    """A cluster with the plugin."""
    options = ("--requeue-delay", "5", "--set", f"PlugStackConfig={containers.plugin(place)}")
    with running_cluster("kinds", *options) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def user(pyxis, root, place) -> Kit:
    user = user_of(pyxis, root)
    return Kit({**user.env, "PATH": f"{place / 'bin'}:{user.env['PATH']}"}, user.root)


def block(kind: str, place: Path) -> str:
    """The environment of a kind, in which the kit's own packages are found."""
    base = Path(os.path.realpath(sys.executable)).parent.parent
    binds = json.dumps(["/usr:/usr:ro", *map(str, (base, sys.prefix, paths.REPO_ROOT))])
    image = f"image: {place}/image, python: {sys.prefix}/bin/python, binds: {binds}"
    # Apptainer itself if it is installed; the stand-in comes first in the user's PATH.
    apptainer = shutil.which("apptainer") or "apptainer"
    own = {
        "venv": f"python: {sys.prefix}/bin/python",
        "modules": f"setup: [export MODULEPATH={place}/modules], modules: [llm]",
        "apptainer": f"{image}, setup: [export APPTAINER={apptainer}]",
    }
    named = "venv" if kind == "modules" else kind
    return f"+environment={{kind: {named}, {own.get(kind, image)}}}"


@pytest.mark.named
@pytest.mark.parametrize("kind", KINDS)
def test_the_losses_are_those_of_an_uninterrupted_run(kind, user, pyxis, place, undisturbed):
    job, run = user.submit(*SHORT, block(kind, place))
    trains(run)
    os.kill(rank(run, 1), signal.SIGKILL)
    until(lambda: (run / "logs" / "1" / files.HEARTBEAT).exists(), 120, lambda: report(run))
    pyxis.run(["scancel", "--batch", "--signal=USR1", job])
    lines = ended(user, run, "COMPLETED", timeout=240)
    assert [line["cause"] for line in lines] == ["killed", "time_limit", "finished"], report(run)
    assert [line["restart_count"] for line in lines] == [0, 0, 1]
    undisturbed.is_equalled_by(run)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.long if kind in SHORTEST else pytest.mark.named)
        for kind in KINDS
    ],
)
def test_nothing_is_left_after_scancel(kind, user, pyxis, place, record_property):
    job, run = user.submit(*SHORT, "--name", kind, block(kind, place))
    trains(run)
    pyxis.run(["scancel", job])
    began = time.monotonic()
    until(lambda: not pyxis.run(["squeue", "--noheader", "--jobs", job]).stdout, 60)
    took, left = time.monotonic() - began, [command(pid) for pid in processes_of(run)]
    until(lambda: not processes_of(run), 60, lambda: f"left over: {processes_of(run)}")
    took_all = time.monotonic() - began
    line = (
        f"{kind}: out of the queue after {took:.1f} s; the last process ended by {took_all:.1f} s"
    )
    record_property("cancel", line)
    print(line)
    assert not left, f"{line}: {left}"
    assert user.status(run)["state"] == "CANCELLED" and len(attempts(run)) == 1


@pytest.mark.named
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_serves_from_it_and_nothing_is_left(kind, user, place, model):
    # The shared folder is always bound.
    shared = shutil.copytree(model, user.root / "models" / kind)
    started = user.cookbook("serve", str(shared), "--name", kind, block(kind, place))
    assert started.returncode == 0, started.stderr
    run = next(run for run in user.runs() if f"-serve-{kind}-" in run.name)
    (engine,) = processes_of(run, "plugins.serve.transformers_backend")
    roots = {os.stat(f"/proc/{pid}/root/etc").st_ino for pid in (engine, os.getpid())}
    assert len(roots) == 1 + (kind in CONTAINERS), "the engine has the image's files"
    (front,) = ranks_of(run, "plugins.serve.server").values()
    assert os.stat(f"/proc/{front}/root/etc").st_ino == os.stat("/etc").st_ino
    asked = user.cookbook("query", kind, "What is a partition?")
    assert asked.returncode == 0, asked.stderr
    user.cookbook("serve", "--stop", kind)
    until(lambda: not processes_of(run), 60, lambda: f"left over: {processes_of(run)}")
