"""A user of the cookbook command, as in tests/launcher."""

from tests.launcher.conftest import cache, fast_trainer, user, venv

__all__ = ["cache", "fast_trainer", "user", "venv"]
