"""Evaluation of models."""

from launcher.plugins import Check, Command, Plugin

PLUGIN = Plugin(
    name="evaluate",
    commands={
        "eval": Command(
            "plugins.evaluate.cli.evaluate:evaluate",
            "Evaluate a model, alone or compared with another.",
            "Deliver",
        ),
    },
    checks=(Check("suite", "plugins.evaluate.launcher.check:samples", starts=True),),
    hooks={"report_section": "plugins.evaluate.launcher.evaluation:report_section"},
    entries="plugins.evaluate.launcher.entries:ENTRIES",
)
