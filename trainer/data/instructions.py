"""Texts, instructions and chats: the datasets of supervised fine-tuning, by torchtune's names.

Each takes the keys of torchtune's dataset of its name and gives the same tokens and labels, so that
torchtune's configs are read as they are and torchtune itself is not imported.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from trainer.data.conversations import Conversations, conversation_dataset, labelled
from trainer.data.rows import EMPTY_QUESTION, Rows
from trainer.data.tokenizers import HuggingFaceTokenizer
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


class Chats(Rows):
    """Turns of user and assistant; the assistant's are trained.

    Args:
        tokenizer: of the model's folder, or torchtune's.
        turns: the turns of a record, as {role, content}.
        train_on_input: train the other turns as well.
        new_system_prompt: takes the place of every system message; it is never trained.
        rows: see Rows.
    """

    def __init__(
        self,
        tokenizer: Any,
        turns: Callable[["Chats", Mapping[str, Any]], list[dict[str, Any]]],
        train_on_input: bool = False,
        new_system_prompt: str | None = None,
        **rows: Any,
    ) -> None:
        super().__init__(**rows)
        self._tokenizer, self._turns, self._train_on_input = tokenizer, turns, train_on_input
        self._system = new_system_prompt

    def turns(self, index: int) -> list[dict[str, Any]]:
        """The turns of a sample, {role, content}."""
        turns = with_system(self._turns(self, self.row(index)), self._system)
        _check_order(turns)
        return turns

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        turns = self.turns(index)
        trained = [
            number
            for number, turn in enumerate(turns)
            if turn["role"] == "assistant"
            or (self._train_on_input and not (self._system is not None and number == 0))
        ]
        return labelled(self._tokenizer, turns, trained)


def text_completion_dataset(
    tokenizer: Any,
    source: str,
    column: str = "text",
    add_eos: bool = True,
    **rows: Any,
) -> Texts:
    """Plain text of a column; see Texts and Rows."""
    return Texts(tokenizer, source, column, add_eos, **rows)


def instruct_dataset(
    tokenizer: Any,
    *,
    source: str,
    column_map: Mapping[str, str] | None = None,
    prompt: str | None = None,
    answer: str | None = None,
    train_on_input: bool = False,
    new_system_prompt: str | None = None,
    **rows: Any,
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
        return Chats(
            tokenizer,
            _formatted(prompt, answer, column_map),
            train_on_input,
            new_system_prompt,
            source=source,
            **rows,
        )
    columns = dict(column_map or {"input": "input", "output": "output"})
    if missing := [name for name in ("input", "output") if name not in columns]:
        raise ConfigError(f"dataset.column_map: has no {' and no '.join(missing)}")

    def turns(chats: Chats, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        return _question_and_answer(*chats.texts(row, columns["input"], columns["output"]))

    return Chats(tokenizer, turns, train_on_input, new_system_prompt, source=source, **rows)


def alpaca_dataset(
    tokenizer: Any,
    *,
    source: str = "tatsu-lab/alpaca",
    column_map: Mapping[str, str] | None = None,
    train_on_input: bool = True,
    **rows: Any,
) -> Chats:
    """Instructions, with an input or without, in Alpaca's prompt; see Chats and Rows.

    Args:
        column_map: the columns of "instruction", "input" and "output", where they have other names.
    """
    instruction, given, output = (
        (column_map or {}).get(name, name) for name in ("instruction", "input", "output")
    )

    def turns(chats: Chats, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        asked, answer = chats.texts(row, instruction, output)
        if not (asked.strip() or row.get(given)):
            raise ConfigError(EMPTY_QUESTION)
        prompt = _ALPACA.format(instruction=asked)
        if row.get(given):
            prompt = _ALPACA_WITH_INPUT.format(instruction=asked, input=row[given])
        return _question_and_answer(prompt, answer)

    return Chats(tokenizer, turns, train_on_input, source=source, **rows)


def chat_dataset(
    tokenizer: Any,
    *,
    source: str,
    conversation_column: str,
    conversation_style: str,
    train_on_input: bool = False,
    new_system_prompt: str | None = None,
    **rows: Any,
) -> Chats | Conversations:
    """Conversations in one column; see Chats and Rows.

    In OpenAI's form they are read by `conversation_dataset`, tool calls included, if the tokenizer
    has the model's own chat template.

    Args:
        conversation_style: "openai" ({role, content}) or "sharegpt" ({from, value}).

    Raises:
        ConfigError: another style.
    """
    read = {"openai": _openai, "sharegpt": _sharegpt}.get(conversation_style)
    if read is None:
        raise ConfigError(
            f"dataset.conversation_style: must be openai or sharegpt; got {conversation_style}"
        )
    rows = {"source": source, **rows}
    own_template = isinstance(tokenizer, HuggingFaceTokenizer) and not train_on_input
    if conversation_style == "openai" and own_template:
        return conversation_dataset(
            tokenizer,
            conversation_column=conversation_column,
            new_system_prompt=new_system_prompt,
            **rows,
        )

    def turns(_: Chats, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        return read(row, conversation_column)

    return Chats(tokenizer, turns, train_on_input, new_system_prompt, **rows)


def _formatted(
    prompt: str | None, answer: str | None, column_map: Any
) -> Callable[[Chats, Mapping[str, Any]], list[dict[str, Any]]]:
    """Question and answer as texts with the names of columns."""
    if column_map or not (prompt and answer):
        raise ConfigError("dataset.prompt: goes with dataset.answer, and without column_map")
    forms = {"prompt": prompt, "answer": answer}
    used = re.findall(r"{(\w+)", prompt + answer)

    def turns(chats: Chats, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        texts = []
        for column in used:
            chats.finite(row, column)
        for name, form in forms.items():
            try:
                texts.append(form.format_map(row).rstrip("\n"))
            except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
                raise ConfigError(
                    f"dataset.{name}: {form!r} does not fit the columns {', '.join(row)} ({error})"
                ) from error
        return _question_and_answer(*texts)

    return turns


def with_system(turns: list[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    """Turns with this system prompt in the place of their own; None leaves them as they are."""
    if system is None:
        return turns
    own = {"role": "system", "content": system}
    return [own, *(turn for turn in turns if turn["role"] != "system")]


def _question_and_answer(question: str, answer: str) -> list[dict[str, Any]]:
    if not question.strip():
        raise ConfigError(EMPTY_QUESTION)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _messages(row: Mapping[str, Any], column: str) -> list[Any]:
    if column not in row:
        raise ConfigError(f"there is no column {column!r}")
    if not isinstance(row[column], list):
        raise ConfigError(f"the column {column!r} has no list of messages")
    return row[column]


def _openai(row: Mapping[str, Any], column: str) -> list[dict[str, Any]]:
    """For tokenizers that know neither tool calls nor weights."""
    turns = []
    for number, message in enumerate(_messages(row, column), 1):
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(p["text"] for p in content if p["type"] == "text")
        what = ""
        if not isinstance(content, str):
            what = "no content, and torchtune's tokenizers know no tool calls"
        elif message.get("weight") not in (None, 1):
            what = f"the weight {message['weight']!r}, which torchtune's tokenizers do not know"
        if what:
            raise ConfigError(
                f"message {number} ({message.get('role')}) has {what}; leave the tokenizer block "
                "and train_on_input out, so that the model folder's chat template is used"
            )
        turns.append({"role": message["role"], "content": content})
    return turns


def _sharegpt(row: Mapping[str, Any], column: str) -> list[dict[str, Any]]:
    turns = []
    for number, message in enumerate(_messages(row, column), 1):
        role = message.get("from")
        if role not in SHAREGPT_ROLES:
            raise ConfigError(
                f"message {number} is from {role!r}; known: {', '.join(SHAREGPT_ROLES)}; others, "
                "such as tool calls, need conversation_style=openai"
            )
        if not isinstance(message.get("value"), str):
            raise ConfigError(f"message {number} ({role}) has no text in 'value'")
        turns.append({"role": SHAREGPT_ROLES[role], "content": message["value"]})
    return turns


def _check_order(turns: list[dict[str, Any]]) -> None:
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
