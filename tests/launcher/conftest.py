"""Users of the cookbook command: on the session's one-host Slurm, and without one."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import paths
from tests import forked
from tests.launcher.kit import FAKE_TOKEN, Kit
from tests.launcher.venv import make as make_venv


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """The session's shared folder: the demo model is made in it once."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory) -> Iterator[None]:
    """Answers of the trainer that the launcher keeps are the session's own."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="session")
def venv(tmp_path_factory, cache) -> Path:
    """The tests' own virtual environment, whose trainer answers from forks."""
    # Begins its imports.
    forked.connect(forked.TRAINER).close()
    return make_venv(tmp_path_factory.mktemp("own") / "venv", forked.SESSION)


@pytest.fixture
def fast_trainer(venv, monkeypatch) -> None:
    """What asks the trainer in this process uses it, too."""
    monkeypatch.setenv("COOKBOOK_VENV", str(venv))


def _user(env: dict[str, str], root: Path, venv: Path, **more: str) -> Kit:
    clean = {key: value for key, value in env.items() if not key.startswith("COOKBOOK_")}
    return Kit(clean | {"COOKBOOK_ROOT": str(root), "COOKBOOK_VENV": str(venv), **more}, root)


@pytest.fixture(scope="session")
def kit(slurm, shared, venv) -> Kit:
    """A user on the one-host Slurm, with a hub token that must never get out."""
    return _user(slurm.env, shared, venv, HF_TOKEN=FAKE_TOKEN)


@pytest.fixture
def user(plain_env, tmp_path, venv) -> Kit:
    """A user with an empty shared folder and no Slurm configured."""
    return _user(plain_env, tmp_path / "shared", venv)


@pytest.fixture
def slurm_user(slurm, tmp_path, venv) -> Kit:
    """A user with an empty shared folder on the one-host Slurm."""
    return _user(slurm.env, tmp_path / "shared", venv)


@pytest.fixture(scope="session")
def model(shared) -> Path:
    """The demo's model, with its tokenizer and chat template, where its runs make it too."""
    # Imported late: few tests here need torch.
    from trainer import demo

    folder = shared / "models" / "demo-llama"
    if not folder.exists():
        demo.make(folder, paths.REPO_ROOT / "configs/datasets/slurm_qa.jsonl")
    return folder
