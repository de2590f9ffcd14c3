"""cookbook --host NAME: every command from a laptop, by the user's own ssh and rsync.

The laptop's side, ssh, tree and client, needs click alone; sent runs on the cluster.
"""

import os

from launcher.errors import UsageFault

# The folder of the kit in the home directory there, unless the user names another.
KIT = "slurm-cookbook"


def chosen(given: str | None) -> str | None:
    """Return the host of --host, else of COOKBOOK_HOST: NAME of ssh's configuration, or
    NAME:FOLDER with the kit's folder there; None for this machine."""
    host = given or os.environ.get("COOKBOOK_HOST") or "local"
    if host.startswith(("-", ":")):
        raise UsageFault(f"--host {host}: give a name from your ssh configuration, or NAME:FOLDER")
    return None if host == "local" else host
