"""Prompts without answers, for methods that sample the answers."""

from collections.abc import Mapping
from typing import Any

from trainer.data.conversations import turns_of, with_system
from trainer.data.rows import EMPTY_QUESTION, Rows
from trainer.errors import ConfigError
from trainer.layers.batch import IGNORE_INDEX


class Prompts(Rows):
    """A prompt of each row, as the chat template renders it, up to where the answer begins.

    An end token follows, the only one that is trained, so that a sample has a place for an answer.
    Without a chat template the prompt is the text as it is.

    The other columns are for reward functions.

    Args:
        column_map: the column of "prompt", if it has another name: a text, or messages {role,
            content} that end with a question.
        new_system_prompt: stands before it.
        rows: see Rows.

    Raises:
        ConfigError: the tokenizer is not that of a Hugging Face folder.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        source: str,
        column_map: Mapping[str, str] | None = None,
        new_system_prompt: str | None = None,
        **rows: Any,
    ) -> None:
        super().__init__(source=source, **rows)
        self._tokenizer, self._system = tokenizer, new_system_prompt
        self._column = (column_map or {}).get("prompt", "prompt")

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        row, own = self.row(index), self._tokenizer
        for column in row:
            self.finite(row, column)  # what scores the answers gets all of them
        value = row.get(self._column)
        if isinstance(value, str) and not value.strip():
            raise ConfigError(EMPTY_QUESTION)
        if isinstance(value, str) and not own.has_chat_template:
            tokens = own.encode(value, add_bos=True)
        else:
            if isinstance(value, list):
                turns = turns_of(value, self._column)
            else:
                turns = [{"role": "user", "content": self.texts(row, self._column)[0]}]
            if turns[-1]["role"] == "assistant":
                raise ConfigError(f"the messages of {self._column!r} end with an answer")
            turns = with_system(turns, self._system)
            tokens = own.encode(own.render(turns, add_generation_prompt=True))
        ends = (own.answer_end, own.eos_id, min(own.ends, default=0))
        end = next(token for token in ends if token is not None)
        return {"tokens": [*tokens, end], "labels": [IGNORE_INDEX] * len(tokens) + [end]}


# Recipes name it so.
prompt_dataset = Prompts
