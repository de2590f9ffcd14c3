"""setup.sh: wrong usage, its lock, and a second run that changes nothing.

The tests run in the environment that setup.sh made, so its creation is tested by every fresh clone.
"""

import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from tests.launcher.kit import until

ROOT = Path(__file__).parents[1]


def setup(*arguments: str, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", ROOT / "setup.sh", *arguments],
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture
def installed() -> dict[str, str]:
    """Selects the environment of the tests, which setup.sh must have made."""
    stamp = Path(sys.prefix) / ".cookbook-setup"
    assert stamp.is_file(), "run the tests through: bash setup.sh --test"
    return {"COOKBOOK_VENV": sys.prefix}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dmeo"], "unknown option '--dmeo'"),
        (["--demo", "--test"], "give one of"),
        (["--torch"], "--torch needs a value"),
        (["--torch", "1.13"], "supports torch 2.11 to 2.15"),
        (["--torch", "2.13.0; rm -rf x"], "supports torch 2.11 to 2.15"),
        (["--with"], "--with needs a name"),
        (["--with", "dev"], "unknown part 'dev': --with accepts "),
        (["--with", ""], "unknown part '': --with accepts "),
        (["--bundle", "x", "--with", "dev"], "unknown part 'dev': --with accepts "),
        (["--bundle", "x", "--demo"], "--bundle installs nothing"),
        (["--bundle", "x", "--python", "3.10"], "--python takes 3.11, 3.12 or 3.13"),
        (["--bundle", "x", "--arch", "arm64"], "--arch x86_64 or aarch64"),
        (["--from"], "--from needs a value"),
        (["--from", "x", "--torch", "cpu"], "the torch that --bundle chose"),
        (["--recipe", "my.yaml"], "are for --bundle FOLDER"),
    ],
)
def test_wrong_usage_is_one_line(arguments, message, tmp_path):
    done = setup(*arguments, COOKBOOK_VENV=str(tmp_path / "venv"))
    assert done.returncode == 2 and message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("/tmp/my venv", "contains a space"),
        ("/proc/nowhere/venv", "set COOKBOOK_VENV to a folder that you own"),
    ],
)
def test_a_folder_that_cannot_be_used_is_named(folder, message):
    done = setup(COOKBOOK_VENV=folder)
    assert done.returncode == 1 and message in done.stderr


def test_an_unsupported_python_is_named(tmp_path):
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\necho 3.9\n")
    old.chmod(0o755)
    done = setup(COOKBOOK_VENV=str(tmp_path / "venv"), COOKBOOK_PYTHON=str(old))
    assert done.returncode == 1
    assert f"{old} is 3.9" in done.stderr and "COOKBOOK_PYTHON" in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("driver", "arguments", "wheel"),
    [
        ("550.54.15, 9.0", [], "whl/cu126 torch==2.13.0+cu126"),
        ("570.86, 10.0", [], "whl/cu128 torch==2.11.0+cu128"),
        ("580.65.06, 9.0", [], None),
        ("550.54.15, 9.0", ["--torch", "cu130"], "whl/cu130 torch==2.13.0+cu130"),
        ("580.65.06, 9.0", ["--torch", "rocm"], "whl/rocm7.2 torch==2.13.0+rocm7.2"),
        ("550.54.15, 9.0", ["--torch", "2.12.0+cu126"], "whl/cu126 torch==2.12.0+cu126"),
        ("550.54.15, 10.0", [], "550.54.15 is too old for its GPUs, of compute capability 10.0"),
        ("470.82.01, 8.0", [], "NVIDIA driver 470.82.01 is too old: torch needs 525 or newer"),
    ],
)
def test_torchs_build_follows_the_driver_or_the_option(driver, arguments, wheel, tmp_path):
    tool = tmp_path / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\necho {driver}\n")
    tool.chmod(0o755)
    path = f"{tool.parent}:{os.environ['PATH']}"
    done = setup("--dry-run", *arguments, COOKBOOK_VENV=str(tmp_path / "venv"), PATH=path)
    assert done.returncode == int("too old" in (wheel or ""))
    assert (wheel or "pip's own build of torch is used, for CUDA 13") in done.stderr
    if wheel is None:
        assert "--index-url" not in done.stderr
    elif not done.returncode:
        assert f"--index-url https://download.pytorch.org/{wheel}\n" in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.fixture
