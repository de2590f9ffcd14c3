"""Other trainers, started in environments of their own."""

from launcher.plugins import Check, Plugin

PLUGIN = Plugin(
    name="engines",
    checks=(
        Check(
            "engine config",
            "plugins.engines.launcher.check:config",
            starts=True,
            after_build=True,
        ),
    ),
    entries="plugins.engines.launcher.entries:ENTRIES",
)
