"""The files of an endpoint, a served model under one name: endpoints/<name>/ in the shared folder.

endpoint.json   which versions are served, by which runs, and the settings of the fronts
key             the API key; only its owner may read it
backends/       one file per replica, which the replica renews; .drain-<replica> asks it to drain
shares.json     the share of the traffic of each version
gateway.json    the address and process of the gateway
requests/       the log of requests and answers
"""

import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runspec import files
from runspec.states import process_start

ENDPOINT, KEY, GATEWAY, SHARES = "endpoint.json", "key", "gateway.json", "shares.json"
BACKENDS, REQUESTS = "backends", "requests"
# A replica renews its file every second or so, a gateway every few; one that does not is gone.
STALE_S = 20.0


def tell(folder: Path, name: str, facts: dict[str, Any]) -> None:
    """Write a replica's file."""
    place = folder / BACKENDS
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = {**facts, "time": time.time(), "machine": socket.gethostname()}
    files.write_json(replica_file(folder, name), own, mode=0o600)


def replicas(folder: Path) -> list[dict[str, Any]]:
    """Return what the living replicas of an endpoint say of themselves, ready ones first."""
    found = []
    for path in sorted((folder / BACKENDS).glob("*.json")):
        facts = files.read_json_or_none(path)
        if not isinstance(facts, dict) or not isinstance(facts.get("time"), int | float):
            continue
        if time.time() - facts["time"] < STALE_S:
            found.append({**facts, "name": path.stem})
    return sorted(found, key=lambda each: each.get("state") != "ready")


def replica_file(folder: Path, name: str) -> Path:
    """Return the file of a replica's state and address."""
    return folder / BACKENDS / f"{name}.json"


def reachable(facts: Mapping[str, Any]) -> bool:
    """Whether this host reaches a replica: a loopback address is another one on each host.

    What answers there on this host may be anybody's, and would be sent the key.
    """
    return facts.get("bind") == "node" or facts.get("machine") == socket.gethostname()


def gateway(folder: Path) -> dict[str, Any] | None:
    """Return the address and process of the gateway, None if none runs on this host or another."""
    found = files.read_json_or_none(folder / GATEWAY)
    if not isinstance(found, dict):
        return None
    if found.get("host") != socket.gethostname():
        renewed = found.get("time")
        alive = isinstance(renewed, int | float) and time.time() - renewed < STALE_S
    else:
        alive = process_start(int(found["pid"])) == found.get("process_start")
    return found if alive else None


def address(folder: Path) -> str | None:
    """Return where this host reaches an endpoint: its gateway, else a ready replica, else None."""
    found = gateway(folder)
    # It listens on the loopback address of its host.
    if found is not None and found.get("host") == socket.gethostname():
        return str(found["url"])
    near = [each for each in replicas(folder) if each.get("state") == "ready" and reachable(each)]
    return str(near[0]["url"]) if near else None


def drain_mark(folder: Path, name: str) -> Path:
    """Return the file whose presence asks a replica to take no more requests."""
    return folder / BACKENDS / f".drain-{name}"


def shares(folder: Path) -> dict[str, float]:
    """Return the share of the traffic that each version gets, {} for an even spread."""
    found = files.read_json_or_none(folder / SHARES)
    if not isinstance(found, dict):
        return {}
    return {str(key): float(value) for key, value in found.items()}
