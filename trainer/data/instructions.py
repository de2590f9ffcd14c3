"""Texts, instructions and chats: the datasets of supervised fine-tuning, by torchtune's names.

Each takes the keys of torchtune's dataset of its name and gives the same tokens and labels, so that
torchtune's configs are read as they are and torchtune itself is not imported.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from trainer.data.conversations import Chats, Turns, conversation_dataset
from trainer.data.rows import EMPTY_QUESTION, Rows
from trainer.errors import ConfigError

SHAREGPT_ROLES = {"system": "system", "human": "user", "gpt": "assistant"}

# The prompts of Stanford's Alpaca (github.com/tatsu-lab/stanford_alpaca, train.py).
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)


class Texts(Rows):
    """Plain text; all of it is trained.

    Args:
        tokenizer: has encode(text, add_bos, add_eos).
        column: of the text.
        add_eos: whether a text ends with the end token.
        rows: see Rows.
    """

    # A text that is longer than a row goes on in another sample.
    is_text = True

    def __init__(
        self, tokenizer: Any, source: str, column: str = "text", add_eos: bool = True, **rows: Any
    ) -> None:
        super().__init__(source=source, **rows)
        self._tokenizer, self._column, self._add_eos = tokenizer, column, add_eos

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        (text,) = self.texts(self.row(index), self._column)
        tokens = self._tokenizer.encode(text=text, add_bos=True, add_eos=self._add_eos)
        return {"tokens": tokens, "labels": list(tokens)}


def instruct_dataset(
    tokenizer: Any,
    *,
    source: str,
    column_map: Mapping[str, str] | None = None,
    prompt: str | None = None,
    answer: str | None = None,
    **options: Any,
) -> Chats:
    """Questions and answers in two columns; see Chats and Rows.

    Args:
        column_map: the columns of "input" and "output", which are their names by default.
        prompt, answer: instead of column_map: texts with the names of columns, as str.format takes
            them: "Context: {context} Question: {question}", "{answers[text][0]}". Line breaks at
            the end, which an empty column leaves, are no part of them.

    Raises:
        ConfigError: column_map lacks one of them, or one of prompt and answer is missing.
    """
    if prompt or answer:
        read = _formatted(prompt, answer, column_map)
        return Chats(tokenizer, read, source=source, **options)
    columns = dict(column_map or {"input": "input", "output": "output"})
    if missing := [name for name in ("input", "output") if name not in columns]:
        raise ConfigError(f"dataset.column_map: has no {' and no '.join(missing)}")

    def read_columns(row: Mapping[str, Any]) -> Turns:
        return _question_and_answer(*Rows.texts(row, columns["input"], columns["output"]))

    return Chats(tokenizer, read_columns, source=source, **options)


def alpaca_dataset(
    tokenizer: Any,
    *,
    source: str = "tatsu-lab/alpaca",
    column_map: Mapping[str, str] | None = None,
    train_on_input: bool = True,
    **options: Any,
) -> Chats:
    """Instructions, with an input or without, in Alpaca's prompt; see Chats and Rows.

    Args:
        column_map: the columns of "instruction", "input" and "output", where they have other names.
    """
    instruction, given, output = (
        (column_map or {}).get(name, name) for name in ("instruction", "input", "output")
    )

    def read(row: Mapping[str, Any]) -> Turns:
        asked, answer = Rows.texts(row, instruction, output)
        if not (asked.strip() or row.get(given)):
            raise ConfigError(EMPTY_QUESTION)
        prompt = _ALPACA.format(instruction=asked)
        if row.get(given):
            prompt = _ALPACA_WITH_INPUT.format(instruction=asked, input=row[given])
        return _question_and_answer(prompt, answer)

    return Chats(tokenizer, read, train_on_input=train_on_input, source=source, **options)


alpaca_cleaned_dataset = partial(alpaca_dataset, source="yahma/alpaca-cleaned")


def chat_dataset(
    tokenizer: Any,
    *,
    source: str,
    conversation_column: str,
    conversation_style: str,
    **options: Any,
) -> Chats:
    """Conversations in one column; see Chats and Rows.

    Args:
        conversation_style: "openai" ({role, content}) or "sharegpt" ({from, value}).

    Raises:
        ConfigError: another style.
    """
    if conversation_style == "openai":
        options["conversation_column"] = conversation_column
        return conversation_dataset(tokenizer, source=source, **options)
    if conversation_style != "sharegpt":
        raise ConfigError(
            f"dataset.conversation_style: must be openai or sharegpt; got {conversation_style}"
        )

    def read(row: Mapping[str, Any]) -> Turns:
        return _sharegpt(row, conversation_column)

    return Chats(tokenizer, read, source=source, **options)


def _formatted(
    prompt: str | None, answer: str | None, column_map: Any
) -> Callable[[Mapping[str, Any]], Turns]:
    """Question and answer as texts with the names of columns."""
    if column_map or not (prompt and answer):
        raise ConfigError("dataset.prompt: goes with dataset.answer, and without column_map")
    forms = {"prompt": prompt, "answer": answer}
    used = re.findall(r"{(\w+)", prompt + answer)

    def read(row: Mapping[str, Any]) -> Turns:
        texts = []
        for column in used:
            Rows.finite(row, column)
        for name, form in forms.items():
            try:
                texts.append(form.format_map(row).rstrip("\n"))
            except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
                raise ConfigError(
                    f"dataset.{name}: {form!r} does not fit the columns {', '.join(row)} ({error})"
                ) from error
        return _question_and_answer(*texts)

    return read


def _question_and_answer(question: str, answer: str) -> Turns:
    if not question.strip():
        raise ConfigError(EMPTY_QUESTION)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _sharegpt(row: Mapping[str, Any], column: str) -> Turns:
    if column not in row:
        raise ConfigError(f"there is no column {column!r}")
    if not isinstance(row[column], list):
        raise ConfigError(f"the column {column!r} has no list of messages")
    turns = []
    for number, message in enumerate(row[column], 1):
        role = message.get("from")
        if role not in SHAREGPT_ROLES:
            raise ConfigError(
                f"message {number} is from {role!r}; known: {', '.join(SHAREGPT_ROLES)}; others, "
                "such as tool calls, need conversation_style=openai"
            )
        if not isinstance(message.get("value"), str):
            raise ConfigError(f"message {number} ({role}) has no text in 'value'")
        turns.append({"role": SHAREGPT_ROLES[role], "content": message["value"]})
    _check_order(turns)
    return turns


def _check_order(turns: Turns) -> None:
    """Refuse turns that do not alternate, as torchtune does: most templates would mix them up."""
    if len(turns) < 2:
        raise ConfigError(f"there must be at least 2 messages, and there are {len(turns)}")
    before = "assistant"
    for number, turn in enumerate(turns, 1):
        role = turn["role"]
        if role == "assistant" and before != "user":
            raise ConfigError(f"message {number} (assistant) does not follow one of the user")
        if role == before == "user":
            raise ConfigError(f"messages {number - 1} and {number} are both of the user")
        if role == "system" and number > 1:
            raise ConfigError(f"message {number} is a system message, which must come first")
        before = role
