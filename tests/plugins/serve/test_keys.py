"""The keys of users: quotas, revocation, and whose request the log has."""

import asyncio
import json

import pytest

from launcher.errors import EndpointFault, UsageFault
from plugins.serve import endpoint as endpoints
from plugins.serve.client import Client, Refused
from plugins.serve.faults import Faults
from plugins.serve.journal import read
from plugins.serve.keys import Keys, Quotas
from plugins.serve.launcher import keys as access
from plugins.serve.launcher.endpoint import Endpoint
from tests.plugins.serve.kit import (
    CHAT,
    KEY,
    SAID,
    Backend,
    before_a_backend,
    front_of,
    gateway,
    opened,
    when,
)
from tests.plugins.serve.kit import client as client_of


@pytest.fixture
def endpoint(tmp_path) -> Endpoint:
    found = Endpoint(tmp_path / "e")
    (found.folder / endpoints.BACKENDS).mkdir(parents=True)
    return found


def test_a_users_key_is_shown_once_and_kept_as_a_hash(endpoint):
    key = access.add(endpoint, "ada", {"requests_per_day": 3, "tokens_per_day": None})
    file = endpoint.folder / endpoints.USERS
    assert key not in file.read_text() and file.stat().st_mode & 0o077 == 0
    with pytest.raises(
        UsageFault, match="ada already has a key: change its limits with --set-limits e"
    ):
        access.add(endpoint, "ada", {})
    with pytest.raises(UsageFault, match="may contain only"):
        access.add(endpoint, "a/b", {})
    with pytest.raises(UsageFault, match=r"no key for user 'aba'.*there are ada"):
        access.revoke(endpoint, "aba")
    access.limit(endpoint, "ada", {"tokens_per_day": 50})
    access.limit(endpoint, "ada", {"requests_per_day": None})
    (row,) = access.rows(endpoint)
    assert (row["requests_per_day"], row["tokens_per_day"]) == (None, 50)
    with pytest.raises(UsageFault, match="no key for user 'eve'"):
        access.limit(endpoint, "eve", {})
    keys = Keys(KEY, endpoint.folder)
    assert keys.who(key) == "ada", "the key stays"
    access.revoke(endpoint, "ada")
    assert access.add(endpoint, "ada", {}) != key, "a revoked one may be replaced"


def test_commands_that_change_users_at_once_lose_none(endpoint, monkeypatch):
    monkeypatch.setattr(access, "_WAIT_S", 0.1)
    with access._changed(endpoint) as users:
        with pytest.raises(EndpointFault, match="another command is changing the users of e"):
            access.add(endpoint, "eve", {})
        users["ada"] = {"sha256": "x"}
    access.add(endpoint, "kim", {})
    assert sorted(endpoints.users(endpoint.folder)) == ["ada", "kim"]


def test_tokens_are_charged_when_a_request_begins_and_when_it_is_given_up(endpoint):
    """A stream and an answer that are given up count, and requests at a time do not pass together.

    Its prompt has 10 tokens, its answer 50 at most; a stream that is given up has sent two.
    """
    ada = access.add(endpoint, "ada", {"tokens_per_day": 100, "requests_per_day": None})
    eve = access.add(endpoint, "eve", {"tokens_per_day": None, "requests_per_day": 3})
    prompt = {"messages": [{"role": "user", "content": "word " * 10}], "max_tokens": 50}

    async def run(below: str, backend: Backend) -> None:
        backend.pause = asyncio.Event()
        proxy = front_of(endpoint.folder, below)
        quotas, metrics = proxy.quotas, proxy.metrics
        async with opened(proxy.app()) as place, client_of(ada) as client:
            url = place + CHAT
            stream = await client.post(url, json={**prompt, "stream": True})
            await stream.content.readuntil(b"two")
            assert quotas.own["ada"] == (1, 10), "the prompt is charged when it begins"
            stream.close()
            await when(lambda: quotas.own["ada"][1] == 12 and not metrics.in_flight)
            given_up = asyncio.create_task(client.post(url, json=prompt))
            await when(lambda: metrics.in_flight)
            # 12 and 10 are used, and 50 are held: a third one would fit, a fourth one not.
            running = asyncio.create_task(client.post(url, json=prompt))
            await when(lambda: metrics.in_flight == 2)
            async with client.post(url, json=prompt) as answer:
                assert answer.status == 429 and answer.headers["Retry-After"] == "1"
                assert "32 of 100 tokens" in (text := await answer.text()) and "running" in text
            given_up.cancel()
            await when(lambda: quotas.own["ada"][1] == 82)
            backend.pause.set()
            assert (await running).status == 200
            # What was assumed of its prompt is replaced by the backend's count: 3 and 2.
            await when(lambda: quotas.own["ada"][1] == 77 and not metrics.in_flight)
            client.headers["Authorization"] = f"Bearer {eve}"
            statuses = [(await client.post(url, json={**prompt, "n": n})).status for n in (4, 3, 1)]
            assert (statuses, quotas.own["eve"][0]) == ([429, 200, 429], 3)

    before_a_backend(run)


