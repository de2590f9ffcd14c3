"""Reinforcement learning."""

from launcher.plugins import Plugin

PLUGIN = Plugin(
    name="rl",
    hooks={"report_section": "plugins.rl.launcher.rollouts:report_section"},
)
