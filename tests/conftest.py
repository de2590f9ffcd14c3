"""A real Slurm cluster on this host for every test, and which worker runs what."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

CLUSTER_PY = Path(__file__).parents[1] / "slurm" / "dev-cluster" / "cluster.py"
RELEASE_SH = Path(__file__).parent / "slurm" / "release.sh"
SLURM_VARIABLES = ("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SCANCEL_")


# Ordinary users have no sbin in PATH; cluster.py looks there too.
PROGRAMS = f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin"
NEEDS_ACCOUNTING = pytest.mark.skipif(
    not all(shutil.which(name, path=PROGRAMS) for name in ("slurmdbd", "mariadbd")),
    reason="slurmdbd or mariadbd is not installed: bash setup.sh --test-all installs them",
)


# What takes long, longest first: begun early, so that the workers end at about the same time.
LONGEST = (
    "test_trace.py",
    "faults/",
    "test_runs.py",
    "test_reshard.py",
    "test_train.py",
    "test_layouts.py",
    "test_accounting.py",
    "test_resume.py",
    "launcher/",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many processes run the tests: two, or none beside pytest's own for chosen files.

    A worker starts with all imports and with its own fork server, which a few tests do not repay.
    A third one would slow down the runs on the cluster beyond their time limits.
    """
    chosen = any(".py" in argument for argument in config.args)
    return 0 if chosen or len(os.sched_getaffinity(0)) < 2 else 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests of a file share their fixtures on one worker, those of tests/faults all of them."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return "tests/faults" if path.startswith("tests/faults/") else path

    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers, what takes long goes first."""
    if not hasattr(config, "workerinput"):
        return

    def turn(item: pytest.Item) -> int:
        # Later they would wait for a long test to end, and let no other begin.
        if item.get_closest_marker("alone"):
            return -1
        places = (place for place, part in enumerate(LONGEST) if part in str(item.path))
        return next(places, len(LONGEST))

    items.sort(key=turn)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """No other worker runs a test beside one that is marked `alone`, because it measures time."""
    kind = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    # Locks need files, and these two are there for every worker of this checkout.
    with open(__file__) as door, open(item.config.rootpath / "pyproject.toml") as room:
        # Who waits for an empty room keeps the door shut for all others.
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, kind)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            # Expressly: a process that the test has forked may have the file open too.
            fcntl.flock(room, fcntl.LOCK_UN)


@pytest.fixture(scope="session")
def plain_env() -> dict[str, str]:
    """The tests' own environment less whatever another Slurm put there."""
    return _plain_env()


def _plain_env() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(SLURM_VARIABLES)}


@dataclass(frozen=True)
class SlurmCluster:
    """A running cluster: `env` selects it, `state` holds its configuration and log/."""

    name: str
    root: Path
    env: dict[str, str]
    options: tuple[str, ...] = ()

    @property
    def state(self) -> Path:
        return self.root / self.name

    def run(self, argv: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
        """subprocess.run on this cluster, text captured; raises TimeoutExpired after 60 s."""
        options = {"env": self.env, "timeout": 60, "capture_output": True, "text": True} | options
        return subprocess.run(argv, **options)

    @property
    def controller(self) -> int:
        """The process id of slurmctld."""
        return int((self.state / "slurmctld.pid").read_text())

    def start_dead_daemons(self) -> None:
        """Start the daemons that have died; the others run on."""
        place = ["--name", self.name, "--state", str(self.root)]
        done = self.run([CLUSTER_PY, "up", *place, *self.options], timeout=120)
        assert done.returncode == 0, done.stderr


@contextmanager
def _state_root() -> Iterator[Path]:
    """A temporary folder for clusters' state: short, and open to munged's clients."""
    # pytest's own folders are closed to other users, which munged refuses, and long.
    root = Path(tempfile.mkdtemp(prefix="slurm-test-", dir="/tmp"))
    root.chmod(0o711)
    try:
        yield root
    finally:
        shutil.rmtree(root)


@contextmanager
def _cluster(root: Path, name: str, *options: str) -> Iterator[SlurmCluster]:
    """A cluster for as long as the block lasts, and no longer even if this process is killed."""
    place = ["--name", name, "--state", str(root)]
    env, options = _of_release(options)
    # The keeper takes the cluster down when its input ends, which it does however we end.
    keeper = subprocess.Popen(
        ["bash", "-c", 'cat >/dev/null; exec "$@"', "keeper", CLUSTER_PY, "down", *place],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
        env=env,
    )
    try:
        yield _start(root, name, place, options, env)
    finally:
        _, message = keeper.communicate()
        assert keeper.returncode == 0, message


def _of_release(options: tuple[str, ...]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The environment and options of up; COOKBOOK_TEST_SLURM names another release of Slurm."""
    env = _plain_env()
    if release := os.environ.get("COOKBOOK_TEST_SLURM"):
        made = subprocess.run([RELEASE_SH, release], env=env, capture_output=True, text=True)
        if made.returncode:
            pytest.fail(made.stderr, False)
        if programs := made.stdout.strip():
            env["PATH"] = f"{programs}:{env['PATH']}"
            options = (*options, "--set", f"PluginDir={Path(programs).parent / 'plugins'}")
    return env, options


def _start(
    root: Path, name: str, place: list[str], options: tuple[str, ...], env: dict[str, str]
) -> SlurmCluster:
    up = subprocess.run(
        [CLUSTER_PY, "up", *place, *options], env=env, capture_output=True, text=True, timeout=180
    )
    if up.returncode:
        pytest.fail(f"no Slurm cluster: {up.stderr}`bash setup.sh --test` installs Slurm", False)
    used = subprocess.check_output([CLUSTER_PY, "env", *place], env=env, text=True)
    env = env | {"SLURM_CONF": used.strip().removeprefix("export SLURM_CONF=")}
    return SlurmCluster(name=name, root=root, env=env, options=options)


@pytest.fixture
def cluster_root() -> Iterator[Path]:
    """A temporary folder that cluster.py takes as --state."""
    with _state_root() as root:
        yield root


@pytest.fixture
def new_cluster(
    cluster_root: Path,
) -> Callable[..., AbstractContextManager[SlurmCluster]]:
    """`with new_cluster(name, *options_of_up) as cluster`: one more cluster, under cluster_root."""
    return partial(_cluster, cluster_root)


@contextmanager
def running_cluster(name: str, *options: str) -> Iterator[SlurmCluster]:
    """A cluster in a folder of its own, for fixtures that outlive one test."""
    with _state_root() as root, _cluster(root, name, *options) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """A private cluster of 2 nodes with 8 GPUs each, shared by the whole test session."""
    with running_cluster("tests", "--requeue-delay", "5") as cluster:
        yield cluster
