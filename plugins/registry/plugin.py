"""Registered models, and tracking with MLflow."""

from launcher.plugins import Command, Plugin

PLUGIN = Plugin(
    name="registry",
    commands={
        "register": Command(
            "plugins.registry.cli.registry:register",
            "Register a model as the next version of a name.",
            "Deliver",
        ),
        "promote": Command(
            "plugins.registry.cli.registry:promote",
            "Assign an alias to a version that passes its gates.",
            "Deliver",
        ),
        "registry": Command(
            "plugins.registry.cli.registry:registry",
            "List registered models, versions and their history.",
            "Deliver",
        ),
        "track": Command(
            "plugins.registry.cli.track:track",
            "Write runs to MLflow.",
            "Look",
        ),
    },
    hooks={
        "runs_ended": "plugins.registry.launcher.importer:import_ended",
        "registered_model": "plugins.registry.launcher.registered:model",
        "tracked_run": "plugins.registry.launcher.importer:node_program",
    },
)
