"""Scores of one answer against its reference, and the report of a classification."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from runspec.files import parse_json
from trainer.errors import ConfigError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WORDS = re.compile(r"[a-z0-9]+")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Return text as SQuAD's script compares it: lower case, no punctuation or articles."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, reference: str) -> float:
    """Return 1 if both are the same text after normalisation, else 0."""
    return float(normalised(answer) == normalised(reference))


def f1(answer: str, reference: str) -> float:
    """Return the F1 of the words that both have (SQuAD)."""
    ours, theirs = normalised(answer).split(), normalised(reference).split()
    if not ours or not theirs:
        return float(ours == theirs)
    return _f_measure((Counter(ours) & Counter(theirs)).total(), len(ours), len(theirs))


def rouge_n(answer: str, reference: str, n: int) -> float:
    """Return the F-measure of ROUGE-n, without stemming (Lin, 2004; as the rouge_score package)."""
    ours, theirs = (_ngrams(_WORDS.findall(text.lower()), n) for text in (answer, reference))
    return _f_measure((ours & theirs).total(), ours.total(), theirs.total())


def rouge_l(answer: str, reference: str) -> float:
    """Return the F-measure of ROUGE-L: the longest common subsequence of words."""
    ours, theirs = (_WORDS.findall(text.lower()) for text in (answer, reference))
    row = [0] * (len(theirs) + 1)
    for word in ours:
        before = 0
        for place, other in enumerate(theirs, 1):
            above = row[place]
            row[place] = before + 1 if word == other else max(above, row[place - 1])
            before = above
    return _f_measure(row[-1], len(ours), len(theirs))


def _ngrams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def _f_measure(common: int, ours: int, theirs: int) -> float:
    return 2 * common / (ours + theirs) if common else 0.0


def matches(answer: str, pattern: str) -> float:
    """Return 1 if the answer matches the regular expression, else 0."""
    return float(re.search(pattern, answer) is not None)


def fits_schema(answer: str, schema: str) -> float:
    """Return 1 if the answer is JSON that a JSON schema accepts, else 0.

    Raises:
        ConfigError: the package that reads JSON schemas is missing, or the schema is wrong.
    """
    try:
        value = parse_json(_inner(answer))
    except ValueError:
        return 0.0
    return float(_validator(schema).is_valid(value))


def _inner(answer: str) -> str:
    """Return what stands between ``` marks, or the whole answer."""
    fenced = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n?```\s*", answer, re.DOTALL)
    return fenced.group(1) if fenced else answer


@cache
def _validator(schema: str) -> Any:
    try:
        from jsonschema import Draft202012Validator, SchemaError
    except ImportError:
        message = "the metric schema needs the package jsonschema: bash setup.sh --with eval"
        raise ConfigError(message) from None
    value = parse_json(schema)
    try:
        Draft202012Validator.check_schema(value)
    except SchemaError as error:
        raise ConfigError(f"the JSON schema is wrong: {error.message}") from None
    return Draft202012Validator(value)


def label_of(answer: str, labels: Sequence[str]) -> str | None:
    """Return the label that an answer gives: it is the answer, or comes first in it."""
    text = normalised(answer)
    places = []
    for label in labels:
        wanted = normalised(label)
        if text == wanted:
            return label
        place = re.search(rf"\b{re.escape(wanted)}\b", text) if wanted else None
        if place:
            places.append((place.start(), -len(wanted), label))
    return min(places)[2] if places else None


def of_answer(metric: str, answer: str, reference: str, task: dict[str, Any]) -> float:
    """Return one metric of one answer."""
    if metric == "classification":
        return float(label_of(answer, task["labels"]) == reference)
    if metric == "regex":
        return matches(answer, task["regex"])
    if metric == "schema":
        return fits_schema(answer, task["schema_text"])
    plain = {"exact_match": exact_match, "f1": f1, "rougeL": rouge_l}
    if metric in plain:
        return plain[metric](answer, reference)
    return rouge_n(answer, reference, int(metric.removeprefix("rouge")))
