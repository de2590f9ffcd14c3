"""The samples of a task, and how many of them the training set has.

As a program it says what is wrong with the samples of a suite, before a job is queued:
python -m plugins.evaluate.samples TRAIN.YAML prints {"samples": {TASK: COUNT}, "faults": [...]}.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from plugins.evaluate.scores import normalised
from runspec.files import parse_json
from runspec.storage import patiently
from trainer.data import origin
from trainer.errors import ConfigError

# Words in a row that a training text shares with a sample (Brown et al., 2020, appendix C).
NGRAM = 13


@dataclass(frozen=True)
class Sample:
    """One sample of a task."""

    # Its place in the file.
    index: int
    prompt: str
    # The correct answer.
    reference: str
    group: str = ""
    # The conversation that is continued, whose last message is the prompt; empty for a prompt
    # alone. Of kind pair_accuracy: the record alone.
    messages: tuple[dict[str, Any], ...] = ()


def read(name: str, task: dict[str, Any]) -> list[Sample]:
    """Return the samples of a task, in the file's order.

    Raises:
        ConfigError: the file is missing or empty, or a line lacks what the task asks for.
    """
    if task.get("dataset"):
        return list(_read_dataset(f"tasks.{name}.dataset", task))
    path = Path(os.path.expanduser(str(task["data"])))
    faults: list[str] = []
    samples: list[Sample] = []
    try:
        for number, line in enumerate(patiently(Path.read_bytes, path).splitlines(), 1):
            if not line.strip():
                continue
            try:
                samples.append(_of_line(len(samples), parse_json(line), task))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                why = f"it has no {error}" if isinstance(error, KeyError) else error
                faults.append(f"tasks.{name}.data {path}, line {number}: {why}")
                if len(faults) == 5:
                    break
            if task.get("limit") and len(samples) >= task["limit"]:
                break
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tasks.{name}.data {path} cannot be read: {error}") from None
    if faults:
        raise ConfigError(*faults)
    if not samples:
        raise ConfigError(f"tasks.{name}.data {path} has no sample")
    return samples


def _read_dataset(key: str, task: dict[str, Any]) -> Iterator[Sample]:
    """Yield the samples of a dataset block, as a recipe of training has it."""
    from plugins.evaluate import datasets  # JSON lines are read without it

    block, limit, group = task["dataset"], task.get("limit"), task.get("group")
    if task.get("kind") == "pair_accuracy":
        for index, pair, row in datasets.pairs(key, block, limit):
            yield replace(_pair(index, pair), group=_group(key, row, group))
        return
    for index, turns, row in datasets.conversations(key, block, limit):
        *asked, answer = turns
        prompt, reference = str(asked[-1]["content"]), str(answer["content"])
        yield Sample(index, prompt, reference, _group(key, row, group), tuple(asked))


def _group(key: str, row: dict[str, Any], group: str | None) -> str:
    if group and group not in row:
        raise ConfigError(f"{key}: has no column {group!r}, which group names")
    return str(row[group]) if group else ""


def content(samples: Iterable[Sample]) -> list[Any]:
    """Return what a model is asked and compared with, in order."""
    return [[each.prompt, each.reference, each.messages] for each in samples]


def sha256(samples: Iterable[Sample]) -> str:
    """Return a hash of what a model is asked and compared with."""
    return hashlib.sha256(json.dumps(content(samples)).encode()).hexdigest()


def _of_line(index: int, row: Any, task: dict[str, Any]) -> Sample:
    """Return the sample of a line; KeyError names the column that it lacks."""
    kind, group = task.get("kind"), task.get("group")
    if not isinstance(row, dict):
        raise TypeError("it is no JSON object")
    sample = _pair(index, row) if kind == "pair_accuracy" else _question(index, row, task)
    return replace(sample, group=str(row[group])) if group else sample


def _question(index: int, row: dict[str, Any], task: dict[str, Any]) -> Sample:
    prompt, reference = task.get("prompt") or "question", task.get("reference") or "answer"
    messages = row.get("messages")
    asked: list[dict[str, Any]] = []
    if isinstance(messages, list) and messages and prompt not in row:
        *asked, answer = messages
        if not asked or answer.get("role") != "assistant":
            raise TypeError("its messages do not end with an answer")
        row = {**row, prompt: asked[-1]["content"], reference: answer["content"]}
    return Sample(index, _text(row[prompt]), _text(row[reference]), messages=tuple(asked))


def _pair(index: int, row: dict[str, Any]) -> Sample:
    """Return a record of trainer.data.preferences.PreferenceDataset; the reference is chosen."""
    row["rejected"]
    return Sample(index, _text(row.get("prompt") or ""), _text(row["chosen"]), messages=(row,))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def contamination(samples: list[Sample], block: dict[str, Any]) -> dict[str, Any]:
    """Count the samples whose prompt or answer the training set has, as a whole or in part.

    exact: a whole text of the training set is the prompt. overlap: the prompt or the reference
    shares 13 words in a row with it. Texts are compared as SQuAD normalises them. not_searched: why
    the training set could not be read.

    Args:
        block: the dataset block of the training set.
    """
    from plugins.evaluate import datasets  # hardly any command searches

    texts = [(normalised(each.prompt), normalised(each.reference)) for each in samples]
    wanted: dict[int, set[int]] = {}
    for number, pair in enumerate(texts):
        for text in pair:
            for gram in _grams(text):
                wanted.setdefault(gram, set()).add(number)
    prompts: dict[str, set[int]] = {}
    for number, (prompt, _) in enumerate(texts):
        prompts.setdefault(prompt, set()).add(number)
    exact: set[int] = set()
    overlap: set[int] = set()
    known = {"samples": len(samples), "files": [str(path) for path in origin.data_files(block)]}
    try:
        for text in map(normalised, datasets.texts("training_data", block)):
            exact |= prompts.get(text, set())
            for gram in _grams(text):
                overlap |= wanted.get(gram, set())
    except ConfigError as error:
        return {**known, "not_searched": "; ".join(error.faults)}
    return {**known, "exact": len(exact), f"overlap_{NGRAM}_words": len(overlap)}


def _grams(text: str) -> Iterator[int]:
    words = text.split()
    for start in range(len(words) - NGRAM + 1):
        gram = " ".join(words[start : start + NGRAM]).encode()
        yield int.from_bytes(hashlib.blake2b(gram, digest_size=8).digest(), "big")


def main(arguments: list[str]) -> int:
    """Print what a suite's samples are; exit status 0, or 2 for wrong usage."""
    if len(arguments) != 1:
        print("usage: python -m plugins.evaluate.samples TRAIN.YAML", file=sys.stderr)
        return 2
    config = yaml.safe_load(Path(arguments[0]).read_text(encoding="utf-8"))
    counts: dict[str, int] = {}
    faults: list[str] = []
    for name, task in (config.get("tasks") or {}).items():
        if task.get("kind") != "lm_eval":
            try:
                counts[name] = len(read(name, task))
            except ConfigError as error:
                faults += error.faults
    print(json.dumps({"samples": counts, "faults": faults}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
