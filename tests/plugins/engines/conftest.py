"""Containers, as in the launcher's tests."""

from tests.launcher.check.test_environments import injected

__all__ = ["injected"]
