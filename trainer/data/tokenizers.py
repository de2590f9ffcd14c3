"""A torchtune model tokenizer over a Hugging Face folder, with the model's own chat template."""

import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from runspec.files import read_json_or_none
from trainer.errors import ConfigError

# Templates that ask for today's date get this one, so that a resumed run sees the same tokens.
TEMPLATE_DATE = datetime(2024, 7, 26)
ROLES = {"ipython": "tool"}
# Where messages have the reasoning before an answer; it may stand in the content, too.
REASONING = ("reasoning_content", "reasoning", "thinking")
END_OF_REASONING = "</think>"
# An answer that no conversation has.
STAND_IN = "\u241esomething else\u241e"


def hugging_face_tokenizer(path: str, max_seq_len: int | None = None) -> "HuggingFaceTokenizer":
    """Open the tokenizer of a Hugging Face model folder.

    Args:
        path: folder with tokenizer.json and tokenizer_config.json; messages need a chat template
            in it too, plain text needs none.
        max_seq_len: longer conversations are cut to this many tokens; None cuts nothing.

    Raises:
        ConfigError: tokenizer.json is missing or the chat template is broken.
    """
    return HuggingFaceTokenizer(Path(path), max_seq_len)


class HuggingFaceTokenizer:
    """Turns messages into tokens and a mask, as torchtune's datasets expect of a tokenizer."""

    def __init__(self, folder: Path, max_seq_len: int | None) -> None:
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"tokenizer.path: {file} is missing; give a Hugging Face folder")
        self.max_seq_len = max_seq_len
        self._tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = read_json_or_none(folder / "tokenizer_config.json") or {}
        self._special = {
            key: value["content"] if isinstance(value, dict) else value
            for key, value in settings.items()
            if key in ("bos_token", "eos_token", "pad_token", "unk_token") and value
        }
        self._folder = folder
        self._template = _template(folder, settings)
        self.special_tokens = {
            token.content: index
            for index, token in self._tokenizer.get_added_tokens_decoder().items()
        }
        self.bos_id = self._id("bos_token")
        self.eos_id = self._id("eos_token")
        pad_id = self._id("pad_token")
        self.pad_id = pad_id if pad_id is not None else self.eos_id or 0

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Token ids of `text`, between the begin token, if the model has one, and the end token.

        Raises:
            ConfigError: an end token is asked for and tokenizer_config.json names none.
        """
        if add_eos and self.eos_id is None:
            raise ConfigError("tokenizer: has no eos_token; set dataset.add_eos=False")
        begin = [self.bos_id] if add_bos and self.bos_id is not None else []
        end = [self.eos_id] if add_eos else []
        return begin + self._tokenizer.encode(text, add_special_tokens=False).ids + end

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def tokenize_messages(self, messages: list[Any]) -> tuple[list[int], list[bool]]:
        """Tokens of a conversation, and for each whether it is masked (not trained on).

        An assistant's content and its end token are unmasked; the header before it, which the
        template adds by itself when it asks for an answer, is masked. A message whose `masked`
        is True is masked whole.

        Args:
            messages: torchtune messages (role, text_content, masked).

        Raises:
            ConfigError: the template renders the beginning of a conversation in another way
                once there is more of it, so that no mask can be right.
        """
        turns = [{"role": ROLES.get(m.role, m.role), "content": m.text_content} for m in messages]
        return self.tokenize_turns(turns, [i for i, m in enumerate(messages) if not m.masked])

    def tokenize_turns(
        self,
        turns: list[dict[str, Any]],
        trained: list[int],
        tools: list[dict[str, Any]] | None = None,
        reasoning: bool = True,
    ) -> tuple[list[int], list[bool]]:
        """As `tokenize_messages`, of turns as the chat template takes them.

        Args:
            trained: which turns are trained.
            tools: the schemas of the tools.
            reasoning: whether an answer's reasoning is trained, too.
        """
        text, marks = self._rendered(turns, tools=tools)
        answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        if marks and len(marks) == len(answers) and set(trained) <= set(answers):
            # The template itself says what the model writes, by {% generation %}.
            spans = [marks[answers.index(index)] for index in trained]
        else:
            spans = [self._span(turns, index, text, tools) for index in trained]
        if not reasoning:
            spans = [
                (max(begin, self._end_of_reasoning(turns, index, text, tools)), end)
                for (begin, end), index in zip(spans, trained, strict=True)
            ]
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        mask = [
            not any(begin <= start < end for begin, end in spans) for start, _ in encoding.offsets
        ]
        return encoding.ids[: self.max_seq_len], mask[: self.max_seq_len]

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """Replace a sample's `messages` by its `tokens` and `mask`."""
        fields = dict(sample)
        fields["tokens"], fields["mask"] = self.tokenize_messages(fields.pop("messages"))
        return fields

    def render(
        self,
        turns: list[dict[str, Any]],
        add_generation_prompt: bool = False,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """The text that the model's chat template makes of {role, content} turns."""
        return self._rendered(turns, add_generation_prompt, tools)[0]

    def _rendered(
        self,
        turns: list[dict[str, Any]],
        add_generation_prompt: bool = False,
        tools: list[dict[str, Any]] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and begin and end of what the template marks as the model's."""
        if self._template is None:
            raise ConfigError(
                f"tokenizer.path: {self._folder} has no chat template; use the folder of an "
                "instruct model, or the model's torchtune tokenizer"
            )
        from jinja2 import TemplateError, TemplateSyntaxError
        from transformers.utils import chat_template_utils as templates

        try:
            # Not by render_jinja_template, which lets no other date in. The compiled one is cached.
            return templates._render_with_assistant_indices(
                templates._compile_jinja_template(self._template),
                turns,
                tools,
                None,
                add_generation_prompt,
                strftime_now=TEMPLATE_DATE.strftime,
                **self._special,
            )
        except TemplateSyntaxError as error:
            raise ConfigError(f"tokenizer: the chat template is broken: {error}") from None
        except (TemplateError, TypeError) as error:
            raise ConfigError(f"tokenizer: the chat template refuses a sample: {error}") from None

    def _span(
        self,
        turns: list[dict[str, Any]],
        index: int,
        text: str,
        tools: list[dict[str, Any]] | None = None,
    ) -> tuple[int, int]:
        """Begin and end (characters) of what is trained on in message `index`."""
        is_answer = turns[index]["role"] == "assistant"
        before = self._beginning(turns[:index], is_answer, tools)
        until = self.render(turns[: index + 1], tools=tools)
        if before is not None and text.startswith(before) and text.startswith(until):
            # White space after the end token is the template's, the model never writes it.
            return len(before), len(until.rstrip()) if is_answer else len(until)
        found = self._span_by_difference(turns, index, text, tools) if is_answer else None
        if found is None:
            raise ConfigError(
                "tokenizer: the chat template changes earlier turns when a later one is added; "
                "train on single-turn samples, or use the model's torchtune tokenizer"
            )
        return found

    def _beginning(self, turns: list[dict[str, Any]], ask: bool, tools: Any) -> str | None:
        """The text before a turn; None if the template refuses a conversation that ends there."""
        if not turns:
            return ""
        try:
            return self.render(turns, add_generation_prompt=ask, tools=tools)
        except ConfigError:
            return None

    def _span_by_difference(
        self, turns: list[dict[str, Any]], index: int, text: str, tools: Any
    ) -> tuple[int, int] | None:
        """Where the text changes with the answer `index`, and the end token behind that.

        For templates that render a turn in another way when more turns follow: Qwen 3's take the
        reasoning out of earlier answers, Mistral's put the system prompt into the last question.
        """
        other = {"role": "assistant", "content": STAND_IN}
        changed = self.render([*turns[:index], other, *turns[index + 1 :]], tools=tools)
        begin = _common(text, changed)
        if not changed[begin:].startswith(STAND_IN):
            return None
        end = len(text) - _common(text[begin:][::-1], changed[begin + len(STAND_IN) :][::-1])
        alone = self.render([*turns[:index], other], tools=tools)
        closing = alone.rpartition(STAND_IN)[2].rstrip()
        if not text[end:].startswith(closing):
            return None
        return begin, end + len(closing)

    def _end_of_reasoning(
        self, turns: list[dict[str, Any]], index: int, text: str, tools: Any
    ) -> int:
        """Where the reasoning of the answer `index` has ended, 0 if the text has none of it.

        That is where the text changes with the answer's content; for an answer that is only a call
        of a tool, behind what changes with the reasoning.
        """
        turn = turns[index]
        head, tag, _ = str(turn["content"]).rpartition(END_OF_REASONING)
        given = [key for key in REASONING if turn.get(key)]
        if not (tag or given):
            return 0

        def with_other(**changes: str) -> str | None:
            try:
                return self.render(
                    [*turns[:index], turn | changes, *turns[index + 1 :]], tools=tools
                )
            except ConfigError:
                return None  # such as: no content beside a call

        changed = with_other(content=f"{head}{tag}{STAND_IN}")
        if changed is not None and changed != text:
            return _common(text, changed)
        changed = with_other(**dict.fromkeys(given, STAND_IN))
        if changed is None or changed == text:
            return 0
        return len(text) - _common(text[::-1], changed[::-1])

    def _id(self, name: str) -> int | None:
        token = self._special.get(name)
        return None if token is None else self._tokenizer.token_to_id(token)


def faults(tokenizer: Any, folder: Path) -> list[str]:
    """Why tokenizer and model do not belong together, one line per reason; [] if they do.

    The ids of the model are those of config.json and generation_config.json. It must know every
    token, begin a text by the same one, and end it by one of the tokenizer's.

    Args:
        tokenizer: ours or torchtune's: vocab_size, bos_id, eos_id, pad_id, stop_tokens, as far as
            it has them.
        folder: the model's Hugging Face folder.
    """
    settings = [
        read_json_or_none(folder / f"{name}.json") for name in ("config", "generation_config")
    ]
    known = [s for s in settings if isinstance(s, dict)]
    vocabulary = (known[0].get("vocab_size") if known else None) or math.inf
    advice = "; give the tokenizer that belongs to checkpointer.checkpoint_dir"
    own = {name: getattr(tokenizer, name, None) for name in ("bos_id", "eos_id", "pad_id")}
    ends = {own["eos_id"], *(getattr(tokenizer, "stop_tokens", None) or ())} - {None}
    found = []
    size = getattr(tokenizer, "vocab_size", 0)
    if size > vocabulary:
        found.append(f"tokenizer: it has {size} tokens, the model knows {vocabulary}{advice}")
    found += [
        f"tokenizer: its {name} is {value}, the model knows {vocabulary} tokens, from 0{advice}"
        for name, value in own.items()
        if value is not None and not 0 <= value < vocabulary
    ]
    begins, model_ends = _ids(known, "bos_token_id"), _ids(known, "eos_token_id")
    if begins and own["bos_id"] is not None and own["bos_id"] not in begins:
        found.append(f"tokenizer: its bos_id is {own['bos_id']}, the model's {_or(begins)}{advice}")
    if model_ends and ends and not model_ends & ends:
        found.append(
            f"tokenizer: it ends a text by {_or(ends)}, the model by {_or(model_ends)}{advice}"
        )
    return found


def _common(one: str, other: str) -> int:
    """How many characters two texts have in common from their beginning."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _ids(settings: list[dict[str, Any]], name: str) -> set[int]:
    values = [s.get(name) for s in settings]
    lists = [v if isinstance(v, list) else [v] for v in values]
    return {i for ids in lists for i in ids if i is not None}


def _or(ids: set[int]) -> str:
    return " or ".join(map(str, sorted(ids)))


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    if isinstance(template, list):
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    return template if isinstance(template, str) else None
