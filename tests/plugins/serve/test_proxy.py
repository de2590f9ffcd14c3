"""The front and the gateway before a real HTTP server that speaks OpenAI's protocol."""

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from plugins.serve import endpoint as endpoints
from plugins.serve import proxy as proxies
from plugins.serve.client import BrokenOff, Client
from plugins.serve.front import Front
from plugins.serve.gateway import Gateway
from plugins.serve.journal import Journal, read
from plugins.serve.keys import Keys, Quotas
from plugins.serve.parameters import Parameters
from plugins.serve.proxy import runner as runner_of
from plugins.serve.upstream import Pool, Upstream
from tests.launcher.kit import until
from tests.plugins.serve import test_protocol
from tests.plugins.serve.test_protocol import CHAT, KEY, SETTINGS


class Answering:
    """A server that answers chat completions, at once or as a stream of words."""

    def __init__(self, name: str) -> None:
        self.name, self.heard, self.hung_up, self.pause_s = name, [], 0, 0.0
        self.keys: list[str] = []
        self.breaks_off = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.heard.append(body)
        self.keys.append(request.headers["Authorization"])
        usage = {"prompt_tokens": 3, "completion_tokens": 4}
        if not body.get("stream"):
            await asyncio.sleep(self.pause_s)
            message = {"role": "assistant", "content": f"from {self.name}"}
            return web.json_response({"choices": [{"message": message}], "usage": usage})
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        try:
            for word in ("one ", "two ", "three ", "four"):
                delta = {"choices": [{"delta": {"content": word}}]}
                await stream.write(f"data: {json.dumps(delta)}\n\n".encode())
                if self.breaks_off:
                    assert request.transport is not None
                    request.transport.abort()
                await asyncio.sleep(self.pause_s)
        except (ConnectionResetError, asyncio.CancelledError):
            self.hung_up += 1
            raise
        await stream.write(b"data: [DONE]\n\n")
        return stream


async def opened(app: web.Application) -> tuple[web.AppRunner, str]:
    runner, port = await test_protocol.opened(app)
    return runner, f"http://127.0.0.1:{port}"


async def answering(name: str) -> tuple[Answering, web.AppRunner, str]:
    server, app = Answering(name), web.Application()
    app.router.add_post("/v1/chat/completions", server.answer)
    return server, *await opened(app)


def front(tmp_path, check, **settings) -> None:
    """Run `check(client, url, server, folder)` on a front with a log before one server."""

    async def run() -> None:
        server, below, address = await answering("a")
        count = settings.pop("count", None)
        proxy = Front(
            {**SETTINGS, **settings},
            Keys(KEY),
            Upstream("a", address, key="the backend's own", ready=True),
            Parameters("vllm", "/models/m"),
            Journal(tmp_path / "requests"),
            Quotas(tmp_path, "a"),
            *((count, 100) if count else ()),
        )
        runner, url = await opened(proxy.app())
        headers = {"Authorization": f"Bearer {KEY}"}
        async with aiohttp.ClientSession(headers=headers) as client:
            await check(client, f"{url}/v1/chat/completions", server, tmp_path / "requests")
        await runner.cleanup()
        await below.cleanup()

    asyncio.run(run())


@asynccontextmanager
async def gateway(
    folder: Path,
) -> AsyncIterator[tuple[Pool, aiohttp.ClientSession, str]]:
    """A gateway's pool, a client, and the address of chat completions."""
    proxy = Gateway(SETTINGS, Keys(KEY), folder)
    proxy.pool.refresh()
    runner, url = await opened(proxy.app())
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as client:
        yield proxy.pool, client, url + CHAT
    await runner.cleanup()


def ask(text: str = "hello", **more) -> dict:
    return {"model": "whatever", "messages": [{"role": "user", "content": text}], **more}


def test_an_answer_and_a_stream_are_passed_on_and_logged(tmp_path):
    async def check(client, url, server, log):
        async with client.post(url, json=ask(), headers={"X-Request-Id": "mine"}) as answer:
            assert (await answer.json())["choices"][0]["message"]["content"] == "from a"
            assert answer.headers["X-Client-Request-Id"] == "mine"
        async with client.post(url, json=ask(stream=True)) as answer:
            text = await answer.text()
        assert text.endswith("data: [DONE]\n\n") and server.heard[0]["model"] == "/models/m"
        assert set(server.keys) == {"Bearer the backend's own"}
        whole, stream = sorted(read(log), key=lambda row: row["time"])
        assert whole["client_id"] == "mine" and whole["answer_tokens"] == 4
        assert stream["answer"] == "one two three four" and stream["first_token_s"] is not None
        metrics = await (await client.get(url.replace(CHAT, "/metrics"))).text()
        assert 'cookbook_requests_total{endpoint="e",status="200"} 2' in metrics

    front(tmp_path, check)


