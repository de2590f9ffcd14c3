"""Reinforcement learning."""

from launcher.plugins import Plugin

PLUGIN = Plugin(
    name="rl",
)
