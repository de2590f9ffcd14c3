"""Which host a command goes to: --host, COOKBOOK_HOST, or the user's own configuration file."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import UsageFault

FILE = Path("~/.config/slurm-cookbook/config.yaml")
# This machine, whatever the file says.
HERE = "local"
# In the home directory of the cluster, unless the file says otherwise.
_KIT = "slurm-cookbook"


@dataclass(frozen=True)
class Host:
    """A host by its name in ssh's configuration, and the folder of the kit there."""

    name: str
    kit: str = _KIT


def chosen(name: str | None) -> Host | None:
    """Return the host that a command goes to; None for this machine."""
    given = name or os.environ.get("COOKBOOK_HOST")
    if given == HERE:
        return None
    known = _read()
    given = given or known.get("host")
    if not given or given == HERE:
        return None
    if given.startswith("-"):
        raise UsageFault(f"--host {given}: give a name from your ssh configuration")
    return Host(given, str(known.get("kits", {}).get(given, _KIT)))


def remember(host: Host) -> Path:
    """Write a host's folder of the kit to the user's file, which also makes the first one the
    default; return the file."""
    from launcher import yamlfile  # most commands only read

    known = {"host": host.name, **_read()}
    known["kits"] = {**known.get("kits", {}), host.name: host.kit}
    file = FILE.expanduser()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yamlfile.dump(known), encoding="utf-8")
    return file


def _read() -> dict[str, Any]:
    file = FILE.expanduser()
    if not file.is_file():
        return {}
    from launcher import yamlfile  # yaml takes time, and most users have no such file

    known = yamlfile.load(file)
    if not known.keys() <= {"host", "kits"} or not isinstance(known.get("kits", {}), dict):
        raise UsageFault(f"{file} may have host: NAME, and kits: with lines of HOST: FOLDER")
    return known
