"""The files of an endpoint, a served model under one name: endpoints/<name>/ in the shared folder.

endpoint.json   which versions are served, by which runs, and the settings of the fronts
key             the API key; only its owner may read it
users.json      the keys of users, as hashes, with their limits
usage/          what each server has counted of the users' requests today
backends/       one file per server, which the server renews; .drain-<server> asks it to drain
shares.json     the share of the traffic of each version
scale.json      how many servers of each version the gateway wants, if they follow the load
gateway.json    the address and process of the gateway
requests/       the log of requests and answers

What reads a file raises OSError if it cannot be read, and files.DamagedFile if it is damaged.
"""

import hashlib
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runspec import files
from runspec.states import process_start

ENDPOINT, KEY, GATEWAY, SHARES = "endpoint.json", "key", "gateway.json", "shares.json"
SCALE = "scale.json"
BACKENDS, REQUESTS, USERS, USAGE = "backends", "requests", "users.json", "usage"
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


def shares(folder: Path) -> dict[str, float]:
    """Return the share of the traffic that each version gets, {} for an even spread."""
    content = files.read_object(folder / SHARES) or {}
    return {str(key): float(value) for key, value in content.items()}


def ranges(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the least and the most servers of each version whose number follows the load."""
    served = (files.read_object(folder / ENDPOINT) or {}).get("served")
    return {
        str(each["version"]): (int(each["replicas"]), int(each["max_replicas"]))
        for each in served or []
        if each.get("max_replicas") is not None
    }


def wanted(folder: Path) -> dict[str, int]:
    """Return how many servers of each version the gateway wants."""
    content = files.read_object(folder / SCALE) or {"wanted": {}}
    return {str(key): int(value) for key, value in content["wanted"].items()}


def users(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the users of an endpoint by name: sha256, created, revoked, and their limits."""
    return files.read_object(folder / USERS) or {}


def key_hash(key: str) -> str:
    """Return what is kept of a user's key; it is random, and needs no salt."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def used_today(folder: Path, without: str = "") -> dict[str, tuple[int, int]]:
    """Return the requests and tokens of each user on this day (UTC).

    Args:
        without: the server whose own count is left out.
    """
    used: dict[str, tuple[int, int]] = {}
    for path in (folder / USAGE).glob("*.json"):
        if path.stem == without:
            continue
        for user, (requests, tokens) in used_by(path).items():
            before = used.get(user, (0, 0))
            used[user] = (before[0] + requests, before[1] + tokens)
    return used


def used_by(path: Path) -> dict[str, tuple[int, int]]:
    """Return what one server has counted on this day (UTC), {} if its file is of another day."""
    content = files.read_object(path) or {}
    if content.get("day") != today():
        return {}
    return {str(user): (int(pair[0]), int(pair[1])) for user, pair in content["users"].items()}


def today() -> str:
    """Return the date in UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime())
