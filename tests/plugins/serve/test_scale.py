"""Replicas by load: how many the gateway wants, and the request that waits for the first one."""

import asyncio
import json

import pytest

from launcher.errors import EndpointFault, UsageFault
from plugins.serve import endpoint as endpoints
from plugins.serve.cli.serve import _range
from plugins.serve.launcher.endpoint import Deployment, Endpoint
from plugins.serve.scale import Scaler
from tests.plugins.serve.kit import CHAT, SAID, Backend, gateway, opened


def served(folder, least: int, most: int | None, *more: str) -> None:
    versions = [Deployment("m", name, replicas=least, max_replicas=most) for name in ("v1", *more)]
    Endpoint(folder).write(versions, {})


def wanted(scaler: Scaler, loads: list[tuple[float, int]]) -> list[int]:
    """Return what is wanted of v1 after each load, at its time."""
    found = []
    for now, load in loads:
        scaler.decide(load, load, now)
        found.append(scaler.wanted["v1"])
    return found


def test_the_first_request_starts_one_and_a_lasting_load_more(tmp_path):
    served(tmp_path, 0, 3)
    scaler = Scaler(tmp_path, per_server=2, idle_s=60)
    assert wanted(scaler, [(0, 0), (1, 1)]) == [0, 1]
    assert wanted(scaler, [(2, 9), (4, 9), (6, 1)]) == [1, 1, 1], "that was no lasting load"
    assert wanted(scaler, [(8, 4), (10, 4), (14, 4)])[-1] == 2
    assert wanted(scaler, [(16, 99), (18, 99), (22, 99)])[-1] == 3, "never more than asked for"


def test_what_was_not_needed_for_long_ends(tmp_path):
    served(tmp_path, 1, 3)
    scaler = Scaler(tmp_path, per_server=1, idle_s=30)
    assert wanted(scaler, [(k, 3) for k in range(0, 12, 2)])[-1] == 3
    assert wanted(scaler, [(20, 1), (35, 2), (40, 0)]) == [3, 3, 3], "three were needed at 10"
    assert wanted(scaler, [(41, 0), (66, 0), (75, 0)]) == [2, 1, 1], "never fewer than asked for"
    (tmp_path / endpoints.SCALE).write_text('{"wanted": {"v1": 3}}')
    again = Scaler(tmp_path, per_server=1, idle_s=30)
    assert wanted(again, [(0, 0), (20, 0), (31, 0)]) == [3, 3, 1], "a restart is no reason to end"
    (tmp_path / endpoints.SCALE).unlink()
    # A short request between two looks is a load, too.
    served(tmp_path, 0, 1)
    scaler = Scaler(tmp_path, per_server=1, idle_s=10)
    for now in range(0, 40, 2):
        scaler.decide(0, 1, now)
        assert scaler.wanted == {"v1": 1}
    assert wanted(scaler, [(47, 0), (49, 0)]) == [1, 0]


def test_shares_divide_the_load_and_a_fixed_number_stays(tmp_path):
    served(tmp_path, 0, 9, "v2")
    (tmp_path / endpoints.SHARES).write_text('{"v1": 0.75, "v2": 0.25}')
    scaler = Scaler(tmp_path, per_server=2, idle_s=60)
    wanted(scaler, [(0, 8), (3, 8), (6, 8)])
    assert scaler.wanted == {"v1": 3, "v2": 1}
    served(tmp_path, 2, None)
    scaler.decide(99, 99, 20)
    assert scaler.wanted == {}


def test_a_request_waits_for_the_first_server_but_not_for_ever(tmp_path):
    served(tmp_path, 0, 1)

    async def run() -> None:
        async with (
            opened(Backend().app()) as below,
            gateway(tmp_path, cold_start_s=60) as (proxy, client, url),
            gateway(tmp_path, cold_start_s=0.2) as (hasty, _, other),
        ):
            for each in (proxy, hasty):
                each.scaler.decide(0, 0, 0.0)
            async with client.post(other, json={"messages": SAID}) as late:
                assert (late.status, late.headers["Retry-After"]) == (503, "30")
            async with client.get(url.replace(CHAT, "/health")) as answer:
                assert answer.status == 200, "a request would be answered"
            waiting = asyncio.create_task(client.post(url, json={"messages": SAID}))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            endpoints.tell(tmp_path, "a", {"state": "ready", "url": below, "version": "v1"})
            proxy.pool.refresh()
            assert (await waiting).status == 200

    asyncio.run(run())


@pytest.mark.parametrize("text", ["0", "-1", "4-2", "0-0", "1-", "x", "2-3-4"])
def test_a_wrong_range_is_refused(text):
    with pytest.raises(UsageFault, match="--replicas"):
        _range(text)
    assert (_range("3"), _range("0-4"), _range("2-2")) == ((3, None), (0, 4), (2, 2))


def test_two_commands_do_not_change_an_endpoint_at_the_same_time(tmp_path):
    endpoint = Endpoint(tmp_path)
    with (
        endpoint.alone(),
        pytest.raises(EndpointFault, match=r"is changing .* \(process "),
        endpoint.alone(),
    ):
        raise AssertionError
    served(tmp_path, 0, 2)
    assert json.loads((tmp_path / "endpoint.json").read_text())["served"][0]["max_replicas"] == 2
