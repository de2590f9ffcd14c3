"""The tokenizer of a Hugging Face folder, with the model's own chat template."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runspec import tokens
from runspec.files import patient_json, write_json
from trainer.config import instantiate
from trainer.data.folder import answer_end, answered, model_file, opened, tokenizer_file
from trainer.data.spans import SYSTEM_PROMPT, Spans
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

# Templates that ask for today's date get this one, so that a resumed run sees the same tokens.
TEMPLATE_DATE = datetime(2024, 7, 26)


def template_text(given: str) -> str:
    """The text of a chat template, of which a file's name or the text itself is given.

    Raises:
        ConfigError: there is no such file.
    """
    if "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tokenizer.chat_template: {given} cannot be read: {error}") from None


def _add(tokenizer: "Tokenizer", texts: Sequence[str]) -> range:
    """Add tokens, and return their ids.

    They are found in a text as they are, before it is normalised and split, and stay in texts that
    are decoded.
    """
    from tokenizers import AddedToken

    known = {text: number for text in texts if (number := tokenizer.token_to_id(text)) is not None}
    if known:
        raise ConfigError(
            *(
                f"{tokens.KEY}: {text!r} is a token already (id {number}); leave it out"
                for text, number in known.items()
            )
        )
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in texts])
    first = (tokenizer.token_to_id(texts[0]) or 0) if texts else 0
    return range(first, first + len(texts))


def write_new_tokens(block: Mapping[str, Any], folder: Path) -> None:
    """Add a `tokenizer` block's new tokens to the tokenizer's files in a folder."""
    if not (texts := tokens.new_tokens(block)):
        return
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first = _add(tokenizer, texts).start
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {text: first + index for index, text in enumerate(texts)}
    # Older folders list the added tokens again.
    settings = patient_json(folder / "tokenizer_config.json") or {}
    if (listed := settings.get("added_tokens_decoder")) is not None:
        plain = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word", "special"), False)
        listed |= {str(number): {"content": text, **plain} for text, number in ids.items()}
        write_json(folder / "tokenizer_config.json", settings)
    if (mapped := patient_json(folder / "added_tokens.json")) is not None:
        write_json(folder / "added_tokens.json", mapped | ids)


class HuggingFaceTokenizer:
    """Turns conversations and texts into tokens, and says which of them are trained.

    new_ids: the ids of the tokens that were added.

    Args:
        path: folder with tokenizer.json and tokenizer_config.json; messages need a chat template
            in it too, plain text needs none.
        max_seq_len: longer conversations are cut to this many tokens; None cuts nothing.
        chat_template: in the place of the folder's: a file, or the text itself.
        chat_template_kwargs: arguments of the template, such as enable_thinking.
        new_tokens: what to add to the vocabulary: a list, or a file with one per line.

    Raises:
        ConfigError: tokenizer.json or the file of the template is missing, the chat template is
            broken, or a new token is one already.
    """

    def __init__(
        self,
        path: str,
        max_seq_len: int | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        new_tokens: list[str] | str | None = None,
    ) -> None:
        self.max_seq_len = max_seq_len
        self._template = None if chat_template is None else template_text(chat_template)
        self._arguments = dict(chat_template_kwargs or {})
        self._folder = folder = Path(path)
        try:
            added = tokens.new_tokens({"new_tokens": new_tokens})
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._own = opened(folder)
        self._tokenizer: Tokenizer = self._own.backend_tokenizer
        self.new_ids = self._added(added)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._left_out: frozenset[str] = frozenset()
        self.special_tokens = {
            token.content: index
            for index, token in self._tokenizer.get_added_tokens_decoder().items()
        }
        self.bos_id: int | None = self._own.bos_token_id
        self.eos_id: int | None = self._own.eos_token_id
        # What fills a row up is never trained: a token without a row in the embedding will not do.
        pad_id, rows = self._own.pad_token_id, _rows(_model_settings(folder))
        self.pad_id: int = pad_id if pad_id is not None and pad_id < rows else self.eos_id or 0

    def _added(self, texts: Sequence[str]) -> range:
        """Add tokens, which the exported tokenizer.json gives the same ids."""
        from tokenizers import Tokenizer

        if texts:
            size = Tokenizer.from_file(str(tokenizer_file(self._folder))).get_vocab_size()
            if size != self.vocab_size:
                raise ConfigError(
                    f"{tokens.KEY}: {self._folder}/tokenizer.json has {size} tokens, and its other "
                    f"files name {self.vocab_size - size} more; save it once by transformers' "
                    "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
                )
        return _add(self._tokenizer, texts)

    @property
    def has_chat_template(self) -> bool:
        """Whether it can tokenise messages."""
        return bool(self._template or self._own.chat_template)

    @property
    def _known_ends(self) -> set[int]:
        own = set() if self.eos_id is None else {self.eos_id}
        return _ids(_model_settings(self._folder), "eos_token_id") | own

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end a text, by tokenizer, model and chat template."""
        own = set() if self.answer_end is None else {self.answer_end}
        return frozenset(self._known_ends | own)

    @cached_property
    def answer_end(self) -> int | None:
        """The token that the chat template puts behind an answer; see `folder.answer_end`."""
        if not self.has_chat_template:
            return None
        return answer_end(self._own, self._known_ends, self._template, self._arguments)

    def writes(self, name: str) -> bool:
        """Whether the chat template has a name in it, such as eos_token."""
        return self.has_chat_template and name in self._template_for(None)

    def template_ids(self) -> set[int]:
        """The tokens of a question and its answer, as the chat template renders them."""
        if not self.has_chat_template:
            return set()
        return set(self._encoded(answered(self._own, self._template, self._arguments)[0]).ids)

    def token(self, token_id: int) -> str:
        """The vocabulary's text of a token, which a decoder may change."""
        return str(self._tokenizer.id_to_token(token_id))

    @property
    def base_size(self) -> int:
        """Number of tokens, added ones left out, which only a text that names them has."""
        return self._tokenizer.get_vocab_size(with_added_tokens=False)

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
        end = [self.eos_id] if add_eos and self.eos_id is not None else []
        return begin + self._tokenizer.encode(text, add_special_tokens=False).ids + end

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def tokenize_turns(
        self,
        turns: list[dict[str, Any]],
        trained: list[int],
        tools: list[dict[str, Any]] | None = None,
    ) -> tuple[list[int], list[bool]]:
        """Tokens of a conversation, and for each whether it is masked (not trained on).

        An assistant's content and its end token are unmasked; the header before it, which the
        template adds when it asks for an answer, is masked. `take_left_out` then says what of the
        turns is not in the tokens.

        Args:
            turns: as the chat template takes them.
            trained: which turns are trained.
            tools: the schemas of the tools.

        Raises:
            ConfigError: the template refuses the conversation, or leaves out a part of it
                without which the rest would be wrong.
        """
        turns = self._as_taken(turns, tools)
        spans = Spans(self._rendered, self._encoded, self.ends, turns, tools)
        if SYSTEM_PROMPT in spans.left_out:
            folded = self._with_system_prompt(turns, tools)
            if folded is not None:
                turns, trained = folded, [i - 1 for i in trained if i]
                spans = Spans(self._rendered, self._encoded, self.ends, turns, tools)
        # A span may add an end token to the text.
        pieces = [piece for index in trained for piece in spans.of(index)]
        encoding = self._encoded(spans.text)
        # The token with an answer's first character is trained, though it may begin before it.
        mask = [
            not any(begin < max(end, start + 1) and start < last for begin, last in pieces)
            for start, end in encoding.offsets
        ]
        self._left_out = frozenset(spans.left_out)
        return encoding.ids[: self.max_seq_len], mask[: self.max_seq_len]

    def take_left_out(self) -> frozenset[str]:
        """What the template left out of the last conversation; empty when asked again."""
        left_out, self._left_out = self._left_out, frozenset()
        return left_out

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
        **options: Any,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and begin and end of what the template marks as the model's."""
        template = self._template_for(tools)
        from jinja2 import TemplateError, TemplateSyntaxError
        from transformers.utils import chat_template_utils as templates

        try:
            # Not by render_jinja_template, which lets no other date in. The compiled one is cached.
            return templates._render_with_assistant_indices(
                templates._compile_jinja_template(template),
                turns,
                tools,
                None,
                add_generation_prompt,
                strftime_now=TEMPLATE_DATE.strftime,
                **{**self._own.special_tokens_map, **self._arguments, **options},
            )
        except TemplateSyntaxError as error:
            raise ConfigError(f"tokenizer: the chat template is broken: {error}") from None
        except (TemplateError, TypeError) as error:
            raise ConfigError(f"tokenizer: the chat template refuses a sample: {error}") from None

    def _template_for(self, tools: Any) -> str:
        """The chat template, as transformers chooses it."""
        try:
            return str(self._own.get_chat_template(self._template, tools))
        except ValueError:
            raise ConfigError(
                f"tokenizer.path: {self._folder} has no chat template; use the folder of an "
                "instruct model, or set tokenizer.chat_template"
            ) from None

    def _as_taken(self, turns: list[dict[str, Any]], tools: Any) -> list[dict[str, Any]]:
        """Turns with the roles and the kind of arguments that the template knows."""
        if not re.search("""['"]developer['"]""", self._template_for(tools)):
            turns = [t | {"role": "system"} if t["role"] == "developer" else t for t in turns]
        # DeepSeek's templates take a call's arguments as text.
        for taken in (turns, [_with_text_arguments(turn) for turn in turns]):
            with suppress(ConfigError):
                self.render(taken, tools=tools)
                return taken
        return turns

    def _with_system_prompt(
        self, turns: list[dict[str, Any]], tools: Any
    ) -> list[dict[str, Any]] | None:
        """Turns with the system prompt in the last question, if the template asks for answers so.

        Mistral's render it there, and leave it out once the answer follows.
        """
        system, *rest = turns
        questions = [i for i, turn in enumerate(rest) if turn["role"] == "user"]
        if system["role"] != "system" or not questions or rest[-1]["role"] != "assistant":
            return None
        question = rest[questions[-1]]
        rest[questions[-1]] = question | {
            "content": f"{system['content']}\n\n{question['content']}"
        }
        with suppress(ConfigError):
            asked = self.render(turns[:-1], add_generation_prompt=True, tools=tools)
            if self.render(rest, tools=tools).startswith(asked):
                return rest
        return None

    def _encoded(self, text: str) -> "Encoding":
        return self._tokenizer.encode(text, add_special_tokens=False)


