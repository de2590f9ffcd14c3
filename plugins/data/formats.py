"""Formats of records: each becomes prompt and answer, and a conversation if it has more messages.

A row of the kit: prompt and answer are texts; messages is the conversation as JSON, null if it
consists of the prompt as the user's message and the answer as the assistant's; rejected is the
worse answer of a preference pair. A plain text is an answer without a prompt.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from plugins.data.datarecipe import FORMATS
from plugins.data.errors import BadRow

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}

# What a message or a record may say beyond role and content, and the kit's rows have no place for.
_LOST = {"tools", "tool_calls", "function_call", "reasoning_content", "reasoning", "thinking"}
_LOST |= {"train"}
_EMPTY: tuple[Any, ...] = (None, "", [], "[]", "null")


class Content(NamedTuple):
    """The content of a record."""

    prompt: str | None
    answer: str
    messages: str | None = None
    rejected: str | None = None


def reader(form: str, columns: Mapping[str, str]) -> Callable[[Mapping[str, Any]], Content]:
    """Return the function that reads a record; it raises BadRow.

    columns: the source's own names of the format's columns.
    """
    names = FORMATS[form] | {key: str(value) for key, value in columns.items()}
    return lambda record: _READERS[form](record, names)


# The columns of formats whose texts are a row's own, by the names that they have in a row.
_OWN_TEXTS = {"qa": {"prompt": "question", "answer": "answer"}, "text": {"answer": "text"}}


def text_columns(source: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns that are a row's prompt and answer as they are, {} for other formats."""
    given = source.get("columns") or {}
    own = _OWN_TEXTS.get(source["format"], {})
    return {name: str(given.get(each, each)) for name, each in own.items()}


def encode(messages: list[dict[str, str]]) -> str:
    """Return a conversation as the JSON text that the kit keeps."""
    return json.dumps(messages, ensure_ascii=False, separators=(",", ":"))


