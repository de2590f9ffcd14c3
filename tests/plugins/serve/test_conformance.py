"""The openai package's own cases for chat completions, before the real backend transformers serve.

The requests are those of openai-python's tests/api_resources, and every answer is validated by the
package against its types (strict), as its own tests do.
"""

import asyncio
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from launcher import paths
from plugins.serve import backends, parameters
from plugins.serve.front import Front
from plugins.serve.journal import Journal, read
from plugins.serve.upstream import Upstream
from tests.launcher.kit import until
from tests.plugins.serve.kit import KEY, SETTINGS, front

SYSTEM: Any = [{"role": "system", "content": "string"}]
ASKED: Any = [{"role": "user", "content": "What is Slurm used for?"}]
FUNCTION: Any = {"name": "name", "description": "description", "parameters": {"foo": "bar"}}
TOOLS: Any = [{"type": "function", "function": {**FUNCTION, "strict": True}}] * 3
# What those tests give beside messages and model.
EVERYTHING: dict[str, Any] = {
    "audio": {"format": "wav", "voice": "alloy"},
    "frequency_penalty": -2,
    "function_call": "none",
    "functions": [FUNCTION],
    "logit_bias": {"foo": 0},
    "logprobs": True,
    "max_completion_tokens": 0,
    "max_tokens": 0,
    "metadata": {"foo": "string"},
    "modalities": ["text", "audio"],
    "n": 1,
    "parallel_tool_calls": True,
    "prediction": {"content": "string", "type": "content"},
    "presence_penalty": -2,
    "reasoning_effort": "low",
    "response_format": {"type": "text"},
    "seed": -9007199254740991,
    "service_tier": "auto",
    "stop": "string",
    "store": True,
    "temperature": 1,
    "tool_choice": "none",
    "tools": TOOLS,
    "top_logprobs": 0,
    "top_p": 1,
    "user": "user-1234",
}
REFUSED = {"audio", "frequency_penalty", "functions", "logit_bias", "logprobs", "max_tokens"}
REFUSED |= {"max_completion_tokens", "modalities", "prediction", "presence_penalty", "store"}
REFUSED |= {"reasoning_effort"}
TWO_IN_A_ROW = """{% for m in messages %}{% if loop.previtem and loop.previtem.role == m.role %}
{{ raise_exception('two in a row') }}{% endif %}{% endfor %}"""


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[tuple[openai.OpenAI, Path]]:
    """A client, and the log of the front before the backend."""
    folder = tmp_path_factory.mktemp("served")
    data = paths.REPO_ROOT / "configs" / "datasets" / "slurm_qa.jsonl"
    argv = [sys.executable, "-m", "trainer.demo", str(folder / "tiny"), "--dataset", str(data)]
    subprocess.run(argv, check=True, capture_output=True)
    template = folder / "tiny" / "chat_template.jinja"
    template.write_text(TWO_IN_A_ROW + template.read_text())
    config = {**SETTINGS, "model": str(folder / "tiny"), "device": "cpu", "dtype": "float32"}
    backend = backends.command(config, folder, 0)
    with open(folder / "backend.log", "wb") as log:
        process = subprocess.Popen([*backends.python({}), *backend.argv], stdout=log, stderr=log)
    ready, loop, place = threading.Event(), asyncio.new_event_loop(), []

    async def serve() -> None:
        upstream = Upstream("a", "http://backend", socket=str(backend.socket), ready=True)
        while not await upstream.healthy():
            assert process.poll() is None, (folder / "backend.log").read_text()
            await asyncio.sleep(0.2)
        takes = parameters.parameters_of(config, backend.model)
        journal = Journal(folder / "requests")
        proxy = Front(config, "key", upstream, takes, journal)
        runner = web.AppRunner(proxy.app(), handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        place.append((runner.addresses[0][1], runner))
        ready.set()

    def run() -> None:
        loop.create_task(serve())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        assert ready.wait(240), (folder / "backend.log").read_text()
        url = f"http://127.0.0.1:{place[0][0]}/v1"
        with openai.OpenAI(
            base_url=url, api_key="key", max_retries=0, _strict_response_validation=True
        ) as client:
            yield client, folder / "requests"
    finally:
        asyncio.run_coroutine_threadsafe(place[0][1].cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        process.terminate()
        process.wait(30)


def text_of(client: openai.OpenAI, **more: Any) -> str:
    more = {"messages": ASKED, "model": "any", "max_tokens": 12} | more
    found = client.chat.completions.create(**more)
    (choice,) = found.choices
    return choice.message.content or ""


def streamed(client: openai.OpenAI, **more: Any) -> tuple[dict[int, str], dict[int, Any], Any]:
    texts: Counter[int] = Counter()
    parts: dict[int, str] = {}
    ends, usage = {}, None
    more = {"messages": ASKED, "model": "any", "max_tokens": 12} | more
    for event in client.chat.completions.create(**more, stream=True):
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += 1
            parts[choice.index] = parts.get(choice.index, "") + (choice.delta.content or "")
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    return parts, ends, usage


@pytest.mark.long
def test_openais_cases(served):
    client, _ = served
    create = client.chat.completions
    few = {"messages": SYSTEM, "model": "gpt-4o", "max_tokens": 3}
    assert create.create(**few).choices[0].finish_reason in ("stop", "length")
    raw = create.with_raw_response.create(**few)
    assert raw.http_request.headers.get("X-Stainless-Lang") == "python"
    assert raw.parse().object == "chat.completion" and raw.headers["X-Request-Id"]
    with create.with_streaming_response.create(**few) as response:
        assert response.parse().choices
    create.create(**few, stream=True).response.close()
    known = {key: value for key, value in EVERYTHING.items() if key not in REFUSED}
    for options in ({"stream": False}, {"stream": True, "stream_options": {"include_usage": True}}):
        assert create.create(**few, **known, **options)
    for name in REFUSED:
        with pytest.raises(openai.BadRequestError) as refused:
            create.create(**{**few, name: EVERYTHING[name]})
        assert refused.value.param == name and name in refused.value.message
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="any", input="hello")
    assert [each.id for each in client.models.list()] == ["e"]
    assert client.models.retrieve("e").id == "e"
    assert client.completions.create(model="any", prompt=["Slurm"], max_tokens=3).choices


@pytest.mark.long
def test_temperature_and_seed_do_what_they_say(served):
    client, log = served
    greedy = {text_of(client, temperature=0) for _ in range(2)} | {text_of(client)}
    assert len(greedy) == 1, "the model's own configuration is greedy"
    assert len({text_of(client, temperature=1.0) for _ in range(4)}) > 1
    one, same, other = (text_of(client, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    # Requests at the same time do not disturb each other.
    found: dict[int, list[str]] = {1: [], 2: []}

    def ask(seed: int) -> None:
        found[seed].append(text_of(client, seed=seed))

    threads = [threading.Thread(target=ask, args=(1 + k % 2,)) for k in range(8)]
    threads += [threading.Thread(target=text_of, args=(client,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {1: [one] * 4, 2: [other] * 4}
    parts, _, usage = streamed(client, seed=2, stream_options={"include_usage": True})
    assert parts[0].rstrip("\ufffd") == other.rstrip("\ufffd") and usage.completion_tokens == 12

    def row() -> dict[str, Any]:
        asked = {"seed": 2, "stream_options": {"include_usage": True}}
        return next(row for row in read(log) if (row["parameters"] | asked) == row["parameters"])

    until(lambda: row()["status"] == 200, 30)
    assert row()["answer_tokens"] == 12


@pytest.mark.long
def test_stop_strings_are_cut_and_end_the_generation(served):
    client, _ = served
    text = text_of(client, max_tokens=40)
    stop = next(text[k : k + 3] for k in range(8, 40) if text[k : k + 3].isascii())
    cut = text[: text.index(stop)]
    found = client.chat.completions.create(messages=ASKED, model="any", max_tokens=40, stop=stop)
    assert found.choices[0].message.content == cut and found.choices[0].finish_reason == "stop"
    assert found.usage.completion_tokens < 40, "the backend stopped"
    parts, ends, _ = streamed(client, max_tokens=40, stop=["never seen", stop])
    assert (parts[0], ends[0]) == (cut, "stop")
    # The end of the prompt is no part of the text.
    given = {"model": "any", "prompt": "Slurm ab", "max_tokens": 12}
    before = client.completions.create(**given).choices[0].text
    stop = "b" + before[0]
    assert stop not in before
    assert client.completions.create(**given, stop=stop).choices[0].text == before


@pytest.mark.long
def test_an_answer_ends_where_the_models_positions_end(served):
    """The next request waits for it, also if nobody waits for it any more."""
    client, _ = served
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="tokens, and the model takes 512 with"):
            client.completions.create(model="any", prompt="job " * 600, stream=stream)
    given = {"messages": ASKED, "model": "any", "max_tokens": 10**9}
    found = client.chat.completions.create(**given, logit_bias={"2": -100})
    assert found.usage.total_tokens == 512 and found.choices[0].finish_reason == "length"


@pytest.mark.long
def test_what_the_chat_template_refuses_is_the_clients_error(served):
    client, _ = served
    with pytest.raises(openai.BadRequestError, match="two in a row"):
        text_of(client, messages=ASKED * 2)


@pytest.mark.parametrize("streamed", [False, True])
def test_openais_cases_before_a_server_like_vllms(tmp_path, streamed):
    """vLLM itself needs a GPU."""
    refused = {"logit_bias", "max_tokens", "max_completion_tokens"}

    async def check(http, url, backend) -> None:
        known = {key: value for key, value in EVERYTHING.items() if key not in refused}
        given = {"messages": SYSTEM, "model": "gpt-4o", "stream": streamed}
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key=KEY, max_retries=0, _strict_response_validation=True
        ) as client:
            create: Any = client.chat.completions.create
            # The front's own id tells requests apart.
            more = {"top_k": 5, "structured_outputs": {"choice": ["a"]}}
            found = await create(**given, **known, extra_body={**more, "request_id": "mine"})
            if streamed:
                texts = [each.choices[0].delta.content async for each in found]
                assert "".join(texts) == "one two"
            else:
                assert found.choices[0].message.content == "one two"
            asked = backend.heard[-1][2]
            assert {**known, **more}.items() <= asked.items() and asked["model"] == "/models/m"
            assert "request_id" not in asked
            for name in refused:
                with pytest.raises(openai.BadRequestError) as error:
                    await create(**given, **{name: EVERYTHING[name]})
                assert error.value.param == name
        assert len(backend.heard) == 1

    front(tmp_path, check)
