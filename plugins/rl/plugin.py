"""Reinforcement learning."""

from launcher.plugins import Plugin

PLUGIN = Plugin(
    name="rl",
    hooks={
        "live_lines": "plugins.rl.launcher.rollouts:live_lines",
        "report_section": "plugins.rl.launcher.rollouts:report_section",
    },
    methods={
        "grpo": "plugins.rl.recipe_keys:GrpoConfig",
        "distill_on_policy": "plugins.rl.recipe_keys:OnPolicyConfig",
    },
)
