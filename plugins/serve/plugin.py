"""Served models."""

from launcher.plugins import Command, Plugin

PLUGIN = Plugin(
    name="serve",
    commands={
        "serve": Command(
            "plugins.serve.cli.serve:serve",
            "Serve a model with an OpenAI-compatible API, as a Slurm job.",
            "Deliver",
        ),
        "query": Command(
            "plugins.serve.cli.query:query",
            "Send one prompt or a file of prompts to a served model.",
            "Deliver",
        ),
    },
    hooks={"from_requests": "plugins.serve.cli.from_requests:from_requests"},
    entries="plugins.serve.launcher.entries:ENTRIES",
)