@pytest.mark.parametrize("key", ["", "Bearer wrong", f"Bearer {KEY}x"])
def test_nobody_gets_in_without_the_key(tmp_path, key):
    async def check(client, url, server, log):
        for path in (url, url.replace("chat/completions", "models")):
            async with client.post(path, json=ask(), headers={"Authorization": key}) as answer:
                assert answer.status == 401
                assert KEY not in await answer.text()
        metrics = url.replace(CHAT, "/metrics")
        async with client.get(metrics, headers={"Authorization": key}) as answer:
            assert answer.status == 401
        assert not server.heard and not list(read(log))

    front(tmp_path, check)


def test_too_much_is_refused_in_words(tmp_path):
    """Of many bytes before they are read whole, of many tokens before the backend hears of them."""
    cases = [
        ({"data": json.dumps(ask("job " * 1_000_000))}, 413, "1,048,576 bytes"),
        ({"json": ask("job " * 200_000)}, 400, "has 200,000 tokens, and the model takes 100"),
        ({"json": ask("job") | {"max_tokens": 101}}, 400, "max_tokens is 101, and the model takes"),
        ({"data": "{", "headers": {"Content-Type": "x/y"}}, 400, "not JSON"),
    ]

    async def check(client, url, server, log):
        for given, status, words in cases:
            async with client.post(url, **given) as answer:
                assert (answer.status, words in await answer.text()) == (status, True), words
        assert not server.heard and not list(read(log))

    front(tmp_path, check, count=lambda text: len(text.split()))


def test_the_rate_is_limited(tmp_path):
    async def check(client, url, server, log):
        statuses = [(await client.post(url, json=ask())).status for _ in range(12)]
        assert statuses.count(200) <= 5 and 429 in statuses

    front(tmp_path, check, rate_per_s=2)


def test_a_client_that_hangs_up_ends_the_answer_and_is_logged(tmp_path):
    async def check(client, url, server, log):
        server.pause_s = 0.3
        answer = await client.post(url, json=ask(stream=True))
        await answer.content.readany()
        answer.close()
        deadline = time.monotonic() + 15
        while not (rows := list(read(log))) or rows[0]["status"] == 0:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert rows[0]["status"] == 499 and rows[0]["answer"].startswith("one")
        while not server.hung_up:
            assert time.monotonic() < deadline, "the server does not go on for nobody"
            await asyncio.sleep(0.05)

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
    async def check(client, url, server, log):
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
            async with client.post(url, json=body) as answer:
                statuses.append(answer.status)
        assert statuses == ([200, 503, 503, 200] if required else [200] * 4)
        rows = sorted(read(log), key=lambda row: row["time"])
        assert [json.loads(row["messages"])[0]["content"][0] for row in rows] == ["a", "d"]
        assert [row["status"] for row in rows] == [200, 200]
        metrics = await (await client.get(url.replace(CHAT, "/metrics"))).text()
        assert 'cookbook_unlogged_total{endpoint="e"} 2' in metrics

    front(small_disk, check, log_required=required)


def test_a_stream_that_breaks_off_is_no_answer_and_is_told(tmp_path, capsys):
    async def check(client, url, server, log):
        server.breaks_off = True
        endpoints.tell(tmp_path, "a", {"state": "ready", "url": url.removesuffix(CHAT)})
        asking = Client(tmp_path, KEY)
        with pytest.raises(BrokenOff, match="the answer broke off: the server went away"):
            await asking.ask({"messages": ask()["messages"]}, stream=True)
        await asking.session.close()
        assert len(server.heard) == 1, "what is printed cannot be taken back by another try"
        (row,) = read(log)
        assert row["status"] == 502 and row["answer"] == "one "

    front(tmp_path, check)
    assert capsys.readouterr().out == "one \n"


