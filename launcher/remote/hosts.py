"""Which host a command goes to: --host, COOKBOOK_HOST, or the user's own configuration file."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import UsageFault, nearest

FILE = Path("~/.config/slurm-cookbook/config.yaml")
# This machine, whatever the file says.
HERE = "local"
# In the home directory of the cluster, unless the file says otherwise.
DEFAULT_KIT = "slurm-cookbook"
_KEYS = ("host", "kits")


@dataclass(frozen=True)
class Host:
    """A host by its name in ssh's configuration, and the folder of the kit there."""

    name: str
    kit: str = DEFAULT_KIT


def chosen(name: str | None) -> Host | None:
    """Return the host that a command goes to; None for this machine."""
    given = name or os.environ.get("COOKBOOK_HOST")
    if given == HERE:
        return None
    file = FILE.expanduser()
    known = _read(file) if file.is_file() else {}
    given = given or known.get("host")
    if not given or given == HERE:
        return None
    if given.startswith("-"):
        raise UsageFault(f"--host {given}: give a name from your ssh configuration")
    return Host(given, str(known.get("kits", {}).get(given, DEFAULT_KIT)))


def remember(host: Host) -> Path:
    """Write a host's folder of the kit to the user's file, which also makes the first one the
    default; return the file."""
    from launcher import yamlfile  # most commands only read

    file = FILE.expanduser()
    known = _read(file) if file.is_file() else {}
    known = {"host": host.name, **known}
    known["kits"] = {**known.get("kits", {}), host.name: host.kit}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yamlfile.dump(known), encoding="utf-8")
    return file


def _read(file: Path) -> dict[str, Any]:
    from launcher import yamlfile  # yaml takes time, and most users have no such file

    known = yamlfile.load(file)
    faults = [
        f"unknown key {key!r}{nearest(key, _KEYS)} in {file}: it may have {' and '.join(_KEYS)}"
        for key in known
        if key not in _KEYS
    ]
    if not isinstance(known.get("kits", {}), dict):
        faults.append(f"kits in {file} must be lines of HOST: FOLDER")
    if faults:
        raise UsageFault(faults)
    return known
