"""The files of an endpoint, a served model under one name: endpoints/<name>/ in the shared folder.

endpoint.json   which versions are served, by which runs, and the settings of the fronts
key             the API key; only its owner may read it
backends/       one file per server, which the server renews; .drain-<server> asks it to drain
gateway.json    the address and process of the gateway
requests/       the log of requests and answers

What reads a file raises OSError if it cannot be read, and files.DamagedFile if it is damaged.
"""

import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runspec import files
from runspec.states import process_start

ENDPOINT, KEY, GATEWAY = "endpoint.json", "key", "gateway.json"
BACKENDS, REQUESTS = "backends", "requests"
# A server renews its file every second or so, a gateway every few; one that does not is gone.
STALE_S = 20.0


def tell(folder: Path, name: str, facts: dict[str, Any]) -> None:
    """Write a server's file."""
    place = folder / BACKENDS
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = {**facts, "time": time.time(), "machine": socket.gethostname()}
    files.renew_json(server_file(folder, name), own, mode=0o600)


def servers(folder: Path) -> list[dict[str, Any]]:
    """Return what the living servers of an endpoint say of themselves, ready ones first.

    Raises:
        OSError: a file is there and cannot be read.
    """
    rows = []
    for path in sorted((folder / BACKENDS).glob("*.json")):
        try:
            facts = files.read_object(path) or {}
        except files.DamagedFile:
            continue  # it is being written on a full disk
        if not isinstance(facts.get("time"), int | float):
            continue
        if time.time() - facts["time"] < STALE_S:
            rows.append({**facts, "name": path.stem})
    return sorted(rows, key=lambda each: each.get("state") != "ready")


def server_file(folder: Path, name: str) -> Path:
    """Return the file of a server's state and address."""
    return folder / BACKENDS / f"{name}.json"


def reachable(facts: Mapping[str, Any]) -> bool:
    """Whether this host reaches a server: a loopback address is another one on each host.

    What answers there on this host may be anybody's, and would be sent the key.
    """
    return facts.get("bind") == "node" or facts.get("machine") == socket.gethostname()


def gateway(folder: Path) -> dict[str, Any] | None:
    """Return the address and process of the gateway, None if none runs on this host or another."""
    if (content := files.read_object(folder / GATEWAY)) is None:
        return None
    if content.get("host") != socket.gethostname():
        renewed = content.get("time")
        alive = isinstance(renewed, int | float) and time.time() - renewed < STALE_S
    else:
        alive = process_start(int(content["pid"])) == content.get("process_start")
    return content if alive else None


def address(folder: Path) -> str | None:
    """Return where this host reaches an endpoint: its gateway, else a ready server, else None."""
    of_gateway = gateway(folder)
    # It listens on the loopback address of its host.
    if of_gateway is not None and of_gateway.get("host") == socket.gethostname():
        return str(of_gateway["url"])
    near = [each for each in servers(folder) if each.get("state") == "ready" and reachable(each)]
    return str(near[0]["url"]) if near else None


def drain_mark(folder: Path, name: str) -> Path:
    """Return the file whose presence asks a server to take no more requests."""
    return folder / BACKENDS / f".drain-{name}"
