"""A run whose nodes start from images: what they mount, what is left, and what else they use."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import venv
from launcher.errors import PreflightFault
from launcher.runs import image
from launcher.runs.code import Code
from tests.faults.kit import SHORT, Undisturbed, ended, rank, trains
from tests.launcher.kit import Kit, report, until

ROOT = Path(__file__).parents[2]
MISSING = [name for name in ("mksquashfs", "squashfuse") if not shutil.which(name)]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}"),
    pytest.mark.skipif(not os.access("/dev/fuse", os.W_OK), reason="needs /dev/fuse"),
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that finds this one's packages: its image is small."""
    folder = tmp_path_factory.mktemp("venv") / "small one"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "own.py").touch()
    (packages / "these.pth").write_text(f"{venv.site_packages()}\nimport own\n")
    return folder


@pytest.fixture(scope="module")
def images(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A shared folder with the images of `small` and of a code folder; its environment's image."""
    root = tmp_path_factory.mktemp("images")
    code = Code(root / "code" / "abc")
    (code.folder / "slurm").mkdir(parents=True)
    (code.folder / "slurm" / "file.py").write_text("VALUE = 1\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COOKBOOK_VENV", str(small))
        said: list[str] = []
        image.ensure(root, code, said.append)
        file = image.environment_file(root)
        assert file.is_file() and len(said) == 4
        image.ensure(root, code, said.append)
        assert len(said) == 4
    yield file


def start(images: Path, folder: Path, path: str | None = None) -> list[str]:
    """VENV and COOKBOOK after slurm/image.sh, and the note, as node.sh would have them."""
    script = (
        f'source "{ROOT}/slurm/image.sh"; start_from_images "{folder}/1.0.0"; '
        'echo "$VENV"; echo "$COOKBOOK"; '
        '"$VENV/bin/python" -c "import sys, torch; print(sys.prefix)"'
    )
    done = subprocess.run(
        ["bash", "-c", script],
        env=node_of(images, path),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def node_of(images: Path, path: str | None = None) -> dict[str, str]:
    """The environment of slurm/node.sh."""
    own = {"ENV_IMAGE": str(images), "VENV": sys.prefix, "NODE_NAME": "n1"}
    own |= {"COOKBOOK": str(images.parents[1] / "code" / "abc"), "PATH": path or os.environ["PATH"]}
    return {**os.environ, **own}


def mounts(folder: Path) -> list[str]:
    return [line for line in Path("/proc/mounts").read_text().splitlines() if str(folder) in line]


def test_python_starts_from_the_image_and_is_unmounted_with_the_node(
    images: Path, tmp_path: Path
) -> None:
    environment, code, prefix = start(images, tmp_path)
    assert Path(environment).is_relative_to(tmp_path) and prefix == environment
    assert code == f"{tmp_path}/1.0.0/code"
    # The next attempt's node unmounts what is left; here the loop does, within its two seconds.
    subprocess.run(["bash", "-c", f'sleep 3; source "{ROOT}/slurm/image.sh"; true'], check=True)
    assert not mounts(tmp_path) and not any(tmp_path.iterdir())


def test_a_node_that_is_killed_with_its_children_leaves_no_mount(
    images: Path, tmp_path: Path
) -> None:
    """As proctrack/linuxproc of Slurm kills a step: what descends from its task, and no more."""
    script = f'source "{ROOT}/slurm/image.sh"; start_from_images "{tmp_path}/1.0.0"; echo; '
    argv = ["bash", "-c", f"{script} exec sleep 600"]
    node = subprocess.Popen(argv, env=node_of(images), stdout=subprocess.PIPE)
    assert node.stdout and node.stdout.readline() == b"\n" and len(mounts(tmp_path)) == 2
    listed = subprocess.check_output(["ps", "-eo", "pid=,ppid="], text=True).splitlines()
    parents = dict(map(int, line.split()) for line in listed)
    tree = [node.pid]
    for pid in tree:
        tree += [child for child, parent in parents.items() if parent == pid]
    for pid in tree:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    node.wait()
    until(lambda: not mounts(tmp_path), 20)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        ("cut", "is damaged: remove it"),
        ("gone", "it cannot read"),
        ("tools", "no squashfuse"),
        ("refused", "no squashfuse with /dev/fuse, and may not mount"),
        ("full", "it cannot make"),
    ],
)
def test_a_node_that_cannot_mount_opens_the_files_and_says_why(
    images: Path, tmp_path: Path, harm: str, reason: str, request: pytest.FixtureRequest
) -> None:
    file, path = tmp_path / "image.sqsh", None
    if harm == "cut":
        file.write_bytes(images.read_bytes()[: 2**20])
    elif harm == "full":
        file = images
        small_disk(tmp_path / "mounts", "nr_inodes=1", request)
    elif harm in ("tools", "refused"):
        # Nor may this user mount it by the kernel.
        file, path = images, str(tmp_path / "bin")
        Path(path).mkdir()
        for name in (
            "bash",
            "readlink",
            "od",
            "head",
            "tr",
            "stat",
            "mkdir",
            "rmdir",
            "rm",
            "sleep",
        ):
            Path(path, name).symlink_to(str(shutil.which(name)))
        if harm == "refused":
            program = Path(path, "squashfuse")
            program.write_text(
                "#!/bin/bash\necho fusermount3: mount failed: not permitted >&2\nexit 1\n"
            )
            program.chmod(0o755)
    note, environment, _, prefix = start(file, tmp_path / "mounts", path)
    assert reason in note and "opens the files of" in note
    assert environment == prefix == sys.prefix
    assert not mounts(tmp_path / "mounts" / "1.0.0")


