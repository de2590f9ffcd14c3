"""What passes a front: the paths, the values and the parameters, before a server like vLLM's."""

import asyncio
import gzip
import json
from typing import Any

import pytest

from plugins.serve import parameters
from plugins.serve.answers import Cutter
from plugins.serve.journal import read
from plugins.serve.request import COMPLETIONS, BadRequest, parsed
from tests.plugins.serve.kit import CHAT, KEY, SAID, front


async def raw(url: str, method: str, path: str, body: bytes = b"", *headers: str) -> int:
    """Send a request as it is written, and return the status of its answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    given = (*headers, f"Content-Length: {len(body)}", "Connection: close", "Host: e")
    if not any(each.startswith("Authorization") for each in headers):
        given += (f"Authorization: Bearer {KEY}",)
    head = "\r\n".join([f"{method} {path} HTTP/1.1", *given]) + "\r\n\r\n"
    writer.write(head.encode("latin-1") + body)
    await writer.drain()
    line = await reader.readline()
    writer.close()
    return int(line.split()[1])


BODY = json.dumps({"messages": SAID}).encode()
OTHERS = [
    *[("POST", f"{CHAT}{more}", 404) for more in ("/", "%00", "/../completions")],
    *[("POST", path, 404) for path in (f"/{CHAT}", "/v1/./completions", "/v1/chat%2Fcompletions")],
    *[("POST", path, 404) for path in ("/v1/responses", "/v1/responses/", "/v1/embeddings", "/v1")],
    *[("POST", path, 404) for path in ("/tokenize", "/load_model")],
    *[
        ("POST", path, 404)
        for path in ("/v1/chat%252Fcompletions", "/openapi.json", "/metrics", "/")
    ],
    *[(method, CHAT, 405) for method in ("GET", "PUT", "HEAD", "OPTIONS", "PATCH", "DELETE")],
    *[("POST", path, 405) for path in ("/v1/models", "/health")],
    ("POST", f"{CHAT}?stream=true", 400),
    ("CONNECT", CHAT, 404),
]


def test_nothing_else_reaches_an_backend(tmp_path):
    async def check(client, url, backend):
        for method, path, status in OTHERS:
            assert await raw(url, method, path, BODY) == status, (method, path)
        for more in ("Content-Encoding: gzip", "Content-Length: x"):
            assert await raw(url, "POST", CHAT, BODY, more) == 400
        assert not backend.heard and not list(read(tmp_path / "requests"))
        # What a client offers, such as Java's with each request, may be ignored.
        for offer in ("Upgrade: h2c", "Upgrade: websocket"):
            assert await raw(url, "POST", CHAT, BODY, offer, "Connection: Upgrade") == 200
            assert "Upgrade" not in backend.headers
        assert len(list(read(tmp_path / "requests"))) == 2
        assert await raw(url, "POST", CHAT, BODY.decode().encode("utf-16")) == 400
        packed = "Content-Encoding: gzip"
        assert await raw(url, "POST", CHAT, gzip.compress(BODY), packed) == 200
        assert await raw(url, "POST", CHAT, gzip.compress(b" " * 2**21 + BODY), packed) == 413
        sent = {"X-Cookbook-Request-Id", "Cookie", "X-Forwarded-For", "Upgrade"}
        assert await raw(url, "POST", CHAT, BODY, "Cookie: a=b", "X-Forwarded-For: 1.2.3.4") == 200
        assert not sent & set(backend.headers)

    front(tmp_path, check)


def test_a_redirect_of_a_backend_is_not_passed_on(tmp_path):
    async def check(client, url, backend):
        wanted = {307: 502, 302: 502, 400: 400, 422: 400, 500: 500, 503: 503}
        for status, told in wanted.items():
            backend.status = status
            for stream in (False, True):
                body = {"messages": SAID, "stream": stream}
                async with client.post(url + CHAT, json=body, allow_redirects=False) as answer:
                    assert (answer.status, "Location" in answer.headers) == (told, False)
                    error = (await answer.json())["error"]
                    assert ("the backend's own words" in error["message"]) == (status >= 400)
        assert len(list(read(tmp_path / "requests"))) == 12

    front(tmp_path, check)


FAULTS: list[tuple[bytes, str | None]] = [
    (b"{", None),
    (b"[]", None),
    (b"\xff\xfe\xff", None),
    (b"[" * 200_000, None),
    (b'{"messages":' + b"[" * 250 + b"]" * 250 + b"}", None),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', None),
    (b'{"\\udc00": 1}', None),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', None),
    (b'{"messages": [{"role": "user", "content": "x"}], "top_p": 1e999}', None),
    (b'{"seed": ' + b"9" * 5000 + b"}", None),
    (b"{}", "messages"),
    (b'{"messages": []}', "messages"),
    (b'{"messages": ["x"]}', "messages[0]"),
    (b'{"messages": [{"role": "king", "content": "x"}]}', "messages[0].role"),
    (b'{"messages": [{"role": "user"}]}', "messages[0]"),
    (b'{"messages": [{"role": "user", "content": [{"text": "x"}]}]}', "messages[0].content"),
    *[
        (
            json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode(),
            "messages[0].content",
        )
        for part in ({"type": "image_url", "text": 5}, {"type": "x", "text": [1]}, {"type": "text"})
    ],
]
VALUES = {
    "max_tokens": (-1, 0, 1.5, "8", True, 2**70),
    "max_completion_tokens": (-1,),
    "temperature": (-0.1, 2.1, "1", True, []),
    "top_p": (-1, 1.1),
    "n": (0, 129, 1.5),
    "seed": (2**63, 1.0),
    "stop": ("", ["a", ""], ["a"] * 17, 1),
    "stream": ("yes", 1),
    "stream_options": ({"include_usage": True}, {"include_usage": 1}),
    "logit_bias": ({"a": 1}, {"1": 101}, [], {"9" * 4500: 1}, {"１": 1}),
    "logprobs": ("x",),
    "top_logprobs": (21, 1),
    "tools": ({}, [{"type": "function"}], [{}]),
    "tool_choice": ("some", "required"),
    "response_format": ("json", {}),
    "presence_penalty": (3,),
    "model": (1,),
    "user": (1,),
}


def test_client_errors_are_told_as_such_by_name(tmp_path):
    async def check(client, url, backend):
        made = [
            (json.dumps({"messages": SAID, name: value}).encode(), name)
            for name, values in VALUES.items()
            for value in values
        ]
        for body, param in [*FAULTS, *made]:
            async with client.post(url + CHAT, data=body) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["param"]) == (400, param), (body[:60], error)
        for count, n in ((65, 2), (129, 1), (64, 3)):
            body = {"prompt": ["a"] * count, "n": n}
            async with client.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 400 and "lower n" in await answer.text()
        for key in ("Bearer schlüssel", "Bearer \xff\xfe", "", "Basic eDp5", f"Bearer {KEY}x"):
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/models"), ("POST", CHAT)):
                assert await raw(url, method, path, BODY, f"Authorization: {key}") == 401
        assert not backend.heard and not list(read(tmp_path / "requests"))

    front(tmp_path, check)


def test_models_are_told_by_the_front_itself(tmp_path):
    async def check(client, url, backend):
        async with client.get(f"{url}/v1/models") as answer:
            (model,) = (await answer.json())["data"]
            assert (model["id"], model["object"]) == ("e", "model")
        for name, status in (("e", 200), ("other", 404)):
            assert await raw(url, "GET", f"/v1/models/{name}") == status
        assert not backend.heard

    front(tmp_path, check)


REFUSED = {
    "logprobs": True, "presence_penalty": 0.5, "frequency_penalty": 0.5, "top_logprobs": 2,
    "response_format": {"type": "json_object"}, "parallel_tool_calls": False, "functions": [],
    "modalities": ["audio"], "audio": {}, "prediction": {}, "reasoning_effort": "low", "foo": 1,
    "store": True, "service_tier": "flex", "web_search_options": {}, "suffix": "x", "best_of": 2,
    "n": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_transformers_does_not_do_is_refused(name):
    takes = parameters.Parameters("transformers", "m")
    with pytest.raises(BadRequest, match=name) as refused:
        takes.plan(CHAT, {"messages": SAID, name: REFUSED[name]})
    assert refused.value.param == name


def test_transformers_is_asked_by_its_own_names():
    takes = parameters.Parameters("transformers", "m", {"vocab_size": 9}, {"top_k": 20})

    def made(**more: Any) -> dict[str, Any]:
        plan = takes.plan(CHAT, {"messages": SAID, **more})
        config: dict[str, Any] = json.loads(plan.body["generation_config"])
        return config

    assert made() == {"max_new_tokens": 1024}, "else as the model's own configuration says"
    assert made(temperature=0, seed=1) == {"max_new_tokens": 1024, "do_sample": False, "seed": 1}
    heat = {"max_new_tokens": 8, "do_sample": True, "temperature": 0.7, "top_k": 20}
    assert made(seed=7, n=1, max_tokens=8, temperature=0.7) == {**heat, "seed": 7}
    bias = {**heat, "temperature": 1.0, "top_p": 0.5, "sequence_bias": [[[8], -1.0]]}
    assert made(top_p=0.5, logit_bias={"8": -1}, max_tokens=8) == bias
    with pytest.raises(BadRequest, match="the model has 9 tokens"):
        made(logit_bias={"9": 1})
    function = [{"type": "function", "function": {"name": "f"}}]
    plan = takes.plan(CHAT, {"messages": SAID, "tools": function, "tool_choice": "none"})
    assert "tools" not in plan.body
    image = {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}
    with pytest.raises(BadRequest, match="takes text only"):
        takes.plan(CHAT, {"messages": [{"role": "user", "content": [image]}]})
    plain = parameters.Parameters("transformers", "m", template="{{ messages }} {{ thinking }}")
    assert plain.plan(CHAT, {"messages": SAID, "chat_template_kwargs": {"thinking": True}}).body
    for more, param in (
        ({"tools": function}, "tools"),
        ({"chat_template_kwargs": {"enable_x": 1}}, "chat_template_kwargs.enable_x"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize"),
        ({"prompt": "x"}, "prompt"),
    ):
        with pytest.raises(BadRequest) as refused:
            plain.plan(CHAT, {"messages": SAID, **more})
        assert refused.value.param == param
    for prompt in (["a", "b"], [1, 2], [[1]]):
        with pytest.raises(BadRequest, match="one prompt, as text"):
            plain.plan(COMPLETIONS, {"prompt": prompt})


def test_stop_strings_end_a_stream_though_they_span_its_pieces(tmp_path):
    async def check(client, url, backend):
        stops = {"not to": "to be, or ", "that": "to be, or not to be, ", "x": None}
        for stop, text in stops.items():
            for stream in (False, True):
                body = {"messages": SAID, "stop": [stop, "zzz"], "stream": stream}
                body |= {"stream_options": {"include_usage": True}} if stream else {}
                async with client.post(url + CHAT, json=body) as answer:
                    said, end, usage = told(await answer.text(), stream)
                assert said == (text or "".join(backend.words))
                assert end == ("stop" if text else "length") and usage["completion_tokens"] == 5
        rows = list(read(tmp_path / "requests"))
        assert [row["answer"] for row in rows].count("to be, or ") == 2

    words = ("to be, ", "or n", "ot to", " be, th", "at is")
    front(tmp_path, check, *words, kind="transformers")


def told(text: str, stream: bool) -> tuple[str, str | None, dict[str, int]]:
    if not stream:
        value = json.loads(text)
        (choice,) = value["choices"]
        return choice["message"]["content"], choice["finish_reason"], value["usage"]
    assert text.endswith("data: [DONE]\n\n")
    events = [json.loads(line[5:]) for line in text.splitlines()[:-2] if line]
    assert not any("usage" in each for each in events[:-1]) and events[-1]["choices"] == []
    choices = [choice for each in events for choice in each["choices"]]
    said = "".join(each["delta"].get("content") or "" for each in choices)
    return said, choices[-1]["finish_reason"], events[-1]["usage"]


def test_any_split_of_a_text_is_cut_at_the_same_place():
    text, stops = "abcabcdabcab!", ["abcd", "cab!", "bca"]
    for one in range(len(text)):
        for other in range(one, len(text)):
            cutter = Cutter(stops)
            parts = (text[:one], text[one:other], text[other:])
            assert "".join(map(cutter.feed, parts)) + cutter.rest() == "a"
    kept = Cutter(["never"])
    assert kept.feed("nev") == "" and kept.feed("ada") == "nevada" and not kept.cut


def test_a_body_is_read_once_and_the_same_for_all():
    body = b'{"messages": [{"role": "user", "content": "a"}], "seed": 1, "seed": 2, "n": null}'
    assert parsed(CHAT, body) == {"messages": [{"role": "user", "content": "a"}], "seed": 2}