def turns_of(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the conversation of a row of the kit; a text without a prompt is only an answer."""
    if row["messages"]:
        turns: list[dict[str, str]] = json.loads(row["messages"])
        return turns
    user = [] if row["prompt"] is None else [{"role": "user", "content": row["prompt"]}]
    return [*user, {"role": "assistant", "content": row["answer"]}]


def of_messages(messages: list[dict[str, str]]) -> Content:
    """Return the content of a conversation that ends with the assistant's answer."""
    if not messages or messages[-1]["role"] != "assistant":
        raise BadRow("the conversation does not end with an answer of the assistant")
    prompt = "\n".join(each["content"] for each in messages[:-1])
    plain = len(messages) == 2 and messages[0]["role"] == "user"
    return Content(prompt, messages[-1]["content"], None if plain else encode(messages))


def _column(record: Mapping[str, Any], column: str) -> Any:
    if column not in record:
        raise BadRow(f"has no column {column!r}, only {', '.join(map(str, record)) or 'none'}")
    return record[column]


def _text(record: Mapping[str, Any], column: str, optional: bool = False) -> str:
    if optional and record.get(column) is None:
        return ""
    value = _column(record, column)
    if value is None:
        raise BadRow(f"{column!r} is null")
    if not isinstance(value, str):
        raise BadRow(f"{column!r} is not a text but {type(value).__name__}")
    if not value.strip() and not optional:
        raise BadRow(f"{column!r} is empty")
    return _sound(value, column)


def _sound(value: str, column: str) -> str:
    """Refuse half of a surrogate pair, which JSON's escapes allow and UTF-8 does not."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRow(f"{column!r} has half of a surrogate pair") from None
    return value


def _turns(record: Mapping[str, Any], column: str, role: str, content: str) -> list[dict[str, str]]:
    value = _column(record, column)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadRow(f"{column!r} is a text and not JSON: {error}") from None
    if not isinstance(value, list) or not value:
        raise BadRow(f"{column!r} is not a list of messages")
    turns = []
    for number, turn in enumerate(value, 1):
        if not isinstance(turn, Mapping) or role not in turn or content not in turn:
            raise BadRow(f"message {number} of {column!r} has no {role} and {content}")
        name = _ROLES.get(str(turn[role]))
        if name is None:
            raise BadRow(f"message {number} of {column!r} has the role {turn[role]!r}")
        _check_kept(turn, f"message {number} of {column!r}")
        turns.append({"role": name, "content": _content(turn[content], number, column)})
    return turns


def _check_kept(values: Mapping[str, Any], where: str) -> None:
    """Refuse a message or a record of which a part would be lost: it would train something else."""
    lost = [key for key in values if key in _LOST and values[key] not in _EMPTY]
    if values.get("weight") not in (None, 1):
        lost.append(f"weight {values['weight']}")
    if lost:
        raise BadRow(
            f"{where} has {', '.join(lost)}, which prepared sets do not keep; train on the file "
            "itself (source: json)"
        )


def _content(value: Any, number: int, column: str) -> str:
    """Return the text of a message; OpenAI's parts of type text are joined."""
    if isinstance(value, list):
        parts = [part.get("text") for part in value if isinstance(part, Mapping)]
        if len(parts) != len(value) or not all(isinstance(part, str) for part in parts):
            raise BadRow(f"message {number} of {column!r} has parts that are not text")
        value = "".join(str(part) for part in parts)
    if not isinstance(value, str):
        raise BadRow(f"message {number} of {column!r} has no text")
    return _sound(value, column)


def _alpaca(record: Mapping[str, Any], names: Mapping[str, str]) -> Content:
    prompt = _text(record, names["instruction"])
    more = _text(record, names["input"], optional=True)
    return Content(f"{prompt}\n\n{more}" if more else prompt, _text(record, names["output"]))


def _sharegpt(record: Mapping[str, Any], names: Mapping[str, str]) -> Content:
    _check_kept({"tools": record.get("tools")}, "the conversation")
    return of_messages(_turns(record, names["conversations"], "from", "value"))


def _messages(record: Mapping[str, Any], names: Mapping[str, str]) -> Content:
    _check_kept({"tools": record.get("tools")}, "the conversation")
    turns = _turns(record, names["messages"], "role", "content")
    if names["answer"]:
        # A log of requests has the question as messages, and the answer in another column.
        answer = _text(record, names["answer"])
        turns.append({"role": "assistant", "content": answer})
    return of_messages(turns)


def _qa(record: Mapping[str, Any], names: Mapping[str, str]) -> Content:
    return Content(_text(record, names["question"]), _text(record, names["answer"]))


def _plain(record: Mapping[str, Any], names: Mapping[str, str]) -> Content:
    return Content(None, _text(record, names["text"]))


def _preference(record: Mapping[str, Any], names: Mapping[str, str]) -> Content:
    def answer(column: str) -> str:
        # Both forms are in use: the text of the answer, or the whole conversation.
        if isinstance(record.get(column), list):
            return _turns(record, column, "role", "content")[-1]["content"]
        return _text(record, column)

    chosen, rejected = answer(names["chosen"]), answer(names["rejected"])
    if names["prompt"] not in record and isinstance(record.get(names["chosen"]), list):
        turns = _turns(record, names["chosen"], "role", "content")
        prompt = "\n".join(turn["content"] for turn in turns[:-1])
    else:
        prompt = _text(record, names["prompt"])
    if chosen == rejected:
        raise BadRow(f"{names['chosen']!r} and {names['rejected']!r} are the same")
    return Content(prompt, chosen, None, rejected)


_READERS: dict[str, Callable[[Mapping[str, Any], Mapping[str, str]], Content]] = {
    "alpaca": _alpaca,
    "sharegpt": _sharegpt,
    "messages": _messages,
    "qa": _qa,
    "text": _plain,
    "preference": _preference,
}
