"""Validates a request of OpenAI's protocol: its JSON, and the values of its parameters."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, Json, ValidationError, create_model
from pydantic import model_validator as validator
from pydantic_core import from_json

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class BadRequest(Exception):
    """Why a request is refused: a message, and the parameter."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class _Object(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Typed(_Object):
    type: str


class _Part(_Typed):
    text: str | None = None

    @validator(mode="after")
    def _has_text(self) -> Self:
        if self.type == "text" and self.text is None:
            raise ValueError("a part of type text has no text")
        return self


class _Function(_Object):
    name: str


class _Called(_Function):
    arguments: Json[Any]


class _Call(_Object):
    function: _Called


class _Message(_Object):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[_Part], Field(min_length=1)] | None = None
    tool_calls: list[_Call] | None = None

    @validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError("the message has no content")
        return self


class _Tool(_Object):
    type: Literal["function"]
    function: _Function


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False


def _number(least: float, most: float) -> Any:
    return Annotated[float, Field(ge=least, le=most)]


def _whole(least: int, most: int = 2**63 - 1) -> Any:
    return Annotated[int, Field(ge=least, le=most)]


_WHOLE: Any = _whole(0)
_BIAS: Any = _number(-100, 100)
_Ids = Annotated[list[_WHOLE], Field(min_length=1)]
_Text = Annotated[str, Field(min_length=1)]
# Python converts no more than 4,300 digits.
_TokenId = Annotated[str, Field(pattern="^[0-9]{1,18}$")]
_MESSAGES = Annotated[list[_Message], Field(min_length=1)]
_PROMPT: Any = str | _Ids | Annotated[list[str] | list[_Ids], Field(min_length=1)]
_VALUES: dict[str, Any] = {
    "model": str,
    "stream": bool,
    "stream_options": _StreamOptions,
    "temperature": _number(0, 2),
    "top_p": _number(0, 1),
    "top_k": _whole(-1),
    "min_p": _number(0, 1),
    "repetition_penalty": _number(0.01, 100),
    "seed": _whole(-(2**63)),
    # Each choice is an answer that is generated at the same time.
    "n": _whole(1, 128),
    "best_of": _whole(1, 128),
    "max_tokens": _whole(1),
    "max_completion_tokens": _whole(1),
    "stop": _Text | Annotated[list[_Text], Field(max_length=16)],
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "logit_bias": dict[_TokenId, _BIAS],
    "logprobs": bool | _whole(0, 20),
    "top_logprobs": _whole(0, 20),
    "tools": list[_Tool],
    "tool_choice": Literal["none", "auto", "required"] | _Typed,
    "parallel_tool_calls": bool,
    "response_format": _Typed,
    "user": str,
    "chat_template_kwargs": dict[str, Any],
}
_COMMON: dict[str, Any] = {name: (kind | None, None) for name, kind in _VALUES.items()}
_REQUESTS: dict[str, type[_Object]] = {
    CHAT: create_model("Chat", __base__=_Object, messages=(_MESSAGES, ...), **_COMMON),
    COMPLETIONS: create_model("Completion", __base__=_Object, prompt=(_PROMPT, ...), **_COMMON),
}
# Of one request, which must not keep all others waiting.
_MOST_ANSWERS = 128


def parsed(path: str, body: bytes) -> dict[str, Any]:
    """Return a body's JSON object without the names whose value is null.

    Raises:
        BadRequest: it is not JSON, or a value is not valid; it names the first fault.
    """
    try:
        given = from_json(body, allow_inf_nan=False)
        # 1e999 is JSON, and no number that a log or a backend could hold.
        json.dumps(given, allow_nan=False)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise BadRequest("the body is not a JSON object")
    try:
        # From the text: in Python's own objects strict models take no dictionaries.
        _REQUESTS[path].model_validate_json(body)
    except ValidationError as error:
        faults = [
            (_place(each["loc"]), each["msg"].removeprefix("Value error, "))
            for each in error.errors()
        ]
        place = faults[0][0]
        # Of a value with several forms pydantic says for each why it is not that one.
        reasons = dict.fromkeys(reason for where, reason in faults if where == place)
        raise BadRequest(f"{place}: {', or '.join(reasons)}", place) from None
    asked = {name: value for name, value in given.items() if value is not None}
    most, legacy = asked.get("max_completion_tokens"), asked.get("max_tokens")
    for name, needed, met in (
        ("max_tokens", "the value of max_completion_tokens", most in (None, legacy)),
        ("stream_options", "stream=true", asked.get("stream")),
        ("top_logprobs", "logprobs=true", asked.get("logprobs") or not asked.get("top_logprobs")),
        ("tool_choice", "tools", asked.get("tools") or asked.get("tool_choice") in _WITHOUT_TOOLS),
    ):
        if name in asked and not met:
            raise BadRequest(f"{name} needs {needed}", name)
    choices = max(int(asked.get(name, 1)) for name in ("n", "best_of"))
    count = choices * (len(prompts(asked)) if "prompt" in asked else 1)
    if count > _MOST_ANSWERS:
        raise BadRequest(
            f"the request asks for {count:,} answers (prompts times n), of at most "
            f"{_MOST_ANSWERS:,}: lower n, or send fewer prompts",
            "n",
        )
    return asked


_WITHOUT_TOOLS = ("none", "auto")


def _place(parts: tuple[int | str, ...]) -> str:
    """Return the name of a parameter, or of what is wrong in a message."""
    if len(parts) < 2 or parts[0] != "messages" or not isinstance(parts[1], int):
        return str(parts[0])
    return f"messages[{parts[1]}]" + "".join(f".{part}" for part in parts[2:3])


def prompts(asked: Mapping[str, Any]) -> list[str] | list[list[int]]:
    """Return the prompts of a valid completion, as texts or as token ids."""
    given = asked["prompt"]
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


def stops(asked: Mapping[str, Any]) -> list[str]:
    """Return the stop strings of a request."""
    given = asked.get("stop") or []
    return [given] if isinstance(given, str) else list(given)