def test_a_gateway_uses_no_server_that_it_cannot_reach_and_drops_one_that_is_lost(tmp_path):
    async def run() -> None:
        server, runner, url = await answering("a")
        server.pause_s = 60.0
        place = endpoints.server_file(tmp_path, "a")

        def tell(**more) -> None:
            endpoints.tell(tmp_path, "a", {"state": "ready", "url": url, "version": "v"})
            place.write_text(json.dumps({**json.loads(place.read_text()), **more}))

        tell(machine="n17", bind="loopback")
        async with gateway(tmp_path) as (pool, client, address):
            assert not pool.known, "another host's loopback address is not this host's"
            tell(machine="n17", bind="node")
            pool.refresh()
            waiting = asyncio.create_task(client.post(address, json=ask()))
            while not server.heard:
                await asyncio.sleep(0.01)
            tell(time=time.time() - 60, bind="node")
            # Its file is old and it says no word of health: it is lost, and so is what it answers.
            pool.refresh()
            await pool.dismiss()
            answer = await asyncio.wait_for(waiting, 10)
            assert answer.status == 503 and "does not answer" in await answer.text()
        await runner.cleanup()

    asyncio.run(run())


def test_half_a_request_holds_no_connection_and_a_malformed_one_is_not_logged(tmp_path, caplog):
    async def run() -> None:
        proxy = Gateway(SETTINGS, Keys(KEY), tmp_path)
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

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", torn)
        broken, place = await opened(app)
        _, whole, url = await answering("a")
        # A lost node refuses no connection, it only does not answer.
        with socket.create_server(("127.0.0.1", 0), backlog=0) as lost:
            port = lost.getsockname()[1]
            full = [socket.socket() for _ in range(4)]
            for each in full:
                each.setblocking(False)
                each.connect_ex(("127.0.0.1", port))
            places = {"a": url, "torn": place, "lost": f"http://127.0.0.1:{port}"}
            for name, address in places.items():
                endpoints.tell(tmp_path, name, {"state": "ready", "url": address, "version": "v"})
            async with gateway(tmp_path) as (pool, client, chat):
                tried: set[str] = set()
                while tried != {"torn", "lost"}:
                    for name in ("torn", "lost"):
                        pool.known[name].failed_at = -100.0
                    async with client.post(chat, json=ask()) as answer:
                        assert answer.status == 200
                        said = (await answer.json())["choices"][0]["message"]["content"]
                        assert said == "from a"
                    tried |= {name for name, each in pool.known.items() if each.failed_at > 0}
            for each in full:
                each.close()
        for runner in (whole, broken):
            await runner.cleanup()

    monkeypatch.setattr(proxies, "CONNECT_S", 0.1)
    asyncio.run(run())


def test_a_gateway_spreads_asks_another_and_keeps_to_the_shares(tmp_path):
    async def run() -> None:
        servers = {name: await answering(name) for name in ("a", "b")}
        for name, (_, _, url) in servers.items():
            endpoints.tell(tmp_path, name, {"state": "ready", "url": url, "version": f"v-{name}"})
        async with gateway(tmp_path) as (pool, client, url):

            async def said(count: int) -> list[str]:
                found = []
                for _ in range(count):
                    async with client.post(url, json=ask()) as answer:
                        assert answer.status == 200
                        found.append((await answer.json())["choices"][0]["message"]["content"])
                return found

            both = await said(40)
            assert 5 < both.count("from a") < 35
            endpoints.tell(tmp_path, "b", {"state": "draining", "url": servers["b"][2]})
            pool.refresh()
            assert set(await said(10)) == {"from a"}
            endpoints.tell(tmp_path, "b", {"state": "ready", "url": servers["b"][2],
                                           "version": "v-b"})  # fmt: skip
            (tmp_path / endpoints.SHARES).write_text('{"v-a": 0.9, "v-b": 0.1}')
            pool.refresh()
            shared = await said(200)
            assert 5 <= shared.count("from b") <= 40
            await servers["b"][1].cleanup()
            assert set(await said(30)) == {"from a"}, "no request failed although b is gone"
        await servers["a"][1].cleanup()

    asyncio.run(run())


def test_a_clients_id_used_twice_is_two_rows(tmp_path):
    async def check(client, url, server, log):
        given = {"X-Request-Id": "mine"}
        for _ in range(2):
            async with client.post(url, json=ask(), headers=given) as answer:
                assert answer.headers["X-Client-Request-Id"] == "mine"
        endpoints.tell(tmp_path, "a", {"state": "ready", "url": url.removesuffix(CHAT)})
        async with gateway(tmp_path) as (_, asking, address):
            for _ in range(2):
                async with asking.post(address, json=ask(), headers=given) as answer:
                    assert answer.status == 200
                    last = answer.headers["X-Request-Id"]
        rows = list(read(log))
        assert [row["client_id"] for row in rows] == ["mine"] * 4
        ids = [row["request_id"] for row in rows]
        assert len(set(ids)) == 4 and last in ids, "the answer names the row of the log"

    front(tmp_path, check)
