"""API keys and daily quotas of an endpoint: its own key, and the keys of users."""

import hmac
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugins.serve import endpoint as endpoints
from runspec import files
from runspec.storage import patiently

# The holder of the endpoint's own key: its owner, and the gateway.
OWNER = ""
_DAY_S = 86400


class Keys:
    """The valid keys of an endpoint; refresh reads those of the users again."""

    def __init__(self, key: str, folder: Path | None = None) -> None:
        self.key, self.folder = key, folder
        self.users: dict[str, dict[str, Any]] = {}
        self._names: dict[str, str] = {}
        with suppress(OSError, files.DamagedFile):  # those who refresh it say so
            self.refresh()

    def refresh(self) -> None:
        """Read the users' keys: one that is revoked is refused from now on.

        Raises:
            OSError, DamagedFile: they cannot be read; those that were read last stay valid.
        """
        if self.folder is None:
            return
        self.users = endpoints.users(self.folder)
        self._names = {
            str(each["sha256"]): name
            for name, each in self.users.items()
            if each.get("revoked") is None
        }

    def who(self, given: str) -> str | None:
        """Return the user of a key, OWNER for the endpoint's own, None if it is not valid."""
        # A header may hold any bytes.
        own = hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self.key.encode())
        return OWNER if own else self._names.get(endpoints.key_hash(given))


@dataclass(frozen=True)
class Charge:
    """What a user is charged for a request when it begins."""

    user: str
    # Its answers.
    requests: int
    # The tokens of its prompts.
    prompt: int
    # The most tokens of its answers, which are held until it ends.
    answer: int


class Quotas:
    """The requests and tokens of each user today (UTC), of all servers.

    Each server has its own file; refresh writes it and reads the others. Their later counts are
    not included, nor what is held for the answers that they are generating.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder / endpoints.USAGE, name
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.day = endpoints.today()
        try:
            self.own = patiently(endpoints.used_by, self.folder / f"{name}.json")
        except files.DamagedFile:  # it was being written on a full disk
            self.own = {}
        self.others: dict[str, tuple[int, int]] = {}
        self._written = self.own
        self._held: Counter[str] = Counter()
        with suppress(OSError, files.DamagedFile):  # those who refresh it say so
            self.refresh()

    def begin(self, charge: Charge) -> None:
        """Charge a request that begins, so that requests beside it count; the owner is not."""
        self._add(charge.user, charge.requests, charge.prompt)
        self._held[charge.user] += charge.answer

    def end(self, charge: Charge, prompt: int, answer: int) -> None:
        """Charge the tokens of a request that has ended in place of what was assumed."""
        self._held[charge.user] -= charge.answer
        self._add(charge.user, 0, prompt - charge.prompt + answer)

    def _add(self, user: str, requests: int, tokens: int) -> None:
        if user == OWNER:
            return
        if self.day != endpoints.today():
            self.day, self.own, self.others = endpoints.today(), {}, {}
        before = self.own.get(user, (0, 0))
        now = before[0] + requests, max(0, before[1] + tokens)
        self.own = {**self.own, user: now}

    def over(self, user: str, limits: Mapping[str, Any], requests: int = 1) -> tuple[str, int]:
        """Return why a user may not send this many requests now, "" if they may, and for how long.

        A limit of tokens is one of what was used before; an answer may end above it.
        """
        pairs = [self.own.get(user, (0, 0)), self.others.get(user, (0, 0))]
        if self.day != endpoints.today():
            pairs = [(0, 0)]
        for number, kind in enumerate(("requests", "tokens")):
            limit, used = limits.get(f"{kind}_per_day"), sum(pair[number] for pair in pairs)
            if limit is None:
                continue
            if used + (requests - 1) * (kind == "requests") >= limit:
                more = f", and this one counts as {requests:,}" if used < limit else ""
                left_s = int(_DAY_S - time.time() % _DAY_S) + 1
                return f"{used:,} of {limit:,} {kind} of today (UTC) are used{more}", left_s
            if kind == "tokens" and used + self._held[user] >= limit:
                held = f"{used:,} of {limit:,} tokens of today (UTC) are used"
                return f"{held}, and running requests may need the rest: try again when they end", 1
        return "", 0

    def refresh(self) -> None:
        """Write this server's counts, read those of the others, and remove old files.

        Raises:
            OSError, DamagedFile: a file fails; what was read last still counts.
        """
        if self.own is not self._written:
            written = self.own
            content = {"day": self.day, "users": written}
            files.renew_json(self.folder / f"{self.name}.json", content, mode=0o600)
            self._written = written
        for path in self.folder.glob("*.json"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - 2 * _DAY_S:
                    path.unlink()
        self.others = endpoints.used_today(self.folder.parent, without=self.name)