def _without_mounting(folder: Path) -> Path:
    """A PATH with this host's programs, but for those that mount."""
    folder.mkdir()
    for program in [*Path("/usr/bin").iterdir(), *Path("/bin").iterdir()]:
        link = folder / program.name
        if not program.name.startswith(("mount", "squashfuse")) and not link.is_symlink():
            link.symlink_to(program)
    # Of the programs that begin with "mount" this one only tells what is mounted.
    (folder / "mountpoint").symlink_to(str(shutil.which("mountpoint")))
    return folder


def test_a_node_mounts_by_what_apptainer_has_beside_itself(images: Path, tmp_path: Path) -> None:
    programs = _without_mounting(tmp_path / "bin")
    note, environment, *_ = start(images, tmp_path / "mounts", str(programs))
    assert "opens the files of" in note and environment == sys.prefix
    installed = tmp_path / "opt"
    own = installed / "libexec" / "apptainer" / "bin" / "squashfuse_ll"
    own.parent.mkdir(parents=True)
    own.symlink_to(str(shutil.which("squashfuse")))
    (installed / "bin").mkdir()
    (installed / "bin" / "apptainer").write_text("#!/bin/sh\n")
    (installed / "bin" / "apptainer").chmod(0o755)
    (programs / "apptainer").unlink(missing_ok=True)
    (programs / "apptainer").symlink_to(installed / "bin" / "apptainer")
    environment, _, prefix = start(images, tmp_path / "again", str(programs))
    assert Path(environment).is_relative_to(tmp_path) and prefix == environment


