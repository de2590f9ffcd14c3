"""Marks in the texts of a conversation, which show where each text is in a rendering."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Where messages have the reasoning before an answer; it may stand in the content, too.
REASONING = ("reasoning_content", "reasoning", "thinking")
THINK_TAG = re.compile(r"(</?think>)")


def sign_for(text: str) -> str:
    """What begins and ends a mark: letters, which no quoting changes, that are not in `text`."""
    sign = "qz"
    while sign in text:
        sign += "x"
    return sign


class Part(NamedTuple):
    """One text of a conversation: of which message, and what it is."""

    message: int
    kind: str


class Rendering(NamedTuple):
    """A rendering without its marks, and (number, position) of each mark, in order."""

    text: str
    marks: list[tuple[int, int]]

    def first(self, numbers: set[int]) -> dict[int, int]:
        """Where each of these numbers stands first."""
        return {n: at for n, at in reversed(self.marks) if n in numbers}

    def next(self, position: int) -> int:
        """Where the next mark behind a position is, or the end of the text."""
        return min((at for _, at in self.marks if at > position), default=len(self.text))


@dataclass
class Marker:
    """Copies turns and tools with a mark in every text."""

    sign: str
    parts: list[Part] = field(default_factory=list)

    def new(self, part: Part) -> str:
        """A mark for a part of its own."""
        self.parts.append(part)
        return f"{self.sign}{len(self.parts) - 1}{self.sign}"

    def read(self, text: str) -> Rendering:
        """A rendering's text and marks."""
        pieces = re.split(f"{self.sign}(\\d+){self.sign}", text)
        plain, marks = pieces[0], []
        for number, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            marks.append((int(number), len(plain)))
            plain += piece
        return Rendering(plain, marks)

    def turn(self, turn: dict[str, Any], index: int) -> dict[str, Any]:
        """A copy of a turn with marks."""
        if turn["role"] != "assistant":
            return turn | {"content": self._prompt(turn["content"], index, turn["role"])}
        marked = turn | {"content": self._answer(turn["content"], index)}
        given = {turn[key] for key in REASONING if turn.get(key)}
        for text in given:
            both = self._around(text, Part(index, "reasoning"))
            marked |= {key: both for key in REASONING if turn.get(key) == text}
        if turn.get("tool_calls"):
            marked["tool_calls"] = [self._call(call, index) for call in turn["tool_calls"]]
        return marked

    def tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        """A copy of a tool's schema with a mark in its name."""
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return tool
        name = function["name"] + self.new(Part(-1, "schema"))
        return {**tool, "function": {**function, "name": name}}

    def _prompt(self, text: str, index: int, kind: str) -> str:
        if not text.strip():
            return text
        # In the middle, where no template looks for a prefix or a suffix; not within a word.
        half = len(text.rstrip()) // 2
        space = re.compile(r"\s").search(text.rstrip(), half)
        at = space.start() if space else half
        return text[:at] + self.new(Part(index, kind)) + text[at:]

    def _answer(self, text: str, index: int) -> str:
        head, tag, tail = text.rpartition("</think>")
        before = [
            piece if THINK_TAG.fullmatch(piece) else self._around(piece, Part(index, "reasoning"))
            for piece in THINK_TAG.split(head)
        ]
        return "".join(before) + tag + self._around(tail, Part(index, "content"))

    def _around(self, text: str, part: Part) -> str:
        """Marks where a text begins and ends, without the white space around it."""
        inner = text.strip()
        if not inner:
            return text
        head, _, tail = text.partition(inner)
        return head + self.new(part) + inner + self.new(part) + tail

    def _call(self, call: dict[str, Any], index: int) -> dict[str, Any]:
        function = call["function"]
        part = Part(index, f"call of {function['name']}")
        name = function["name"] + self.new(part)
        arguments = self._leaves(function["arguments"], part)
        return {**call, "function": {**function, "name": name, "arguments": arguments}}

    def _leaves(self, value: Any, part: Part) -> Any:
        if isinstance(value, Mapping):
            return {key: self._leaves(inner, part) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._leaves(inner, part) for inner in value]
        return value + self.new(part) if isinstance(value, str) else value
