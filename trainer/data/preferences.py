"""Preferences as samples: pairs of a chosen and a rejected answer, and single answers with a label.

A record has a prompt, and answers, each a text or messages in OpenAI's form; tools may go with
them. The forms are those of TRL's datasets.
"""

from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile
from typing import Any, NamedTuple

from trainer.data.conversations import labelled, schemas_of, turns_of
from trainer.data.rows import Rows
from trainer.data.tokenizers import HuggingFaceTokenizer
from trainer.errors import ConfigError
from trainer.layers.batch import IGNORE_INDEX

PAIR_COLUMNS = ("prompt", "chosen", "rejected", "margin", "tools")
# The texts of a table.
_LABELS = {"true": True, "false": False, "1": True, "0": False}
SINGLE_COLUMNS = ("prompt", "completion", "label", "chosen", "rejected", "tools")
SAME = "the chosen and the rejected answer are the same"


class Answer(NamedTuple):
    """A prompt and an answer to it.

    Both are texts, or both are turns; the last turns are the answer.
    """

    prompt: Any
    answer: Any


class Preferences(Rows):
    """What the two kinds of datasets share: opening, columns, and an answer as tokens.

    Args:
        tokenizer: of the model's folder.
        column_map: other names of the columns in `names`, such as {chosen: better}.
        drop_invalid: leave out and count records that cannot be used; else they are faults.
        rows: see Rows.

    Raises:
        ConfigError: another tokenizer, or an unknown name in column_map.
    """

    names: tuple[str, ...] = ()

    def __init__(
        self,
        tokenizer: HuggingFaceTokenizer,
        *,
        source: str,
        column_map: Mapping[str, str] | None = None,
        drop_invalid: bool = False,
        **rows: Any,
    ) -> None:
        if unknown := sorted(set(column_map or {}) - set(self.names)):
            known = ", ".join(self.names)
            raise ConfigError(f"dataset.column_map: unknown {', '.join(unknown)}; known: {known}")
        self._columns = {name: name for name in self.names} | dict(column_map or {})
        self._tokenizer = tokenizer
        # Read by trainer.data.source.
        self.drop_invalid = drop_invalid
        super().__init__(source=source, **rows)

    def _value(self, row: Mapping[str, Any], name: str) -> Any:
        return self.finite(row, self._columns[name])

    def _required(self, row: Mapping[str, Any], *names: str) -> list[Any]:
        missing = [repr(self._columns[n]) for n in names if self._value(row, n) is None]
        if missing:
            raise ConfigError(
                f"there is no {' and no '.join(missing)}; name other columns by dataset.column_map"
            )
        return [self._value(row, name) for name in names]

    def _documents(
        self, answer: Answer, row: Mapping[str, Any], name: str
    ) -> tuple[list[int], list[int]]:
        """The tokens of a prompt and its answer, and the labels, which are the answer's alone."""
        if isinstance(answer.answer, str):
            if not answer.answer.strip():
                raise ConfigError(f"the {name} answer is empty")
            prompt = self._tokenizer.encode(answer.prompt, add_bos=True)
            own = self._tokenizer.encode(answer.answer, add_eos=True)
            return prompt + own, [IGNORE_INDEX] * len(prompt) + own
        turns = [*answer.prompt, *answer.answer]
        trained = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        trained = [i for i in trained if i >= len(answer.prompt)]
        if not trained or not any(_says_something(turns[i]) for i in trained):
            raise ConfigError(f"the {name} answer is empty")
        tools = schemas_of(self._value(row, "tools"), self._columns["tools"])
        made = labelled(self._tokenizer, turns, trained, tools)
        return made["tokens"], made["labels"]

    def _answer(self, prompt: Any, answer: Any) -> Answer:
        """Prompt and answer as texts for a tokenizer without a chat template, else as turns."""
        texts = isinstance(answer, str) and isinstance(prompt, str | None)
        if texts and not self._tokenizer.has_chat_template:
            return Answer(prompt or "", answer)
        before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
        if isinstance(answer, Mapping):
            answer = [answer]
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        turns = turns_of(answer, "the answer")
        if turns[0]["role"] not in ("assistant", "tool"):
            # A whole conversation, prompt included.
            answers = (i for i, turn in enumerate(turns) if turn["role"] == "assistant")
            begin = next(answers, len(turns))
            return Answer(turns[:begin], turns[begin:])
        return Answer(turns_of(before, "the prompt") if before else [], turns)

    def _pair(self, row: Mapping[str, Any]) -> tuple[Answer, Answer]:
        """The chosen and the rejected answer of a record, behind what both have in common.

        Raises:
            ConfigError: columns are missing, or both answers are the same.
        """
        prompt = self._value(row, "prompt")
        chosen, rejected = self._required(row, "chosen", "rejected")
        if chosen == rejected:
            raise ConfigError(SAME)
        if prompt is None and isinstance(chosen, str) and isinstance(rejected, str):
            return _split_texts(chosen, rejected)
        first, second = (self._answer(prompt, each) for each in (chosen, rejected))
        if isinstance(first.answer, str):
            return first, second
        turns, others = ([*each.prompt, *each.answer] for each in (first, second))
        if turns == others:
            raise ConfigError(SAME)
        shared = _shared(turns, others)
        return Answer(turns[:shared], turns[shared:]), Answer(others[:shared], others[shared:])


