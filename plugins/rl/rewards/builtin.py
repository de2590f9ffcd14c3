"""The kit's own reward functions; each is made of a recipe's keys and scores one answer."""

import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

Function = Callable[[str, Mapping[str, Any]], float | None]

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def made(name: str, arguments: Mapping[str, Any]) -> Function:
    """The reward function of this name; ValueError if its keys are wrong."""
    return _MAKERS[name](**arguments)


def final_answer(text: str) -> str:
    """The answer that a text ends with: in the last \\boxed{}, after the last ####, or a number.

    The whole text if it has none of these.
    """
    if (at := text.rfind("\\boxed{")) >= 0:
        depth, begin = 0, at + len("\\boxed{")
        for end in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth < 0:
                return text[begin:end]
    if "####" in text:
        return text.rpartition("####")[2]
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else text


def same(first: str, second: str) -> bool:
    """Whether two answers are equal: as numbers, else as texts without case and outer signs."""
    texts = [text.strip().strip("$. ").lower() for text in (first, second)]
    try:
        numbers = [Decimal(text.replace(",", "")) for text in texts]
        return numbers[0] == numbers[1]
    except InvalidOperation:
        return texts[0] == texts[1]


def _exact_match(column: str = "answer", pattern: str | None = None) -> Function:
    compiled = None if pattern is None else re.compile(pattern, re.DOTALL)

    def answer_of(text: str) -> str | None:
        if compiled is None:
            return final_answer(text)
        matches = list(compiled.finditer(text))
        return matches[-1].group(1 if compiled.groups else 0) if matches else None

    def score(completion: str, row: Mapping[str, Any]) -> float | None:
        given = answer_of(completion)
        wanted = final_answer(str(row[column])) if row[column] is not None else None
        if wanted is None:
            return None
        return float(given is not None and same(given, wanted))

    return score


def _regex(pattern: str) -> Function:
    compiled = re.compile(pattern, re.DOTALL)
    return lambda completion, row: float(compiled.search(completion) is not None)


_MAKERS: dict[str, Callable[..., Function]] = {
    "exact_match": _exact_match,
    "regex": _regex,
}