def test_a_node_that_cannot_mount_its_copy_unpacks_it(
    images: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Once for all that start there in a job, if there is room; the job's end removes it."""
    code = images.with_name(f"code-{images.parents[1].joinpath('code', 'abc').name}.sqsh")
    programs = _without_mounting(tmp_path / "bin")
    disk = tmp_path / "disk"
    disk.mkdir()
    prefix = f"cookbook-{os.geteuid()}-7-"
    for file in (images, code):
        shutil.copy(file, disk / f"{prefix}{file.name}")

    def starts(count: int, disk: Path = disk) -> list[tuple[list[str], str]]:
        own = {"COPY_IMAGES_TO": str(disk), "SLURM_JOB_ID": "7"}
        script = f'source "{ROOT}/slurm/image.sh"; start_from_images "{tmp_path}/mounts/$0"; '
        script += 'echo "$VENV"; echo "$COOKBOOK"; "$VENV/bin/python" -c "import torch"'
        started = [
            subprocess.Popen(
                ["bash", "-c", script, str(number)],
                env={**node_of(images, str(programs)), **own},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(count)
        ]
        return [(out.splitlines(), err) for out, err in (each.communicate() for each in started)]

    found = starts(2)
    for (environment, kit), _ in found:
        assert Path(environment).parent == disk / f"{prefix}{images.name}.d"
        assert Path(kit) == disk / f"{prefix}{code.name}.d"
        # A folder of a week is removed by the next job.
        for place in (Path(environment).parent, Path(kit)):
            assert time.time() - place.stat().st_mtime < 600
    notes = "".join(err for _, err in found)
    for file in (images, code):
        assert notes.count(f"cookbook: node n1 unpacked {prefix}{file.name} in ") == 1
    assert notes.count("s: it has no squashfuse with /dev/fuse, and may not mount") == 2
    ((again, note),) = starts(1)
    assert again == found[0][0] and not note
    end = ["bash", str(ROOT / "slurm/image.sh"), "copies"]
    own = {"COPY_IMAGES_TO": str(disk), "SLURM_JOB_ID": "7"}
    subprocess.run(end, env={**os.environ, **own}, check=True)
    assert not any(disk.iterdir())
    # No disk is filled.
    full = tmp_path / "full"
    small_disk(full, f"size={(images.stat().st_size >> 10) + 64}k", request)
    shutil.copy(images, full / f"{prefix}{images.name}")
    ((lines, note),) = starts(1, full)
    assert re.search(r"does not unpack .*: .*/full has \d+ MiB free, and it needs \d+\n", note)
    assert "opens the files of" in lines[0] and lines[1] == sys.prefix
    assert [file.name for file in full.iterdir()] == [f"{prefix}{images.name}"]


def test_a_copy_that_is_not_whole_is_passed_over(images: Path, tmp_path: Path) -> None:
    """Each node mounts its own copy, or the shared image: another user's file is no copy."""
    copy = tmp_path / f"cookbook-{os.geteuid()}-7-{images.name}"
    whole = images.read_bytes()
    damaged = {"cut": whole[: 2**20], "header": whole[:40], "other": b"x" * len(whole)}
    for name, content in {"whole": whole, **damaged, "none": None}.items():
        copy.unlink(missing_ok=True)
        if content is not None:
            copy.write_bytes(content)
        done = nearest(images, tmp_path)
        assert done.stdout == f"{copy if name == 'whole' else images}\n"
        assert ("reads" in done.stderr) == (name != "whole"), done.stderr
    copy.symlink_to(images)
    done = nearest(images, tmp_path)
    assert (done.stdout, "has no copy" in done.stderr) == (f"{images}\n", True)


def nearest(image: Path, copies: Path) -> subprocess.CompletedProcess[str]:
    """What a node of job 7 mounts for an image, and what it says."""
    own = {"COPY_IMAGES_TO": str(copies), "SLURM_JOB_ID": "7", "NODE_NAME": "n1"}
    return subprocess.run(
        ["bash", "-c", f'source "{ROOT}/slurm/image.sh"; nearest "{image}"'],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
    )


def environs(module: str) -> list[str]:
    """The environments of processes that run a module of the kit."""
    found = []
    for process in processes(f"-m\0{module}\0"):
        with suppress(OSError):
            found.append((process / "environ").read_text())
    return found


def processes(part: str) -> Iterator[Path]:
    """Folders in /proc of processes whose command line has a part, in which \\0 ends a word."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if part in (process / "cmdline").read_text():
                yield process


def small_disk(folder: Path, options: str, request: pytest.FixtureRequest) -> None:
    """Mount a filesystem on which hardly anything has room."""
    if os.geteuid():
        pytest.skip("needs root, to mount a small filesystem")
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=True)
    request.addfinalizer(lambda: subprocess.run(["umount", "-l", folder], check=True))


def test_a_full_disk_leaves_no_part_of_an_image(
    small: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    small_disk(root, "size=256k", request)
    monkeypatch.setenv("COOKBOOK_VENV", str(small))
    with pytest.raises(PreflightFault, match=r"room in|check the disk"):
        image.ensure(root, Code(root / "code" / "abc"), lambda text: None)
    assert [file.name for file in (root / "images").iterdir()] == [".lock"]


def test_an_image_that_starts_slowly_is_made_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python is not in the image, so that it is made fast.
    monkeypatch.setattr(image, "_LOCAL", (Path(sys.base_prefix),))
    folder, code = tmp_path / "without torch", Code(tmp_path / "code" / "abc")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    code.folder.mkdir(parents=True)
    (code.folder / "broken.py").write_text("def\n")
    monkeypatch.setenv("COOKBOOK_VENV", str(folder))
    said: list[str] = []
    image.ensure(tmp_path, code, said.append)
    order, compiled = [line for line in said if "warning" in line]
    assert "not in the order of their use" in order and "No module named 'torch'" in order
    assert "compiled at each start" in compiled and "SyntaxError: invalid syntax" in compiled
    assert image.environment_file(tmp_path).is_file() and image.code_file(tmp_path, code).is_file()


@pytest.mark.named
def test_a_run_whose_images_cannot_be_made_uses_the_shared_files(
    user: Kit, small: Path, tmp_path: Path
) -> None:
    (tmp_path / "site.yaml").write_text("start_from: image\n")
    (tmp_path / "mksquashfs").write_text("#!/bin/sh\necho FATAL ERROR: no room >&2\nexit 1\n")
    (tmp_path / "mksquashfs").chmod(0o755)
    own = {"COOKBOOK_CLUSTERS": str(tmp_path), "COOKBOOK_VENV": str(small)}
    own["PATH"] = f"{tmp_path}:{user.env['PATH']}"
    user = replace(user, env={**user.env, **own})
    done = user.cookbook("submit", "--json", *SHORT, "--cluster", "site")
    assert "warning: the nodes open the files one by one: mksquashfs: FATAL" in done.stderr
    run = Path(json.loads(done.stdout)["path"])
    ended(user, run, "COMPLETED")
    assert "one by one: it cannot read" in (run / "logs/0/node_1.log").read_text()


@pytest.mark.named
def test_nodes_without_room_for_a_copy_mount_the_shared_image(
    user: Kit, small: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    small_disk(tmp_path / "disk", "size=64k,mode=1777", request)
    site = f"start_from: image\ncopy_images_to: {tmp_path}/disk\n"
    (tmp_path / "site.yaml").write_text(site)
    own = {"COOKBOOK_CLUSTERS": str(tmp_path), "COOKBOOK_VENV": str(small)}
    user = replace(user, env={**user.env, **own})
    _, run = user.submit(*SHORT, "--cluster", "site")
    ended(user, run, "COMPLETED")
    assert "not every node has a copy of environment-" in (run / "logs/job.log").read_text()
    log = (run / "logs/0/node_1.log").read_text()
    assert "on the shared filesystem: " in log and "one by one" not in log


def test_a_killed_rank_and_what_is_left_mounted(
    user: Kit, small: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "site.yaml").write_text(
        f"start_from: image\ncopy_images_to: {disk}\nlogs: failing\n"
    )
    own = {"COOKBOOK_CLUSTERS": str(tmp_path), "COOKBOOK_VENV": str(small)}
    user = replace(user, env={**user.env, **own})
    _, run = user.submit(*SHORT, "--cluster", "site")
    trains(run)
    environ = Path(f"/proc/{rank(run, 1)}/environ").read_text()
    assert "/environment/small one" in environ.partition("VIRTUAL_ENV=")[2].partition("\0")[0]
    # From copies that Slurm sent: of the environment and of the code.
    copies = sorted(disk.iterdir())
    assert [file.name.split("-")[3] for file in copies] == ["code", "environment"]
    mounting = processes(f"\0{copies[1]}\0")
    assert any("squashfuse" in (each / "cmdline").read_text() for each in mounting)
    # The job script's own programs, too.
    (environ,) = [each for each in environs("slurm.watchdog") if f"RUN_DIR={run}\0" in each]
    assert re.search(r"(^|\0)PYTHONPATH=\S+/images/\d+\.job/code\0", environ)
    os.kill(rank(run, 1), signal.SIGKILL)
    first, second = ended(user, run, "COMPLETED")
    assert (first["exit_code"] != 0, second["cause"]) == (True, "finished"), report(run)
    for log in run.glob("logs/*/node_*.log"):
        assert "one by one" not in log.read_text()
    # Of the second node there are logs where its rank was killed.
    logs = [sorted(log.name for log in run.glob(f"logs/{k}/*_[01].log")) for k in (0, 1)]
    both = [f"{kind}_{number}.log" for kind in ("node", "rank") for number in (0, 1)]
    first_only = [name for name in both if "_0" in name]
    assert [[n for n in names if n in both] for names in logs] == [both, first_only]
    assert "SIGKILL" in (run / "logs/0/node_1.log").read_text() and first["cause"] == "killed"
    undisturbed.is_equalled_by(run)
    assert not [
        line for line in Path("/proc/mounts").read_text().splitlines() if "/images/" in line
    ]
    assert not any(disk.iterdir())
