"""The oldest and newest torch and transformers that are supported: others are refused."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runspec import versions

ROOT = Path(__file__).parents[1]
# What the pair runs: families with experts and linear attention, full, LoRA and QLoRA, packed rows,
# preferences, GRPO, kill and resume, export, generate, serve.
CASES = [
    *("models/test_transformers", "layers/test_experts", "layers/test_adapters"),
    *("parallel/test_layouts", "methods/test_preference", "checkpoint/test_resume"),
    *("checkpoint/test_checkpoint", "test_demo"),
]
OF_PLUGINS = ["rl/test_grpo", "serve/test_protocol"]
# These follow from the other packages' versions.
FREE = r"^(triton|nvidia|cuda|tokenizers|sympy|fsspec|huggingface_hub|hf-xet|setuptools)\b.*\n"


@pytest.mark.parametrize("package", versions.SUPPORTED)
def test_what_is_refused_is_what_pip_would_refuse(package):
    (oldest, minor), too_new = versions.SUPPORTED[package]
    wanted = f'"{package}>={oldest}.{minor},<{too_new[0]}' + f".{too_new[1]}" * bool(too_new[1])
    assert f'{wanted}",\n' in (ROOT / "pyproject.toml").read_text()
    assert versions.fault(package, f"{oldest}.{minor}.0+cu126") is None
    for other in (f"{oldest}.{minor - 1}.9", f"{too_new[0]}.{too_new[1]}.0", "0.1"):
        assert f"{package} {other} is not supported" in str(versions.fault(package, other))


def test_a_quantized_base_is_sharded_from_one_release_of_torch_on() -> None:
    assert "it needs torch 2.12" in str(versions.sharding_fault("2.11.0+cu128"))
    assert versions.sharding_fault("2.12.0") is None and versions.sharding_fault("nightly") is None


def oldest(package: str) -> str:
    major, minor = versions.SUPPORTED[package][0]
    return f"{package}=={major}.{minor}.0"


def newest_torch() -> str:
    major, minor = versions.SUPPORTED["torch"][1]
    return f"torch=={major}.{minor - 1}.0"


@pytest.mark.named
@pytest.mark.parametrize(
    "wanted",
    [[oldest(package) for package in versions.SUPPORTED], [newest_torch()]],
    ids=["oldest", "newest"],
)
def test_the_oldest_and_the_newest_pair_train_export_and_serve(wanted, tmp_path):
    """Needs a package index. All tests run the pair of constraints.txt."""
    pins = re.sub(FREE, "", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    for pin in wanted:
        pins, found = re.subn(f"(?m)^{pin.partition('=')[0]}==.*$", pin, pins)
        assert found == 1
    (tmp_path / "pins.txt").write_text(pins)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", tmp_path / "pins.txt"]
    # That of a new environment may be too old to read pyproject.toml.
    subprocess.run([*pip, "--upgrade", "setuptools", "wheel"], check=True)
    kit = f"{ROOT}[cluster,serve]"
    tools = ["pytest", "pytest-xdist", "peft", "psutil", "scipy", "scikit-learn"]
    subprocess.run([*pip, "--no-build-isolation", "--editable", kit, *tools], check=True)
    files = [f"tests/trainer/{name}.py" for name in CASES]
    files += [f"tests/plugins/{name}.py" for name in OF_PLUGINS]
    argv = [python, "-m", "pytest", "-n", "0", "-q", "-m", "not named and not alone", *files]
    done = subprocess.run(
        argv, cwd=ROOT, env={**os.environ, "COOKBOOK_VENV": str(python.parents[1])}
    )
    assert done.returncode == 0
