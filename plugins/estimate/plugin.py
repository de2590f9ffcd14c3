"""Estimates of memory, time and disk."""

from launcher.plugins import Command, Plugin

PLUGIN = Plugin(
    name="estimate",
    commands={
        "estimate": Command(
            "plugins.estimate.cli.estimate:estimate",
            "Compute the memory, time and disk that a recipe needs.",
            "Prepare",
        ),
    },
)