def test_users_are_limited_over_all_servers_and_revoked(endpoint):
    ada = access.add(endpoint, "ada", {"requests_per_day": 4, "tokens_per_day": None})
    bob = access.add(endpoint, "bob", {"requests_per_day": None, "tokens_per_day": 9})

    async def run(below: str, backend: Backend) -> None:
        fronts = {name: front_of(endpoint.folder, below, name) for name in ("a", "b")}
        async with (
            opened(fronts["a"].app()) as one,
            opened(fronts["b"].app()) as other,
            gateway(endpoint.folder) as (proxy, client, url),
        ):
            for name, place in (("a", one), ("b", other)):
                facts = {"state": "ready", "url": place, "version": name}
                endpoints.tell(endpoint.folder, name, facts)
            proxy.pool.refresh()

            async def ask(key: str, **more: object) -> tuple[int, str]:
                for each in (*fronts.values(), *fronts.values()):
                    each.quotas.refresh()
                head = {"Authorization": f"Bearer {key}", "X-Cookbook-User": "eve"}
                head["X-Cookbook-Request-Id"] = "forged"
                body = {"messages": SAID, **more}
                async with client.post(url, headers=head, json=body) as answer:
                    return answer.status, await answer.text()

            assert [(await ask(ada))[0] for _ in range(5)] == [200, 200, 200, 200, 429]
            assert "4 of 4 requests of today" in (await ask(ada))[1]
            asking = Client(endpoint.folder, ada)
            with pytest.raises(Refused, match="429: ada: 4 of 4 requests of today"):
                await asking.ask({"messages": SAID})
            await asking.session.close()
            # Five tokens each, and a stream counts as much.
            assert [(await ask(bob, stream=True))[0] for _ in range(3)] == [200, 200, 429]
            assert [(await ask(key))[0] for key in (KEY, "nobody's", "")] == [200, 401, 401]
            head = {"Authorization": f"Bearer {bob}"}
            async with client.get(url.replace(CHAT, "/metrics"), headers=head) as answer:
                assert answer.status == 403
            access.revoke(endpoint, "ada")
            proxy.keys.refresh()
            assert (await ask(ada))[0] == 401

    before_a_backend(run)
    rows = list(read(endpoint.folder / endpoints.REQUESTS))
    users = sorted(row["user"] or "" for row in rows)
    assert users == ["", "ada", "ada", "ada", "ada", "bob", "bob"]
    assert "forged" not in {row["request_id"] for row in rows}
    shown = {row["user"]: (row["requests"], row["tokens"]) for row in access.rows(endpoint)}
    assert shown == {"ada": (4, 20), "bob": (2, 10)}
    assert "sha256" not in json.dumps(access.rows(endpoint))


def test_users_and_quotas_that_cannot_be_read_stay_and_are_told(endpoint, capsys):
    key = access.add(endpoint, "ada", {})
    keys, quotas = Keys(KEY, endpoint.folder), Quotas(endpoint.folder, "a")
    quotas.others = {"ada": (3, 4)}
    (endpoint.folder / endpoints.USERS).write_text("{")
    (endpoint.folder / endpoints.USAGE / "b.json").write_text("{")
    faults = Faults()
    faults.trying("the users' keys", keys.refresh)
    faults.trying("the users' quotas", quotas.refresh)
    assert keys.who(key) == "ada" and quotas.others == {"ada": (3, 4)}
    told = capsys.readouterr().err
    assert "ERROR: the users' keys: " in told and "ERROR: the users' quotas: " in told
    # A server starts with them, and without its own count of which a full disk has left a part.
    assert Keys(KEY, endpoint.folder).who(key) is None
    assert Quotas(endpoint.folder, "b").own == {}
