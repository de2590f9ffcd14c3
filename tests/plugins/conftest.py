"""The users of the cookbook command and the demo's model, as in the launcher's tests."""

from tests.launcher.conftest import cache, fast_trainer, kit, model, shared, slurm_user, user, venv

__all__ = ["cache", "fast_trainer", "kit", "model", "shared", "slurm_user", "user", "venv"]
