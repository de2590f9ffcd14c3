"""Models and data of the trainer's tests, and the virtual environment of the launcher's."""

from tests.launcher.conftest import cache, fast_trainer, venv
from tests.trainer.conftest import dataset, model_folder, one_thread

__all__ = ["cache", "dataset", "fast_trainer", "model_folder", "one_thread", "venv"]