# Recipes name it so.
hugging_face_tokenizer = HuggingFaceTokenizer


def of_block(block: dict[str, Any]) -> HuggingFaceTokenizer:
    """The tokenizer of a config's block.

    Raises:
        ConfigError: the component cannot be made, or is no tokenizer of a model's folder.
    """
    tokenizer = instantiate("tokenizer", block)
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise ConfigError(
            f"tokenizer: {type(tokenizer).__name__} is no tokenizer of a model's folder; leave the "
            "block out, and the folder's is used"
        )
    return tokenizer


def faults(tokenizer: HuggingFaceTokenizer, folder: Path) -> list[str]:
    """Why tokenizer and model do not belong together, one line per reason; [] if they do.

    The ids of the model are those of config.json and generation_config.json. It must know every
    token, begin a text by the same one, and end it by one of the tokenizer's.

    Args:
        folder: the model's Hugging Face folder.
    """
    known = _model_settings(folder)
    vocabulary = _rows(known)
    advice = "; give the tokenizer that belongs to checkpointer.checkpoint_dir"
    own = {name: getattr(tokenizer, name) for name in ("bos_id", "eos_id", "pad_id")}
    ends = {own["eos_id"]} - {None}
    texts = []
    # Gemma 3 1B has a token for images, and no row for it. Samples that hold one are refused.
    new, size = tokenizer.new_ids, tokenizer.base_size
    written = sorted(i for i in tokenizer.template_ids() if i >= vocabulary and i not in new)
    if written and size <= vocabulary:
        texts.append(
            f"tokenizer: the chat template writes token {written[0]}, the model knows "
            f"{vocabulary} tokens, from 0; choose another tokenizer.chat_template, or the "
            "model's own tokenizer"
        )
    if size > vocabulary and not new:
        texts.append(f"tokenizer: it has {size} tokens, the model knows {vocabulary}{advice}")
    texts += [
        f"tokenizer: its {name} is {value}, the model knows {vocabulary} tokens, from 0{advice}"
        for name, value in own.items()
        if value is not None and not 0 <= value < vocabulary
    ]
    begins, model_ends = _ids(known, "bos_token_id"), _ids(known, "eos_token_id")
    if begins and own["bos_id"] is not None and own["bos_id"] not in begins:
        texts.append(f"tokenizer: its bos_id is {own['bos_id']}, the model's {_or(begins)}{advice}")
    if model_ends and ends and not model_ends & ends:
        texts.append(
            f"tokenizer: it ends a text by {_or(ends)}, the model by {_or(model_ends)}{advice}"
        )
    return texts


