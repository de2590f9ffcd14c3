"""Models and data of the trainer's tests."""

from tests.trainer.conftest import dataset, model_folder, one_thread

__all__ = ["dataset", "model_folder", "one_thread"]
