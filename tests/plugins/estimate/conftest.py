"""A user of the cookbook command, and the trainer's model and data."""

from tests.launcher.conftest import cache, fast_trainer, user, venv
from tests.trainer.conftest import dataset, model_folder

__all__ = ["cache", "dataset", "fast_trainer", "model_folder", "user", "venv"]