def carried(tmp_path) -> Path:
    """A folder of setup.sh --bundle for this machine, with a file in place of a wheel."""
    folder = tmp_path / "carried"
    (folder / "wheels").mkdir(parents=True)
    (folder / "wheels/a-1-py3-none-any.whl").write_text("a")
    pins = (ROOT / "constraints.txt").read_bytes() + (ROOT / "pyproject.toml").read_bytes()
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    lines = {
        "python": python,
        "arch": platform.machine(),
        "torch": "2.13.0+cu126",
        "pins": hashlib.sha256(pins).hexdigest()[:16],
        "parts": "data",
        "command": f"bash setup.sh --bundle FOLDER --python {python} --arch {platform.machine()}",
    }
    (folder / "bundle.txt").write_text("".join(f"{k} {v}\n" for k, v in lines.items()))
    names = ["bundle.txt", "wheels/a-1-py3-none-any.whl"]
    sums = subprocess.run(["sha256sum", *names], cwd=folder, capture_output=True, text=True)
    (folder / "SHA256SUMS").write_text(sums.stdout)
    return folder


def test_a_folder_of_wheels_is_installed_without_an_index(carried, tmp_path):
    fresh = {"COOKBOOK_VENV": str(tmp_path / "venv"), "COOKBOOK_PYTHON": sys.executable}
    done = setup("--from", str(carried), "--dry-run", **fresh)
    assert done.returncode == 0, done.stderr
    pip = [line for line in done.stderr.splitlines() if line.startswith("+ ")]
    assert pip and all(f"--no-index --find-links {carried}/wheels" in line for line in pip)
    assert pip[-1].endswith("[cluster,data]")


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("bundle.txt", None, "is not a folder of setup.sh --bundle"),
        ("SHA256SUMS", None, "is not complete: repeat where there is network: bash setup.sh"),
        ("bundle.txt", (r"arch \w+", "arch s390x"), "is for s390x, and this machine is"),
        ("bundle.txt", (r"pins \w+", "pins 0"), "is for another version of the kit than"),
        ("bundle.txt", (r"parts data", "parts eval"), "lacks the part data: add it where"),
        ("wheels/a-1-py3-none-any.whl", None, "missing in"),
        ("wheels/a-1-py3-none-any.whl", (r"a", "b"), ": wheels/a-1-py3-none-any.whl: copy"),
        ("wheels/b-1-py3-none-any.whl", (r"$", "b"), ": wheels/b-1-py3-none-any.whl: copy"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_before_anything_is_installed(
    carried, tmp_path, file, change, message
):
    path = carried / file
    if change is None:
        path.unlink()
    else:
        path.write_text(re.sub(*change, path.read_text() if path.exists() else ""))
    fresh = {"COOKBOOK_VENV": str(tmp_path / "venv"), "COOKBOOK_PYTHON": sys.executable}
    done = setup("--from", str(carried), "--with", "data", **fresh)
    assert done.returncode == 1 and message in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1
    assert list(tmp_path.iterdir()) == [carried]


def test_a_folder_for_another_python_is_refused_with_the_command_for_this_one(carried, tmp_path):
    about, other = carried / "bundle.txt", "3.12" if sys.version_info[1] != 12 else "3.13"
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    about.write_text(about.read_text().replace(own, other))
    arguments = ["--from", str(carried)]
    done = setup(*arguments, COOKBOOK_VENV=sys.prefix)
    assert (
        done.returncode == 1 and f"is for Python {other}, and {sys.prefix} has {own}" in done.stderr
    )
    assert f"bash setup.sh --bundle FOLDER --python {own} --arch" in done.stderr
    fresh = {"COOKBOOK_VENV": str(tmp_path / "venv"), "COOKBOOK_PYTHON": sys.executable}
    done = setup(*arguments, **fresh)
    assert done.returncode == 1 and f"is for Python {other}, which" in done.stderr
    assert f"{sys.executable} is {own}" in done.stderr and not (tmp_path / "venv").exists()


def test_a_torch_that_is_there_is_found_by_an_import(tmp_path):
    folder, version = Path(torch.__file__).parents[1], metadata.version("torch")
    bare = tmp_path / "python3"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    env = {"COOKBOOK_VENV": str(tmp_path / "venv")}
    done = setup("--dry-run", "--torch", "system", **env, COOKBOOK_PYTHON=sys.executable)
    assert f"torch {version} of {sys.executable} is used, in {folder}\n" in done.stderr
    assert f"torch=={version} takes the place" in done.stderr
    done = setup("--torch", "system", **env, COOKBOOK_PYTHON=str(bare))
    assert done.returncode == 1 and f"{bare}: ModuleNotFoundError" in done.stderr
    assert "set COOKBOOK_PYTHON to the interpreter that has it" in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.named
def test_a_folder_is_made_with_a_network_and_used_without_one(tmp_path):
    """Downloads 400 MB; then in a network namespace without interfaces, with a dependency."""
    if subprocess.run(["unshare", "-rn", "true"]).returncode:
        pytest.skip("this machine allows no network namespace")
    folder, recipe = tmp_path / "carried", tmp_path / "own.yaml"
    recipe.write_text("extends: demo\nepochs: 1\nenvironment: {dependencies: [word2number]}\n")
    # A folder of wheels that pip is told of, such as that of a machine for tests.
    wheels = os.environ.get("PIP_FIND_LINKS")
    torch = ["--torch-index", wheels] if wheels else ["--torch", "cpu"]
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    make = ["--bundle", str(folder), "--python", own, "--recipe", str(recipe), *torch]
    env = {k: v for k, v in os.environ.items() if not k.startswith("COOKBOOK_")}
    env |= {"TMPDIR": str(tmp_path), "COOKBOOK_PYTHON": sys.executable}
    first = subprocess.Popen(["bash", ROOT / "setup.sh", *make], env=env, start_new_session=True)
    until(lambda: any((folder / "wheels").glob("*.whl")), 600)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert "is not complete: repeat" in setup("--from", str(folder)).stderr
    done = setup(*make, timeout=1800, **env)
    assert done.returncode == 0, done.stderr
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder, check=True)
    subprocess.run(["tar", "xzf", folder / "slurm-cookbook.tar.gz"], cwd=tmp_path, check=True)
    lines = f"""ip link set lo up && cd slurm-cookbook && bash setup.sh --from {folder} &&
      .venv/bin/cookbook submit {recipe} --nodes 1 --local --watch"""
    done = subprocess.run(
        ["unshare", "-rn", "bash", "-c", lines],
        cwd=tmp_path,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and " COMPLETED after" in done.stdout + done.stderr, done.stderr


def test_a_second_run_changes_nothing_and_ends_with_the_next_command(installed, slurm):
    stamp = (Path(sys.prefix) / ".cookbook-setup").read_text()
    # For users who cannot write the checkout's folder.
    compiled = Path(importlib.util.cache_from_source(str(ROOT / "launcher" / "errors.py")))
    compiled.unlink(missing_ok=True)
    done = setup(**installed, SLURM_CONF=slurm.env["SLURM_CONF"])
    assert done.returncode == 0, done.stderr
    assert "is up to date" in done.stderr and compiled.is_file()
    assert "Slurm: slurm" in done.stderr and "answers; 1 host(s)" in done.stderr
    assert done.stderr.splitlines()[-1].strip() == "cookbook submit --recipe demo --nodes 2 --watch"
    assert (Path(sys.prefix) / ".cookbook-setup").read_text() == stamp


def test_a_second_setup_waits_for_the_first(installed):
    with open(f"{sys.prefix}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = subprocess.Popen(
            ["bash", ROOT / "setup.sh"],
            env={**os.environ, **installed},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert second.stderr
        until(lambda: "another setup.sh is using" in second.stderr.readline(), 60)
        assert second.poll() is None, "it did not wait"
        fcntl.flock(lock, fcntl.LOCK_UN)
    second.communicate(timeout=60)
    assert second.returncode == 0
