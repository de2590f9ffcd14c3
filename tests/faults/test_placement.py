"""Nodes below switches, with disks of their own: the order of ranks, and copies of the images."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import SlurmCluster, running_cluster
from tests.faults.conftest import user_of
from tests.faults.kit import attempts, ended, processes_of_node
from tests.faults.test_image import small  # noqa: F401  a fixture
from tests.faults.test_roles import RUN, reaches, replica, rollout
from tests.launcher.kit import Kit, report, until
from trainer import demo_sums

NEEDS_IMAGES = pytest.mark.skipif(
    bool(os.geteuid())
    # The slurmd of another release comes before the one that is put in its place.
    or "COOKBOOK_TEST_SLURM" in os.environ
    or not os.access("/dev/fuse", os.W_OK)
    or not all(map(shutil.which, ("mksquashfs", "squashfuse"))),
    reason="needs root, the installed Slurm, /dev/fuse, mksquashfs and squashfuse",
)
# Put in place of slurmd: its node mounts a folder of its own at the place of its disk. n4 has no
# room on its disk and no FUSE, and may not mount.
SLURMD = """#!/bin/bash
case " $* " in *" -N "*) ;; *) exec {slurmd} "$@" ;; esac
[ -n "${{INSIDE:-}}" ] || INSIDE=yes exec unshare -m --propagation private bash "$0" "$@"
unset INSIDE
arguments="$* "
node=${{arguments##* -N }} node=${{node%% *}}
mkdir -p {disks}/$node && mount --bind {disks}/$node {disk} || exit
[ $node = n4 ] || exec {slurmd} "$@"
mount -t tmpfs -o size=64k none {disk} || exit
mount --bind {disk}.none /dev/fuse && mount -o remount,bind,ro /dev/fuse || exit
exec setpriv --bounding-set=-sys_admin {slurmd} "$@"
"""
COMMAND = """echo "rank $NODE_RANK on $NODE_NAME, first $HEAD_ADDR"
echo "$NODE_NAME starts from $VIRTUAL_ENV"
for file in {disk}/*; do echo "has ${{file##*-}}"; done
while [ "$NODE_NAME" = n3 ] && [ -e {disks}/deadly ]; do kill -KILL $$; done
while [ -e {disks}/goes_on ]; do sleep 0.2; done
"""


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the disk of each node."""
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "disk").mkdir()
    (folder / "disk.none").touch()
    return folder


@pytest.fixture(scope="module")
def racks(disks: Path) -> Iterator[SlurmCluster]:
    """Four nodes: n1 and n3 below one switch, n2 and n4 below another."""
    path = f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin"
    with pytest.MonkeyPatch.context() as patch:
        if not os.geteuid():
            tools = disks / "tools"
            tools.mkdir()
            slurmd = shutil.which("slurmd", path=path)
            script = SLURMD.format(slurmd=slurmd, disks=disks, disk=disks / "disk")
            (tools / "slurmd").write_text(script)
            (tools / "slurmd").chmod(0o755)
            patch.setenv("PATH", f"{tools}:{path}")
        shape = ("--nodes", "4", "--gpus", "1", "--switches", "2", "--requeue-delay", "5")
        shape += ("--set", "SlurmdTimeout=6")
        with running_cluster("racks", *shape) as cluster:
            yield cluster


@pytest.fixture
def command(disks: Path, tmp_path: Path) -> Iterator[list[str]]:
    """Arguments of a run on two nodes that ends when `goes_on` is removed."""
    place = tmp_path / "recipe"
    place.mkdir()
    program = place / "command.sh"
    program.write_text(COMMAND.format(disk=disks / "disk", disks=disks))
    recipe = place / "waits.yaml"
    recipe.write_text(f"entry: command:bash {program}\nmax_retries: 3\n")
    (disks / "goes_on").touch()
    yield ["--recipe", str(recipe), "--nodes", "2", "--gpus-per-node", "1"]
    for name in ("goes_on", "deadly"):
        (disks / name).unlink(missing_ok=True)


def copies(disks: Path) -> dict[str, list[str]]:
    """The kinds of files on each node's disk."""
    found = {}
    for disk in sorted(disks.glob("n[1-4]")):
        found[disk.name] = sorted(file.name.split("-")[3] for file in disk.iterdir())
    return found


BOTH = ["code", "environment"]


def says(run: Path, text: str) -> bool:
    return any(text in log.read_text() for log in run.glob("logs/**/*.log"))


@pytest.mark.long
def test_ranks_below_one_switch_are_neighbours(
    racks: SlurmCluster, root: Path, disks: Path, command: list[str]
) -> None:
    user = user_of(racks, root)
    _, run = user.submit(*command[:2], "--nodes", "4", "--gpus-per-node", "1")
    (disks / "goes_on").unlink()
    (line,) = ended(user, run, "COMPLETED")
    order = ["n1", "n3", "n2", "n4"]
    assert line["nodes"] == order, report(run)
    for rank, node in enumerate(order):
        log = (run / f"logs/0/node_{rank}.log").read_text()
        assert f"rank {rank} on {node}, first 127.0.0.1\n" in log
    log = (run / "logs/job.log").read_text()
    assert log.count("a switch or block after the other: n1,n3 | n2,n4") == 1, log


@pytest.mark.named
def test_the_log_of_a_node_that_fails_has_its_rank(
    racks: SlurmCluster, root: Path, tmp_path: Path
) -> None:
    """The third node by name has rank 1. Its log was on its own disk."""
    program = "echo Traceback on $NODE_NAME; [ $NODE_NAME != n3 ] || exit 1; sleep 60"
    (tmp_path / "command.sh").write_text(program)
    recipe = tmp_path / "fails.yaml"
    recipe.write_text(f"entry: command:bash {tmp_path}/command.sh\nmax_retries: 0\n")
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "site.yaml").write_text("logs: failing\n")
    user = user_of(racks, root)
    user = replace(user, env={**user.env, "COOKBOOK_CLUSTERS": str(tmp_path / "sites")})
    shape = ["--nodes", "4", "--gpus-per-node", "1", "--cluster", "site"]
    _, run = user.submit("--recipe", str(recipe), *shape)
    ended(user, run, "FAILED")
    log = (run / "logs/0/node_1.log").read_text()
    assert "[1] Traceback on n3" in log, report(run)


@pytest.fixture
def copying(racks: SlurmCluster, root: Path, disks: Path, small: Path, tmp_path: Path) -> Kit:  # noqa: F811
    """A user whose nodes copy the images to their disks."""
    site = f"start_from: image\ncopy_images_to: {disks}/disk\n"
    (tmp_path / "site.yaml").write_text(site)
    user = user_of(racks, root)
    own = {"COOKBOOK_CLUSTERS": str(tmp_path), "COOKBOOK_VENV": str(small)}
    return replace(user, env={**user.env, **own})


@pytest.mark.named
@NEEDS_IMAGES
def test_a_node_that_is_replaced_loses_its_copies(
    copying: Kit, disks: Path, command: list[str]
) -> None:
    (disks / "deadly").touch()
    _, run = copying.submit(*command, "--cluster", "site", "resources.spare_nodes=1")
    until(lambda: len(attempts(run)) == 2 and says(run, "rank 1 on n2"), 60, lambda: report(run))
    until(lambda: copies(disks)["n3"] == [], 20, lambda: f"{copies(disks)}")
    assert copies(disks) == {"n1": BOTH, "n2": BOTH, "n3": [], "n4": []}
    (disks / "goes_on").unlink()
    ended(copying, run, "COMPLETED")
    assert not any(copies(disks).values())
    # They were there before the ranks.
    for rank in (0, 1):
        assert (run / f"logs/2/node_{rank}.log").read_text().count("has ") == 2
    assert not says(run, "shared filesystem")


@pytest.mark.long
@NEEDS_IMAGES
@pytest.mark.parametrize("when", ["sent", "used"])
def test_a_cancelled_job_leaves_no_copies(
    copying: Kit, disks: Path, command: list[str], when: str
) -> None:
    if when == "sent":
        # Each block is a message of its own to each node.
        command = [*command, "+env.SBCAST_SIZE=256"]
    job, run = copying.submit(*command, "--cluster", "site")
    if when == "sent":
        until(lambda: any(disks.glob("n3/*.part")), 60, lambda: report(run))
    else:
        until(lambda: says(run, "rank 1 on n3"), 60, lambda: report(run))
        assert copies(disks) == {"n1": BOTH, "n2": [], "n3": BOTH, "n4": []}
    done = subprocess.run(["scancel", job], env=copying.env, check=False)
    assert done.returncode == 0
    ended(copying, run, "CANCELLED")
    until(lambda: not any(copies(disks).values()), 20, lambda: f"{copies(disks)}")


@pytest.mark.long
@NEEDS_IMAGES
def test_the_time_limit_stops_copying_and_the_job_is_requeued(
    copying: Kit, disks: Path, command: list[str]
) -> None:
    job, run = copying.submit(*command, "--cluster", "site", "+env.SBCAST_SIZE=256")
    until(lambda: any(disks.glob("n3/*.part")), 60, lambda: report(run))
    warning = ["scancel", "--batch", "--signal=USR1", job]
    subprocess.run(warning, env=copying.env, check=True)
    until(lambda: attempts(run), 30, lambda: report(run))
    until(lambda: not any(copies(disks).values()), 20, lambda: f"{copies(disks)}")
    (line,) = attempts(run)
    assert (line["cause"], line["gained"]) == ("time_limit", False), report(run)
    assert not says(run, "rank 0 on")
    assert copying.cookbook("cancel", run.name).returncode == 0
    ended(copying, run, "CANCELLED")


@NEEDS_IMAGES
@pytest.mark.long
def test_nodes_fall_back_one_by_one(
    copying: Kit,
    small: Path,  # noqa: F811
    disks: Path,
    command: list[str],
    tmp_path: Path,
) -> None:
    """A node without room and FUSE, and then an image that is damaged after it was made."""
    (disks / "goes_on").unlink()
    root = tmp_path / "shared"
    user = Kit({**copying.env, "COOKBOOK_ROOT": str(root)}, root)
    run = [*command[:2], "--nodes", "4", "--gpus-per-node", "1", "--cluster", "site"]
    _, first = user.submit(*run)
    ended(user, first, "COMPLETED")
    for rank, node in enumerate(("n1", "n3", "n2", "n4")):
        log = (first / f"logs/0/node_{rank}.log").read_text()
        falls_back = node == "n4"
        assert (f"{node} starts from {small}\n" in log) == falls_back, log
        assert ("one by one: it has no squashfuse with /dev/fuse" in log) == falls_back, log
        # The other nodes have copies all the same.
        assert ("it has no copy in" in log) == falls_back, log
    log = (first / "logs/job.log").read_text()
    assert re.search(r"not every node has a copy of .*: node n4 has 0 MiB free there", log), log
    (image,) = root.glob("images/environment-*.sqsh")
    os.truncate(image, image.stat().st_size // 2)
    _, second = user.submit(*run)
    ended(user, second, "COMPLETED")
    for log in second.glob("logs/0/node_*.log"):
        assert f"starts from {small}\n" in log.read_text()
        assert "is damaged: remove it, and cookbook submit makes it again" in log.read_text()
    assert not any(copies(disks).values())
    assert not [line for line in Path("/proc/mounts").read_text().splitlines() if str(root) in line]


@pytest.mark.named
@NEEDS_IMAGES
def test_rollout_nodes_have_copies_before_their_replicas(
    copying: Kit, root: Path, disks: Path
) -> None:
    demo_sums.make(root / "models/demo-sums", steps=40)
    _, run = copying.submit(*RUN, "resources.rollout=1", "--cluster", "site")
    reaches(run, 10)
    assert copies(disks) == {"n1": BOTH, "n2": [], "n3": BOTH, "n4": []}
    os.kill(replica(run), signal.SIGKILL)
    until(lambda: rollout(run)["deaths"], 30, lambda: report(run))
    reaches(run, 30)
    environ = Path(f"/proc/{replica(run)}/environ").read_text()
    assert "/environment/small" in environ.partition("VIRTUAL_ENV=")[2].partition("\0")[0]
    ended(copying, run, "COMPLETED")
    assert not any(copies(disks).values())
    assert not says(run, "shared filesystem") and not says(run, "one by one")


@pytest.mark.named
@NEEDS_IMAGES
def test_a_spare_node_gets_copies_when_it_is_taken(
    copying: Kit, racks: SlurmCluster, disks: Path, command: list[str]
) -> None:
    job, run = copying.submit(*command, "--cluster", "site", "resources.spare_nodes=1")
    until(lambda: says(run, "rank 1 on n3"), 60, lambda: report(run))
    assert copies(disks)["n2"] == []
    for pid in processes_of_node("n3", job, racks.state):
        os.kill(pid, signal.SIGKILL)
    until(lambda: says(run, "rank 1 on n2"), 120, lambda: report(run))
    assert (copies(disks)["n1"], copies(disks)["n2"]) == (BOTH, BOTH)
    (disks / "goes_on").unlink()
    lost, second = ended(copying, run, "COMPLETED")
    assert (lost["cause"], second["nodes"]) == ("node_failure", ["n1", "n2"])
    until(lambda: copies(disks)["n1"] == copies(disks)["n2"] == [], 20)
    racks.start_dead_daemons()
