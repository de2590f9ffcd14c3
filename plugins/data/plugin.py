"""Data preparation: from raw rows to a training set."""

from launcher.plugins import Command, Plugin

PLUGIN = Plugin(
    name="data",
    commands={
        "prepare": Command(
            "plugins.data.cli.prepare:prepare",
            "Make a training set from raw data: filtered, without duplicates, split.",
            "Prepare",
        ),
        "data": Command(
            "plugins.data.cli.prepare:data",
            "Show prepared training sets.",
            "Prepare",
        ),
    },
)
