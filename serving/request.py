"""Validates a request of OpenAI's protocol: its JSON, its path, its parameters' values."""

import json
import math
import posixpath
import re
from collections.abc import Callable, Mapping
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# A depth that Python's own recursion, a chat template and an engine can process safely.
_DEPTH = 64
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_INT64 = 2**63
# Each choice is an answer that is generated at the same time.
_MOST_CHOICES = 128


class BadRequest(Exception):
    """Why a request is refused: a message, the parameter, and the HTTP status."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


def normal(path: str) -> str:
    """Return a decoded path without empty and dotted parts and without a slash at its end."""
    return "/" + posixpath.normpath("/" + path).strip("/")


def parsed(body: bytes) -> dict[str, Any]:
    """Return a body's JSON object without the names whose value is null; else raise BadRequest."""
    try:
        asked = json.loads(body, parse_constant=_no_number)
    except RecursionError:
        raise BadRequest(f"the body is nested deeper than {_DEPTH} levels") from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(asked, dict):
        raise BadRequest("the body is not a JSON object")
    _check_values(asked)
    return {name: value for name, value in asked.items() if value is not None}


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _check_values(asked: dict[str, Any]) -> None:
    """Raise BadRequest for values that no log and no engine can process."""
    left: list[tuple[Any, int]] = [(asked, 1)]
    while left:
        value, depth = left.pop()
        if depth > _DEPTH:
            raise BadRequest(f"the body is nested deeper than {_DEPTH} levels")
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise BadRequest("the body has half of a surrogate pair: send UTF-8") from None
        elif isinstance(value, float) and not math.isfinite(value):
            raise BadRequest("the body has a number that is too large")
        elif isinstance(value, dict):
            left += [(each, depth + 1) for pair in value.items() for each in pair]
        elif isinstance(value, list):
            left += [(each, depth + 1) for each in value]


def check(path: str, asked: Mapping[str, Any]) -> None:
    """Raise BadRequest for the first invalid value."""
    if path == CHAT:
        _check_messages(asked.get("messages"))
    else:
        prompts(asked)
    for name, (allowed, expected) in _VALUES.items():
        if name in asked and not allowed(asked[name]):
            raise BadRequest(f"{name} must be {expected}", name)
    most, legacy = asked.get("max_completion_tokens"), asked.get("max_tokens")
    if most is not None and legacy is not None and most != legacy:
        raise BadRequest("give max_completion_tokens or max_tokens, not both", "max_tokens")
    if "stream_options" in asked and not asked.get("stream"):
        raise BadRequest("stream_options needs stream=true", "stream_options")
    if asked.get("top_logprobs") and not asked.get("logprobs"):
        raise BadRequest("top_logprobs needs logprobs=true", "top_logprobs")
    if asked.get("tool_choice") not in (None, "none", "auto") and not asked.get("tools"):
        raise BadRequest("tool_choice needs tools", "tool_choice")


def prompts(asked: Mapping[str, Any]) -> list[str] | list[list[int]]:
    """Return the prompts of a completion, as texts or as token ids."""
    given = asked.get("prompt")
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if all(isinstance(each, str) for each in given):
            return given
        if all(_whole(each, 0) for each in given):
            return [given]
        if all(isinstance(each, list) and each and all(_whole(t, 0) for t in each)
               for each in given):  # fmt: skip
            return given
    raise BadRequest("prompt must be a text, a list of texts, or token ids", "prompt")


def answers(asked: Mapping[str, Any]) -> int:
    """Return how many answers a valid request asks for: prompts times choices."""
    given = [asked.get(name) for name in ("n", "best_of")]
    choices = max([1, *(int(each) for each in given if isinstance(each, int))])
    return choices * (len(prompts(asked)) if "messages" not in asked else 1)


def stops(asked: Mapping[str, Any]) -> list[str]:
    """Return the stop strings of a request."""
    given = asked.get("stop") or []
    return [given] if isinstance(given, str) else list(given)


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message", "messages")
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        if not isinstance(message, dict):
            raise BadRequest(f"{place} must be an object", place)
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise BadRequest(f"{place}.role must be one of {', '.join(_ROLES)}", f"{place}.role")
        calls = message.get("tool_calls")
        if calls is not None and not _tool_calls(calls):
            fault = "must be a list of calls, each with a function's name and JSON arguments"
            raise BadRequest(f"{place}.tool_calls {fault}", f"{place}.tool_calls")
        given = content is not None or (role == "assistant" and len(message) > 1)
        parts = isinstance(content, list) and bool(content) and all(map(_part, content))
        if not given or not (content is None or isinstance(content, str) or parts):
            fault = "must be a text or a list of parts, each with its type"
            raise BadRequest(f"{place}.content {fault}", f"{place}.content")


