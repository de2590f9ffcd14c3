"""The front and the gateway before a real HTTP server that speaks OpenAI's protocol."""

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from aiohttp import ClientPayloadError, web

from plugins.serve import endpoint as endpoints
from plugins.serve import proxy as proxies
from plugins.serve.gateway import Gateway
from plugins.serve.journal import read
from plugins.serve.proxy import runner as runner_of
from tests.launcher.kit import until
from tests.plugins.serve.kit import (
    CHAT,
    KEY,
    SETTINGS,
    Backend,
    before_a_backend,
    front,
    gateway,
    opened,
    when,
)


def tell(folder: Path, name: str, url: str) -> None:
    """A server that is ready, as it would say."""
    endpoints.tell(folder, name, {"state": "ready", "url": url})


def logged(folder: Path) -> list[dict]:
    return list(read(folder / "requests"))


def ask(text: str = "hello", **more) -> dict:
    return {"model": "whatever", "messages": [{"role": "user", "content": text}], **more}


def test_an_answer_and_a_stream_are_passed_on_and_logged(tmp_path):
    """And a client's id that is used twice is no row's id."""

    async def check(client, url, server):
        given = {"X-Request-Id": "mine"}
        async with client.post(url + CHAT, json=ask(), headers=given) as answer:
            assert (await answer.json())["choices"][0]["message"]["content"] == "one two"
        async with client.post(url + CHAT, json=ask(stream=True), headers=given) as answer:
            text = await answer.text()
        assert text.endswith("data: [DONE]\n\n") and server.heard[0][2]["model"] == "/models/m"
        assert "Authorization" not in server.headers
        whole, stream = sorted(logged(tmp_path), key=lambda row: row["time"])
        assert whole["answer_tokens"] == 2
        assert stream["answer"] == "one two" and stream["first_token_s"] is not None
        tell(tmp_path, "a", url)
        async with gateway(tmp_path) as (_, asking, address):
            for _ in range(2):
                async with asking.post(address, json=ask(), headers=given) as answer:
                    assert answer.status == 200
                    last = answer.headers["X-Request-Id"]
        rows = logged(tmp_path)
        ids = {row["request_id"] for row in rows}
        assert len(ids) == 4 and last in ids, "the answer names the row of the log"

    front(tmp_path, check)


def test_too_much_is_refused_before_it_is_read_whole(tmp_path):
    async def check(client, url, server):
        body = json.dumps(ask("job " * 1_000_000))
        async with client.post(url + CHAT, data=body) as answer:
            assert answer.status == 413 and "1,048,576 bytes" in await answer.text()
        assert not server.heard and not logged(tmp_path)

    front(tmp_path, check)


def test_a_client_that_hangs_up_ends_the_answer_and_is_logged(tmp_path):
    async def check(client, url, server):
        server.pause = asyncio.Event()
        answer = await client.post(url + CHAT, json=ask(stream=True))
        await answer.content.readany()
        answer.close()
        await when(lambda: [row for row in logged(tmp_path) if row["status"]])
        (row,) = logged(tmp_path)
        assert row["status"] == 499 and row["answer"].startswith("one")
        await when(lambda: server.hung_up)  # it does not go on for nobody

    front(tmp_path, check)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    argv = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(argv, capture_output=True).returncode:
        pytest.skip("only root can mount a filesystem")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"0" * 4096):
            pass
    return filler


@pytest.mark.parametrize("required", [False, True])
def test_a_full_disk_costs_lines_of_the_log_and_no_answer(small_disk, required):
    async def check(client, url, server):
        statuses, filler = [], None
        for k in range(4):
            if k == 1:
                endpoints.tell(small_disk, "a", {"state": "starting"})
                filler = fill(small_disk)
                # The gateway must not lose sight of a server.
                endpoints.tell(small_disk, "a", {"state": "ready"})
                assert endpoints.servers(small_disk)[0]["state"] == "ready"
            if k == 3:
                filler.unlink()
            body = ask("abcd"[k] * 5000)
            async with client.post(url + CHAT, json=body) as answer:
                statuses.append(answer.status)
        assert statuses == ([200, 503, 503, 200] if required else [200] * 4)
        rows = sorted(logged(small_disk), key=lambda row: row["time"])
        assert [row["messages"][0]["content"][0] for row in rows] == ["a", "d"]
        assert [row["status"] for row in rows] == [200, 200]

    front(small_disk, check, log_required=required)


def test_a_stream_that_breaks_off_is_no_answer_and_is_told(tmp_path):
    async def check(client, url, server):
        server.breaks_off = True
        tell(tmp_path, "a", url)
        async with gateway(tmp_path) as (_, asking, address):
            answer = await asking.post(address, json=ask(stream=True))
            with pytest.raises(ClientPayloadError):
                await answer.read()
        assert len(server.heard) == 1, "what is sent cannot be taken back by another try"
        (row,) = logged(tmp_path)
        assert row["status"] == 502 and row["answer"] == "one "

    front(tmp_path, check)


def test_a_gateway_uses_no_server_that_it_cannot_reach_and_drops_one_that_is_lost(tmp_path):
    async def check(url: str, server: Backend) -> None:
        server.pause = asyncio.Event()
        place = endpoints.server_file(tmp_path, "a")

        def told(**more) -> None:
            tell(tmp_path, "a", url)
            place.write_text(json.dumps({**json.loads(place.read_text()), **more}))

        told(machine="n17", bind="loopback")
        async with gateway(tmp_path) as (proxy, client, address):
            pool = proxy.pool
            assert not pool.known, "another host's loopback address is not this host's"
            told(machine="n17", bind="node")
            pool.refresh()
            waiting = asyncio.create_task(client.post(address, json=ask()))
            await when(lambda: server.heard)
            told(time=time.time() - 60, bind="node")
            # Its file is old and it says no word of health: it is lost, and so is what it answers.
            pool.refresh()
            await pool.dismiss()
            answer = await asyncio.wait_for(waiting, 10)
            assert answer.status == 503 and "does not answer" in await answer.text()

    before_a_backend(check)


