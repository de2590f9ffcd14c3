"""Conversations in OpenAI's form, rendered by the model's own chat template, tool calls included.

A sample is {"messages": [...], "tools": [...]}: roles system, user, assistant and tool; content is
text, a list of text parts, or null beside tool calls.
"""

from collections.abc import Callable, Mapping
from typing import Any

from runspec.files import parse_json
from trainer.data.marks import REASONING
from trainer.data.rows import Rows
from trainer.errors import ConfigError
from trainer.layers.batch import IGNORE_INDEX

TRAIN_ON = ("all", "last")
# OpenAI's key of an answer that is not to be trained (0) or is (1).
WEIGHT = "weight"
ROLES = ("system", "developer", "user", "assistant", "tool")

Turns = list[dict[str, Any]]


class Chats(Rows):
    """Conversations, tokenised when they are read: samples with `tokens` and `labels`.

    Args:
        tokenizer: of the model's folder.
        read: a row's turns, as a chat template takes them.
        train_on: "all" answers, or the "last" one; without those of the weight 0.
        train_on_input: train the other turns as well.
        new_system_prompt: takes the place of every system message; it is never trained.
        tools_column: of the schemas of a conversation's tools, which a row may leave out.
        rows: see Rows.

    Raises:
        ConfigError: an unknown value of `train_on`.
    """

    def __init__(
        self,
        tokenizer: Any,
        read: Callable[[Mapping[str, Any]], Turns],
        *,
        train_on: str = "all",
        train_on_input: bool = False,
        new_system_prompt: str | None = None,
        tools_column: str = "",
        **rows: Any,
    ) -> None:
        if train_on not in TRAIN_ON:
            known = ", ".join(TRAIN_ON)
            raise ConfigError(f"dataset.train_on: must be one of {known}; got {train_on}")
        super().__init__(**rows)
        self._tokenizer, self._read, self._tools = tokenizer, read, tools_column
        self._train_on, self._train_on_input = train_on, train_on_input
        self._system = new_system_prompt

    def turns(self, index: int) -> Turns:
        """The turns of a sample."""
        return with_system(self._read(self.row(index)), self._system)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        row = self.row(index)
        turns = with_system(self._read(row), self._system)
        weights = [turn.pop(WEIGHT, 1) for turn in turns]
        trained = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        if self._train_on_input:
            trained = list(range(0 if self._system is None else 1, len(turns)))
        elif self._train_on == "last":
            trained = trained[-1:]
        trained = [i for i in trained if weights[i]]
        tools = self.finite(row, self._tools) if self._tools else None
        return labelled(self._tokenizer, turns, trained, schemas_of(tools, self._tools))


def conversation_dataset(
    tokenizer: Any,
    *,
    source: str,
    conversation_column: str = "messages",
    tools_column: str = "tools",
    **options: Any,
) -> Chats:
    """Open a dataset of conversations; see Chats and Rows.

    Args:
        conversation_column, tools_column: where the messages are, and the schemas of their tools.
    """

    def read(row: Mapping[str, Any]) -> Turns:
        return turns_of(Rows.finite(row, conversation_column), conversation_column)

    return Chats(tokenizer, read, tools_column=tools_column, source=source, **options)


def with_system(turns: Turns, system: str | None) -> Turns:
    """Turns with this system prompt in the place of their own; None leaves them as they are."""
    if system is None:
        return turns
    own = {"role": "system", "content": system}
    return [own, *(turn for turn in turns if turn["role"] != "system")]


def labelled(
    tokenizer: Any, turns: Turns, trained: list[int], tools: list[dict[str, Any]] | None = None
) -> dict[str, list[int]]:
    """A conversation as `tokens` and `labels`.

    Args:
        turns: {role, content}.
        trained: which turns are trained.
        tools: the schemas of the tools.
    """
    tokens, mask = tokenizer.tokenize_turns(turns, trained, tools)
    labels = [IGNORE_INDEX if masked else token for token, masked in zip(tokens, mask, strict=True)]
    return {"tokens": tokens, "labels": labels}


def turns_of(messages: Any, column: str = "messages") -> Turns:
    """Messages as a chat template takes them.

    Parts of text become one text, a null content beside tool calls an empty one, and the arguments
    of a call, which OpenAI has as a string of JSON, an object.

    Raises:
        ConfigError: names the message, counted from 1, and what is wrong with it.
    """
    if not isinstance(messages, list) or not messages:
        raise ConfigError(
            f"there are no messages in the column {column!r}; name another one with "
            "dataset.conversation_column"
        )
    turns = []
    for number, message in enumerate(messages, 1):
        where = f"message {number}"
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, Mapping) else message
            raise ConfigError(f"{where} has the role {role!r}; known: {', '.join(ROLES)}")
        turn = {key: value for key, value in message.items() if value is not None}
        if calls := turn.get("tool_calls"):
            turn["tool_calls"] = [_call(call, where) for call in calls]
        else:
            turn.pop("tool_calls", None)
        turn["content"] = _text(turn, where)
        turn |= _reasoning(turn)
        _check_weight(turn, where)
        turns.append(turn)
    return turns


def _check_weight(turn: dict[str, Any], where: str) -> None:
    """Refuse a weight that is neither 0 nor 1, and one that would train what is no answer."""
    weight = turn.get(WEIGHT, 0)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise ConfigError(f"{where} has the weight {weight!r}; it must be 0 or 1")
    if weight and turn["role"] != "assistant":
        raise ConfigError(
            f"{where} ({turn['role']}) has the weight 1; only answers are trained: leave it out"
        )


def _text(turn: dict[str, Any], where: str) -> str:
    content = turn.get("content")
    if isinstance(content, list):
        kinds = {p.get("type", "text") if isinstance(p, Mapping) else "?" for p in content}
        if other := sorted(kinds - {"text"}):
            raise ConfigError(
                f"{where} has a part of type {other[0]}; only text can be trained: for pictures "
                "and sound use axolotl or NeMo Automodel"
            )
        return "".join(part["text"] for part in content)
    if content is None and (turn.get("tool_calls") or any(turn.get(key) for key in REASONING)):
        return ""
    if not isinstance(content, str):
        what = "no content and no tool_calls" if content is None else "a content that is no text"
        raise ConfigError(f"{where} ({turn['role']}) has {what}")
    return content


def _reasoning(turn: dict[str, Any]) -> dict[str, Any]:
    """An answer's reasoning under each name that templates have for it."""
    given = [turn.pop(key) for key in REASONING if key in turn]
    text = next((text for text in given if text), None)
    return dict.fromkeys(REASONING, text) if text else {}


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not function.get("name"):
        raise ConfigError(f"{where} has a tool call without a function's name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments or "{}", strict=True)
        except ValueError as error:
            raise ConfigError(
                f"{where} calls {function['name']} with arguments that are no JSON: {error}"
            ) from None
    return {"type": "function", **call, "function": {**function, "arguments": arguments or {}}}


def schemas_of(tools: Any, column: str) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        try:
            tools = parse_json(tools or "null", strict=True)
        except ValueError as error:
            raise ConfigError(f"the column {column!r} is no JSON: {error}") from None
    return list(tools) if tools else None