def _part(part: Any) -> bool:
    # Some types have no text; one that is there is counted and logged as a text.
    return _typed(part) and isinstance(
        part.get("text", "" if part["type"] != "text" else None), str
    )


def _tool_calls(calls: Any) -> bool:
    if not isinstance(calls, list):
        return False
    try:
        for call in calls:
            json.loads(call["function"]["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return False
    return all(_named(call["function"]) for call in calls)


def _number(value: Any, least: float, most: float) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and least <= value <= most


def _whole(value: Any, least: int, most: int = _INT64 - 1) -> bool:
    return isinstance(value, int) and _number(value, least, most)


def _texts(value: Any) -> bool:
    listed = [value] if isinstance(value, str) else value
    return isinstance(listed, list) and len(listed) <= 16 and all(
        isinstance(each, str) and each for each in listed
    )  # fmt: skip


def _tools(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict) and each.get("type") == "function" and _named(each.get("function"))
        for each in value
    )


def _named(function: Any) -> bool:
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _bias(value: Any) -> bool:
    return isinstance(value, dict) and all(
        # Python converts no more than 4,300 digits.
        re.fullmatch("[0-9]{1,18}", key) and _number(each, -100, 100)
        for key, each in value.items()
    )


def _typed(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("type"), str)


def _switch(value: Any) -> bool:
    return isinstance(value, bool)


def _options(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() <= {"include_usage"} and all(
        map(_switch, value.values())
    )  # fmt: skip


_Check = tuple[Callable[[Any], bool], str]
_LENGTH: _Check = (lambda v: _whole(v, 1), "a whole number of 1 or more")
_PENALTY: _Check = (lambda v: _number(v, -2, 2), "a number from -2 to 2")
_VALUES: dict[str, _Check] = {
    "model": (lambda v: isinstance(v, str), "a text"),
    "stream": (_switch, "true or false"),
    "stream_options": (_options, "an object with include_usage only"),
    "temperature": (lambda v: _number(v, 0, 2), "a number from 0 to 2"),
    "top_p": (lambda v: _number(v, 0, 1), "a number from 0 to 1"),
    "top_k": (lambda v: _whole(v, -1), "a whole number; 0 or -1: all tokens"),
    "min_p": (lambda v: _number(v, 0, 1), "a number from 0 to 1"),
    "repetition_penalty": (lambda v: _number(v, 0.01, 100), "a number from 0.01 to 100"),
    "seed": (lambda v: _whole(v, -_INT64), "a whole number of 64 bits"),
    "n": (lambda v: _whole(v, 1, _MOST_CHOICES), f"a whole number from 1 to {_MOST_CHOICES}"),
    "max_tokens": _LENGTH,
    "max_completion_tokens": _LENGTH,
    "stop": (_texts, "a text or a list of at most 16 texts, none of them empty"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "logit_bias": (_bias, "an object of token ids with numbers from -100 to 100"),
    "logprobs": (
        lambda v: _switch(v) or _whole(v, 0, 20),
        "true or false, or for completions 0 to 20",
    ),
    "top_logprobs": (lambda v: _whole(v, 0, 20), "a whole number from 0 to 20"),
    "tools": (_tools, "a list of functions, each with type=function and a name"),
    "tool_choice": (
        lambda v: v in ("none", "auto", "required") or _typed(v),
        "none, auto, required, or an object with a type",
    ),
    "parallel_tool_calls": (_switch, "true or false"),
    "response_format": (_typed, "an object with a type"),
    "user": (lambda v: isinstance(v, str), "a text"),
    "chat_template_kwargs": (lambda v: isinstance(v, dict), "an object"),
}
# What a line of a file of questions may say of its own request.
OF_A_LINE = frozenset(_VALUES) - {"model", "stream", "stream_options", "n", "user"}