def token_rows(tokenizer: HuggingFaceTokenizer, folder: Path) -> float:
    """How many tokens the model of a folder knows; `inf` if the folder does not say.

    A model grows by the recipe's new tokens, which are the last ones.
    """
    return math.inf if tokenizer.new_ids else _rows(_model_settings(folder))


def _with_text_arguments(turn: dict[str, Any]) -> dict[str, Any]:
    if not turn.get("tool_calls"):
        return turn
    calls = [
        call
        | {
            "function": call["function"]
            | {"arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}
        }
        for call in turn["tool_calls"]
    ]
    return turn | {"tool_calls": calls}


def _model_settings(folder: Path) -> list[dict[str, Any]]:
    names = ("config", "generation_config")
    settings = [patient_json(model_file(folder, f"{name}.json")) for name in names]
    found = [s for s in settings if s is not None]
    # A larger model's text part has settings of its own.
    return found + [s["text_config"] for s in found if isinstance(s.get("text_config"), dict)]


def _rows(settings: list[dict[str, Any]]) -> float:
    """How many tokens the model knows."""
    return next((s["vocab_size"] for s in settings if s.get("vocab_size")), math.inf)


def _ids(settings: list[dict[str, Any]], name: str) -> set[int]:
    values = [s.get(name) for s in settings]
    lists = [v if isinstance(v, list) else [v] for v in values]
    return {i for ids in lists for i in ids if i is not None}


def _or(ids: set[int]) -> str:
    return " or ".join(map(str, sorted(ids)))
