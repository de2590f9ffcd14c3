"""Reinforcement learning."""

from launcher.plugins import Plugin

PLUGIN = Plugin(
    name="rl",
    hooks={"live_lines": "plugins.rl.launcher.rollouts:live_lines"},
    methods={
        "grpo": "plugins.rl.recipe_keys:GrpoConfig",
        "distill_on_policy": "plugins.rl.recipe_keys:OnPolicyConfig",
    },
)
