"""Estimates of memory, time and disk, their rehearsal on a node, and the models they know."""

from launcher.plugins import Check, Command, Plugin

PLUGIN = Plugin(
    name="estimate",
    commands={
        "estimate": Command(
            "plugins.estimate.cli.estimate:estimate",
            "Compute the memory, time and disk that a recipe needs.",
            "Prepare",
        ),
        "models": Command(
            "plugins.estimate.cli.models:models",
            "List the model families, and what the trainer supports for each.",
            "Prepare",
        ),
    },
    checks=(
        Check("GPU memory", "plugins.estimate.launcher.checks:memory"),
        Check("disk space", "plugins.estimate.launcher.checks:disk"),
    ),
    hooks={
        "needs": "plugins.estimate.launcher.estimate:Estimate",
        "rehearse": "plugins.estimate.launcher.rehearse:rehearse",
        "predicted_sweep": "plugins.estimate.launcher.cells:PredictedSweep",
    },
)
