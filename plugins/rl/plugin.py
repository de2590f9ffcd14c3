"""Reinforcement learning."""

from launcher.plugins import Plugin

PLUGIN = Plugin(
    name="rl",
    methods={"grpo": "plugins.rl.recipe_keys:GrpoConfig"},
)