class PreferenceDataset(Preferences):
    """Pairs, as torchtune's datasets of preferences give them, and a margin: 0 if there is none.

    A record has `chosen` and `rejected`, and a `prompt` unless these are whole conversations.
    """

    names = PAIR_COLUMNS

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.row(index)
        sample: dict[str, Any] = {"margin": float(self._value(row, "margin") or 0.0)}
        pair = self._pair(row)
        for name, answer in zip(("chosen", "rejected"), pair, strict=True):
            tokens, labels = self._documents(answer, row, name)
            sample |= {f"{name}_input_ids": tokens, f"{name}_labels": labels}
        return sample


def _shared(first: Any, second: Any) -> int:
    """How many items two sequences have in common from their beginning."""
    same = takewhile(lambda both: both[0] == both[1], zip(first, second, strict=False))
    return sum(1 for _ in same)


def _split_texts(chosen: str, rejected: str) -> tuple[Answer, Answer]:
    """Texts whose prompt is what they have in common, up to the last white space in it."""
    shared = _shared(chosen, rejected)
    if shared < max(len(chosen), len(rejected)):
        shared = max(chosen.rfind(each, 0, shared) for each in " \n\t") + 1
    prompt = chosen[:shared]
    return Answer(prompt, chosen[shared:]), Answer(prompt, rejected[shared:])


class UnpairedPreferenceDataset(Preferences):
    """Single answers: `prompt`, `completion`, and `label`, true for a desirable one.

    Pairs of `chosen` and `rejected` are taken, too: each is two samples. Beside its own answer a
    sample has that of the nearest usable record before it, from the last one on behind the first,
    that has another prompt: KTO measures by these how far policy and reference are apart.
    """

    names = SINGLE_COLUMNS

    @property
    def _are_pairs(self) -> bool:
        return self._columns["chosen"] in self.rows.column_names

    def row(self, index: int) -> dict[str, Any]:
        """As Preferences.row."""
        return super().row(index // 2 if self._are_pairs else index)

    def __len__(self) -> int:
        return len(self.rows) * (2 if self._are_pairs else 1)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, own, desirable = self._single(index)
        tokens, labels = self._documents(own, row, "given")
        kl_tokens, kl_labels = self._mismatched(index, row, own.prompt)
        return {
            "tokens": tokens,
            "labels": labels,
            "kl_tokens": kl_tokens,
            "kl_labels": kl_labels,
            "desirable": float(desirable),
        }

    def _mismatched(
        self, index: int, row: Mapping[str, Any], prompt: Any
    ) -> tuple[list[int], list[int]]:
        """A prompt with the answer of another record, as _documents."""
        each, asked = (2 if self._are_pairs else 1), self._asked(row, prompt)
        for other in range(index - each, index - len(self), -each):
            # A record before it that cannot be used is a fault of its own, and none of this one.
            with suppress(ConfigError):
                there, answer, _ = self._single(other % len(self))
                if self._asked(there, answer.prompt) != asked:
                    return self._documents(Answer(prompt, answer.answer), row, "other")
        raise ConfigError(
            "there is no other record to use; this method needs answers to at least two prompts"
        )

    def _asked(self, row: Mapping[str, Any], prompt: Any) -> Any:
        """What tells a record's prompt from others."""
        given = self._value(row, "prompt")
        return prompt if given is None else given

    def _single(self, index: int) -> tuple[Mapping[str, Any], Answer, bool]:
        """A record, its answer, and whether that is desirable."""
        if self._are_pairs:
            row = self.rows[index // 2]
            return row, self._pair(row)[index % 2], index % 2 == 0
        row = self.rows[index]
        prompt, completion, label = self._required(row, "prompt", "completion", "label")
        label = _LABELS.get(label.strip().lower(), label) if isinstance(label, str) else label
        if label not in (True, False, 0, 1):
            raise ConfigError(f"the label is {label!r}; it must be true or false")
        return row, self._answer(prompt, completion), bool(label)


def _says_something(turn: Mapping[str, Any]) -> bool:
    return bool(turn.get("tool_calls") or str(turn.get("content") or "").strip())
