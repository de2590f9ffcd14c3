"""Models and data of the trainer's tests, and the demo's of sums."""

from pathlib import Path

import pytest

from plugins.rl import demo_sums
from tests.trainer.conftest import dataset, model_folder, one_thread

__all__ = ["dataset", "model_folder", "one_thread"]


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, hardly trained, and its prompts."""
    folder = tmp_path_factory.mktemp("sums") / "model"
    demo_sums.make(folder, steps=40)
    return folder
