"""Other trainers, started in environments of their own."""

from launcher.plugins import Plugin

PLUGIN = Plugin(
    name="engines",
)
