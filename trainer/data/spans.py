"""Which characters of a rendered conversation the model writes, and what its template leaves out.

Every text of a conversation gets a mark, the conversation is rendered with and without marks, and
both renderings must be the same except for the marks, which then show where each text is. An answer
begins where the prompt for it ends, and ends after its end token.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.data.marks import Marker, Part, Rendering, sign_for
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Encoding

Turns = list[dict[str, Any]]
LEAVES_OUT = "the model's chat template leaves out "
SYSTEM_PROMPT = f"{LEAVES_OUT}the system prompt"
EMPTY_ANSWER = "an answer is empty and not trained"
# The option by which templates let a model think before it answers.
THINKING = {"enable_thinking": True}


class TokenRun(NamedTuple):
    """Positions of an answer's first and last mark, and the number of the last."""

    first: int
    last: int
    number: int


class Spans:
    """Finds the spans of one conversation.

    Args:
        render: (turns, ask for an answer, tools, options of the template) to a text and what the
            template itself marks as the model's.
        encode: a text to its tokens with `ids` and `offsets`.
        ends: ids of the tokens that end an answer.

    Raises:
        ConfigError: the template leaves out or changes what must not be missing.
    """

    def __init__(
        self,
        render: Callable[..., tuple[str, list[tuple[int, int]]]],
        encode: Callable[[str], "Encoding"],
        ends: frozenset[int],
        turns: Turns,
        tools: Any,
    ) -> None:
        self._render, self._encode, self._ends = render, encode, ends
        self._turns = turns
        self.text, self._generated = render(turns, False, tools)
        self._plain_tools = tools
        for prompts in (True, False):
            # Some templates look for words in prompts, which a mark may hide.
            with suppress(ConfigError):
                self._mark(turns, tools, prompts)
                if self._whole.text == self.text:
                    break
        else:
            raise ConfigError(
                "tokenizer: the chat template changes texts, so that the answers cannot be found; "
                "leave this conversation out, or set another tokenizer.chat_template"
            )
        self.left_out = self._left_out()

    def of(self, index: int) -> list[tuple[int, int]]:
        """Begin and end (characters) of what is trained in message `index`."""
        if self._turns[index]["role"] != "assistant":
            return [self._of_prompt(index)]
        runs = self._runs(index)
        if not runs:
            self.left_out.add(EMPTY_ANSWER)
            return []
        begins = [self._begin(index, runs[0].first), *(run.first for run in runs[1:])]
        spans = [(b, self._end(index, run)) for b, run in zip(begins, runs, strict=True)]
        if index + 1 == len(self._turns):
            spans[-1] = spans[-1][0], self._with_end_token(runs[-1], spans[-1][1])
        return self._as_generated(spans)

    def _mark(self, turns: Turns, tools: Any, prompts: bool) -> None:
        self._marker = Marker(sign_for(f"{self.text}{turns}{tools}"))
        self._marked = [
            self._marker.turn(turn, index) if prompts or turn["role"] == "assistant" else turn
            for index, turn in enumerate(turns)
        ]
        self._tools = [self._marker.tool(tool) for tool in tools] if tools and prompts else tools
        self._whole = self._read(self._marked)

    def _read(self, turns: Turns, ask: bool = False, **options: Any) -> Rendering:
        return self._marker.read(self._render(turns, ask, self._tools, **options)[0])

    def _own(self, index: int) -> set[int]:
        """The numbers of a message's marks."""
        return {n for n, part in enumerate(self._marker.parts) if part.message == index}

    def _left_out(self) -> set[str]:
        """What the template does not render, if the conversation can do without it."""
        seen = {number for number, _ in self._whole.marks}
        lost = {part for number, part in enumerate(self._marker.parts) if number not in seen}
        answers = [i for i, turn in enumerate(self._turns) if turn["role"] == "assistant"]
        left_out, faults = set(), []
        remedy = "leave this conversation out, or train a model whose template renders it"
        for index, kind in sorted(lost):
            if kind == "schema":
                left_out.add(f"{LEAVES_OUT}the tools' schemas")
            elif kind in ("system", "developer"):
                left_out.add(SYSTEM_PROMPT)
            elif kind == "reasoning":
                latest = any(part == (answers[-1], kind) for part in lost)
                which = "answers" if latest else "earlier answers"
                left_out.add(f"{LEAVES_OUT}the reasoning of {which}")
            elif kind == "content" and self._turns[index].get("tool_calls"):
                left_out.add(f"{LEAVES_OUT}the text beside tool calls")
            else:
                text = kind if kind.startswith("call of ") else "content"
                if seen & self._own(index):
                    remedy = "give each call a message of its own, followed by its result"
                faults.append(f"the {text} in message {index + 1} ({self._turns[index]['role']})")
        if faults:
            raise ConfigError(
                f"tokenizer: the chat template leaves out {', '.join(faults)}; {remedy}"
            )
        return left_out

    def _runs(self, index: int) -> list[TokenRun]:
        """Where an answer stands; in several places if other messages come in between."""
        own, apart = self._own(index), True
        runs: list[TokenRun] = []
        seen: set[int] = set()
        for number, at in self._whole.marks:
            if number not in own:
                apart = True
            elif number not in seen:
                # A call's name may be seen again, in the header of its result.
                seen.add(number)
                runs.append(TokenRun(at if apart else runs.pop().first, at, number))
                apart = False
        return runs

    def _begin(self, index: int, first: int) -> int:
        """Where the model begins to write the answer whose first mark is at `first`."""
        before, written = self._marked[:index], None
        with suppress(ConfigError):
            if before:
                written = self._written_before(before, self._whole, index)
        if written is None:
            # Nothing stands before it, or no prompt can end there: a question is put before it.
            before = [*before, self._question()]
            with suppress(ConfigError):
                whole = self._read([*before, *self._marked[index:]])
                written = self._written_before(before, whole, index)
        if written is None or not self.text[:first].endswith(written):
            raise ConfigError(
                f"tokenizer: the beginning of the answer in message {index + 1} cannot be found in "
                "what the chat template renders; leave this conversation out"
            )
        return first - len(written)

    def _question(self) -> dict[str, Any]:
        return {"role": "user", "content": f"?{self._marker.new(Part(-1, 'question'))}"}

    def _written_before(self, before: Turns, whole: Rendering, index: int) -> str:
        """What the model itself writes before the answer's first mark, such as a tag.

        Args:
            before: the turns before the answer. whole: these and the answer.
        """
        own = self._own(index)
        first = min(whole.first(own).values(), default=0)
        earlier = {n: at for n, at in whole.marks if at < first and n not in own}
        gap = asked = ""
        # Prompts differ for models that may think first; an answer follows one of them.
        for options in ({}, THINKING):
            prompt = self._read(before, ask=True, **options)
            shared = [(earlier[n], at) for n, at in prompt.marks if n in earlier]
            begin, at = shared[-1] if shared else (0, 0)
            asked, gap = prompt.text[at:], whole.text[begin:first]
            if gap.startswith(asked):
                break
        return gap[self._shared(asked, gap) :]

    def _end(self, index: int, run: TokenRun) -> int:
        """Where an answer has ended, with its end token."""
        tail = self.text[run.last : self._whole.next(run.last)]
        closing = self._shared(self._closing(index, run), tail)
        tokens = self._encode(tail)
        for token, (begin, end) in zip(tokens.ids, tokens.offsets, strict=True):
            # It may begin the next turn, too: GLM's answers end with <|user|>.
            if begin > closing:
                break
            if token in self._ends:
                return run.last + end
        # White space after the end token is the template's, the model never writes it.
        return run.last + len(tail[:closing].rstrip())

    def _with_end_token(self, run: TokenRun, end: int) -> int:
        """The end of the last answer, with an end token that only a further turn would add."""
        before = self._encode(self.text[run.last : end]).ids
        if (before and before[-1] in self._ends) or self.text[end:].strip():
            return end
        called = self._turns[-1].get("tool_calls")
        after = self._question() | ({"role": "tool"} if called else {})
        with suppress(ConfigError):
            longer = self._read([*self._marked, after])
            at = longer.first({run.number}).get(run.number, 0)
            tail = longer.text[at : longer.next(at)]
            token = self._encode(tail.removeprefix(self.text[run.last : end]))
            if tail.startswith(self.text[run.last : end]) and set(token.ids[:1]) & self._ends:
                stop = token.offsets[0][1]
                self.text = self.text[:end] + tail[end - run.last :][:stop]
                return end + stop
        return end

    def _closing(self, index: int, run: TokenRun) -> str:
        """What follows an answer's last mark if no message comes after it."""
        alone = self._whole
        if index + 1 < len(self._turns):
            turns = self._marked[: index + 1]
            try:
                alone = self._read(turns)
            except ConfigError:
                alone = self._read([self._question(), *turns])
        at = alone.first({run.number}).get(run.number)
        return "" if at is None else alone.text[at : alone.next(at)]

    def _of_prompt(self, index: int) -> tuple[int, int]:
        """The span of a message that is no answer, header included."""
        turns = self._turns
        texts = [
            self._render(turns[:count], False, self._plain_tools)[0] if count else ""
            for count in (index, index + 1)
        ]
        begin, end = (self._shared(text, self.text) for text in texts)
        marks = self._whole.first(self._own(index)).values()
        if any(not begin <= at <= end for at in marks) or end <= begin:
            raise ConfigError(
                "tokenizer: the chat template changes earlier turns when a later one is added; "
                "set dataset.train_on_input=false"
            )
        return begin, end

    def _as_generated(self, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """What of the spans the template marks as the model's, if it marks any of them."""
        inside = [
            (max(begin, first), min(end, last))
            for begin, end in spans
            for first, last in self._generated
            if max(begin, first) < min(end, last)
        ]
        return inside or spans

    def _shared(self, one: str, other: str) -> int:
        """How many characters two texts have in common from their beginning, by whole tokens."""
        if one.startswith(other) or other.startswith(one):
            return min(len(one), len(other))
        common = 0
        first, second = self._encode(one), self._encode(other)
        for token, same, (_, end) in zip(first.ids, second.ids, first.offsets, strict=False):
            if token != same:
                break
            common = end
        return common
