"""The users of the launcher's tests."""

from tests.launcher.conftest import cache, fast_trainer, slurm_user, user, venv

__all__ = ["cache", "fast_trainer", "slurm_user", "user", "venv"]
