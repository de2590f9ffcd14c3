"""Evaluation items planted into chats, beside rows that are only like them."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

FORMAT = "messages"
STEP = {"decontaminate": "items.jsonl"}
_ITEMS = 500
_PLACES = ("Lisbon", "Oslo", "Lima", "Quito", "Accra", "Hanoi", "Turin", "Minsk", "Perth", "Riga")
_THINGS = (
    "river",
    "museum",
    "bridge",
    "harbour",
    "theatre",
    "tower",
    "market",
    "garden",
    "station",
)
_FEATURES = ("oldest", "longest", "tallest", "newest", "best known", "most visited", "largest")
_YEARS = range(1400, 2020)
_FACTS = ("stone", "trade", "river", "council", "harvest", "winter", "road", "guild", "school")
# Answers and turns that every set has.
TRIVIAL = ("yes", "no", "A", "B", "42", "3.5", "true", "none", "Paris", "I don't know", "thank you")
TRIVIAL += ("None of the above", "All of the above", "It depends", "Not enough information")


def _question(chance: random.Random) -> str:
    """A question of 3 to 12 words."""
    place, thing, year = chance.choice(_PLACES), chance.choice(_THINGS), chance.choice(_YEARS)
    one, other = chance.randrange(10, 99), chance.randrange(10, 99)
    return chance.choice(
        [
            f"Who governed {place} in {year}?",
            f"Describe {place} around {year}.",
            f"What is the {chance.choice(_FEATURES)} {thing} of {place} since {year}?",
            f"Which {thing} in {place} was built in {year}, and why?",
            f"What is {one} {chance.choice('+-*/')} {other}?",
            f"Solve {one}x {chance.choice('+-')} {other} = 7.",
            f"{place} 的{chance.choice('河桥塔市港')}建于{year}年吗？",
        ]
    )


def _answer(chance: random.Random) -> str:
    """An answer of 9 to 12 words."""
    first, second = chance.sample(_FACTS, 2)
    year, place = chance.choice(_YEARS), chance.choice(_PLACES)
    return f"In {year} the {first} of {place} was moved behind the old {second}."


def _long(chance: random.Random) -> str:
    return " ".join(chance.choice(_FACTS) for _ in range(30)) + f" {chance.choice(_YEARS)}"


def _items() -> list[dict[str, str]]:
    chance, made = random.Random(7), []
    while len(made) < _ITEMS:
        question = _question(chance)
        if all(question != other["question"] for other in made):
            choice = TRIVIAL[len(made) % len(TRIVIAL)]
            made.append({"question": question, "choice": choice, "answer": _answer(chance)})
    return [*made, *({"question": _long(chance), "choice": "A", "answer": "yes"} for _ in made)]


ITEMS = _items()
FILES = {"items.jsonl": "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in ITEMS)}


def _chat(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    told = [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]
    return {"messages": json.dumps(told, ensure_ascii=False)}


def _retyped(text: str) -> str:
    return f" {text.lower().rstrip('.?')}  ?!".replace(" ", "  ", 2)


Maker = Callable[[random.Random, dict[str, str], dict[str, str]], dict[str, Any]]
# How a short item, or a long one, comes to stand in a chat.
SHORT: dict[str, Maker] = {
    "exact question": lambda c, short, long: _chat(short["question"], _long(c)),
    "exact question, short answer": lambda c, short, long: _chat(short["question"], "It is so."),
    "other case and marks": lambda c, short, long: _chat(_retyped(short["question"]), _long(c)),
    "as a later turn": lambda c, short, long: _chat("Hello", "Hi", short["question"], _long(c)),
    "after an instruction": lambda c, short, long: _chat(
        f"Answer the following question.\n\n{short['question']}", _long(c)
    ),
    "exact answer": lambda c, short, long: _chat(_long(c), short["answer"]),
}
LONG: dict[str, Maker] = {
    "long item": lambda c, short, long: _chat(long["question"], "It is so."),
    "long item within a text": lambda c, short, long: _chat(
        f"{_long(c)} {long['question']} {_long(c)}", "It is so."
    ),
}
CLEAN: dict[str, Maker] = {
    "other question": lambda c, short, long: _chat(_other(c), _long(c)),
    "other answer": lambda c, short, long: _chat(_long(c), _answer(c).replace("old", "new")),
    "trivial answer": lambda c, short, long: _chat(_other(c), c.choice(TRIVIAL)),
    "trivial turn": lambda c, short, long: _chat(_other(c), _long(c), c.choice(TRIVIAL), "Ok."),
    "question within a text": lambda c, short, long: _chat(
        f"{_long(c)} Some ask: {short['question']} {_long(c)}", "It is so."
    ),
}


def _other(chance: random.Random) -> str:
    """A question that is like the items and none of them."""
    known = {item["question"] for item in ITEMS}
    while (made := _question(chance)) in known:
        continue
    return made


def rows(each: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield a record, its form, and whether it holds an item."""
    chance = random.Random(seed)
    for kind, forms in (("short", SHORT), ("long", LONG), ("", CLEAN)):
        for form, make in forms.items():
            for number in range(each):
                record = make(chance, ITEMS[number % _ITEMS], ITEMS[_ITEMS + number % _ITEMS])
                yield {"record": record, "kind": kind, "form": form}


def judged(rows: list[dict[str, Any]], left: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Recall by form, and the share of clean rows that were removed."""
    there, removed = Counter(), Counter()
    for number, row in enumerate(rows):
        there[row["kind"], row["form"]] += 1
        removed[row["kind"], row["form"]] += number not in left
    shares = {key: round(removed[key] / there[key], 4) for key in there}
    return {
        "recall": {form: share for (kind, form), share in shares.items() if kind},
        "false_alarms": {form: share for (kind, form), share in shares.items() if not kind},
    }


def many(count: int, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Chats of two turns of 31 and 62 words; one in fifty holds an item."""
    chance = random.Random(1)
    for _ in range(count):
        planted = chance.random() < 0.02
        yield (
            chance.choice(rows)["record"] if planted else _chat(_long(chance), _long(chance) * 2)
        )
