"""The keys of an endpoint's users: made, listed and revoked; only their hashes are kept."""

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from launcher.errors import EndpointFault, UsageFault, nearest
from plugins.serve import endpoint as endpoints
from plugins.serve.launcher.endpoint import Endpoint
from runspec import files, lock
from runspec.keys.key import NAME, NAME_RULE

_WAIT_S = 30.0


def add(endpoint: Endpoint, user: str, limits: dict[str, int | None]) -> str:
    """Make a user's key, and return it: nothing shows it again.

    Args:
        limits: requests_per_day and tokens_per_day (UTC), None for no limit.

    Raises:
        UsageFault: the name is not allowed, or the user has a key.
        EndpointFault: another command changes the users, and goes on with it.
    """
    if not NAME.match(user):
        raise UsageFault(f"the user name {user!r} may contain only {NAME_RULE}")
    with _changed(endpoint) as users:
        if user in users and users[user].get("revoked") is None:
            raise UsageFault(
                f"{user} already has a key: change its limits with --set-limits {endpoint.name}, "
                "or revoke it first with: cookbook serve --revoke-key "
                f"{endpoint.name} --user {user}"
            )
        key = f"ck-{secrets.token_urlsafe(32)}"
        entry = {"sha256": endpoints.key_hash(key), "created": time.time(), "revoked": None}
        users[user] = {**entry, **limits}
    return key


def limit(endpoint: Endpoint, user: str, limits: Mapping[str, int | None]) -> None:
    """Change some limits of a user, whose key and whose use of today stay.

    Args:
        limits: requests_per_day, tokens_per_day; None: no limit.

    Raises:
        UsageFault: there is no such user.
        EndpointFault: as of add.
    """
    with _changed(endpoint) as users:
        _require(user, users)
        users[user] |= limits


def revoke(endpoint: Endpoint, user: str) -> None:
    """Let a user's key open nothing from now on; errors as of limit."""
    with _changed(endpoint) as users:
        _require(user, users)
        users[user]["revoked"] = time.time()


def _require(user: str, users: Mapping[str, dict[str, Any]]) -> None:
    """Raise UsageFault if this user has no valid key."""
    valid = sorted(name for name, each in users.items() if each.get("revoked") is None)
    if user not in valid:
        known = f"there are {', '.join(valid)}" if valid else "there is none"
        raise UsageFault(f"there is no key for user {user!r}{nearest(user, valid)}: {known}")


def rows(endpoint: Endpoint) -> list[dict[str, Any]]:
    """Return the users by name, with their limits and what they have used today (UTC)."""
    used = endpoints.used_today(endpoint.folder)
    users = []
    for name, each in sorted(endpoints.users(endpoint.folder).items()):
        requests, tokens = used.get(name, (0, 0))
        row = {key: value for key, value in each.items() if key != "sha256"}
        users.append({"user": name, **row, "requests": requests, "tokens": tokens})
    return users


@contextmanager
def _changed(endpoint: Endpoint) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield the users, and write what the block has made of them; one command at a time.

    Not by the endpoint's own lock, which a command holds while servers start.
    """
    try:
        held = lock.take(endpoint.folder / f".{endpoints.USERS}.lock", _WAIT_S)
    except lock.Held as error:
        raise EndpointFault(
            f"another command is changing the users of {endpoint.name} ({error}): try again"
        ) from error
    with held:
        users = endpoints.users(endpoint.folder)
        yield users
        files.write_json(endpoint.folder / endpoints.USERS, users, mode=0o600)