def test_half_a_request_holds_no_connection_and_a_malformed_one_is_not_logged(tmp_path, caplog):
    async def run() -> None:
        proxy = Gateway(SETTINGS, KEY, tmp_path)
        proxy.body_s = 0.1
        server = runner_of(proxy, headers_s=0.1)
        await server.setup()
        await web.TCPSite(server, "127.0.0.1", 0).start()
        port = server.addresses[0][1]

        async def answer(text: str, end: bytes = b"") -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(text.encode())
            async with asyncio.timeout(30):
                received = await (reader.readuntil(end) if end else reader.read())
            writer.close()
            return received

        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        assert await answer(head) == b"", "it is closed"
        half = await answer(f"{head}Content-Length: 9\r\n\r\n{{", b"}}")
        assert b"408" in half.splitlines()[0] and b"was not complete after 0.1 s" in half
        malformed = await answer(head.replace("\r\n", "\n") + "\n")
        assert b"400" in malformed.splitlines()[0]
        await server.cleanup()

    asyncio.run(run())
    assert KEY not in caplog.text and "Error handling request" not in caplog.text


def test_a_gateway_survives_more_connections_than_it_may_have(tmp_path):
    key = tmp_path / "key"
    key.write_text(KEY)
    settings = {"settings": {"endpoint": "e", "key_file": str(key)}}
    (tmp_path / endpoints.ENDPOINT).write_text(json.dumps(settings))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 64))

    argv = [sys.executable, "-m", "plugins.serve.gateway", str(tmp_path)]
    log = tmp_path / "log"
    process = subprocess.Popen(argv, preexec_fn=limit, stderr=log.open("wb"))
    gateway = tmp_path / endpoints.GATEWAY

    def ask() -> bytes:
        with socket.create_connection(("127.0.0.1", port), 20) as one:
            one.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            return one.recv(100)

    def half() -> socket.socket:
        one = socket.create_connection(("127.0.0.1", port), 20)
        one.sendall(b"POST / HTTP/1.1\r\n")
        return one

    try:
        until(gateway.exists, 60)
        port = int(json.loads(gateway.read_text())["url"].rpartition(":")[2])
        # Above the soft limit.
        held = [half() for _ in range(35)]
        assert b"503" in ask()
        held += [half() for _ in range(60)]
        until(lambda: "new connections: [Errno 24]" in log.read_text(), 60)
        for each in held:
            each.close()
        assert b"503" in ask(), "it takes connections again"
        process.terminate()
        assert process.wait(60) == 0 and not gateway.exists()
    finally:
        process.kill()


def test_an_answer_that_breaks_off_is_asked_of_another_server(tmp_path, monkeypatch):
    async def torn(request: web.Request) -> web.StreamResponse:
        part = web.StreamResponse(headers={"Content-Length": "1000"})
        part.content_type = "application/json"
        await part.prepare(request)
        await part.write(b'{"choices"')
        assert request.transport is not None
        request.transport.abort()
        return part

    async def check(whole: str, server: Backend) -> None:
        app = web.Application()
        app.router.add_post(CHAT, torn)
        # A lost node refuses no connection, it only does not answer.
        with ExitStack() as sockets, socket.create_server(("127.0.0.1", 0), backlog=0) as lost:
            port = lost.getsockname()[1]
            for _ in range(4):
                each = sockets.enter_context(socket.socket())
                each.setblocking(False)
                each.connect_ex(("127.0.0.1", port))
            async with opened(app) as broken:
                places = {"a": whole, "torn": broken, "lost": f"http://127.0.0.1:{port}"}
                for name, address in places.items():
                    tell(tmp_path, name, address)
                async with gateway(tmp_path) as (proxy, client, chat):
                    known, tried = proxy.pool.known, set()
                    while tried != {"torn", "lost"}:
                        for name in ("torn", "lost"):
                            known[name].failed_at = -100.0
                        async with client.post(chat, json=ask()) as answer:
                            assert answer.status == 200 and "one two" in await answer.text()
                        tried |= {name for name, each in known.items() if each.failed_at > 0}

    monkeypatch.setattr(proxies, "CONNECT_S", 0.1)
    before_a_backend(check)


def test_a_gateway_spreads_requests_and_asks_another_server(tmp_path):
    async def check(one: str, server: Backend) -> None:
        async with gateway(tmp_path) as (proxy, client, url):

            async def said(count: int) -> list[str]:
                proxy.pool.refresh()
                found = []
                for _ in range(count):
                    async with client.post(url, json=ask()) as answer:
                        assert answer.status == 200
                        found.append((await answer.json())["choices"][0]["message"]["content"])
                return found

            tell(tmp_path, "a", one)
            async with opened(Backend("from b").app()) as other:
                tell(tmp_path, "b", other)
                assert 5 < (await said(40)).count("one two") < 35
                endpoints.tell(tmp_path, "b", {"state": "draining", "url": other})
                assert set(await said(10)) == {"one two"}
                tell(tmp_path, "b", other)
            assert set(await said(30)) == {"one two"}, "no request failed although b is gone"

    before_a_backend(check)
