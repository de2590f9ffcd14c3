"""Evaluation of models."""

from launcher.plugins import Command, Plugin

PLUGIN = Plugin(
    name="evaluate",
    commands={
        "eval": Command(
            "plugins.evaluate.cli.evaluate:evaluate",
            "Evaluate a model, alone or compared with another.",
            "Deliver",
        ),
    },
    hooks={"report_section": "plugins.evaluate.launcher.evaluation:report_section"},
    entries="plugins.evaluate.launcher.entries:ENTRIES",
)
