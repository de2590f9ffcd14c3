"""Near duplicates: against exact Jaccard similarity of all pairs, and datasketch's definition."""

import random

import pyarrow as pa
import pytest

from plugins.data.steps import near
from plugins.data.text import shingles
from tests.plugins.data.kit import lines, qa, rows, run


def texts(count: int = 60) -> list[str]:
    """Texts of 60 words; every second one is the one before with 0 to 8 words changed."""
    chance, made = random.Random(5), []
    for number in range(count):
        words = [f"w{chance.randrange(5000)}" for _ in range(60)]
        if number % 2:
            words = made[-1].split()
            for place in chance.sample(range(60), number % 9):
                words[place] = f"x{chance.randrange(5000)}"
        made.append(" ".join(words))
    return made


def jaccard(one: str, other: str, ngram: int) -> float:
    """Plain Python, from the definition."""
    sets = []
    for text in (one, other):
        words = text.lower().split()
        count = max(len(words) - ngram + 1, 1)
        sets.append({tuple(words[place : place + ngram]) for place in range(count)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_shingles_of_short_empty_and_unspaced_texts():
    values = pa.array(["one two three", "one two", "", "Two, ONE!", "猫が好き", "猫が嫌い"])
    hashes, starts = shingles(values, 2)
    parts = [hashes[starts[k] : starts[k + 1]].tolist() for k in range(len(values))]
    assert [len(part) for part in parts] == [2, 1, 1, 1, 3, 3]
    # Case and punctuation do not count, order does.
    assert parts[1] == parts[0][:1] and parts[3] != parts[1]
    assert parts[4][0] == parts[5][0] and parts[4][2] != parts[5][2]
    alone, begins = shingles(values.slice(1, 1), 2)
    assert alone.tolist() == parts[1] and begins.tolist() == [0, 1]


def test_groups_are_found_to_the_end_and_the_best_is_kept(tmp_path, duck):
    """A chain in which each text is similar only to its neighbours is one group."""
    chance = random.Random(1)
    words = [f"w{chance.randrange(9999)}" for _ in range(40)]
    chain = []
    for number in range(30):
        words = [*words[2:], f"c{number}", f"d{number}"]
        chain.append(" ".join(words))
    assert jaccard(chain[0], chain[29], 2) == 0
    other = [" ".join(f"z{chance.randrange(9999)}" for _ in range(40)) for _ in range(5)]
    records = [qa("q", text, score=n % 7) for n, text in enumerate([*chain, *other])]
    lines(tmp_path / "data.jsonl", records)
    step = {"column": "answer", "jaccard": 0.8, "ngram": 2, "keep": "score"}
    # So many bands that no pair of the chain is missed.
    step |= {"bands": 60, "rows_per_band": 3}
    source = {"keep": {"score": "whole"}}
    made = run(tmp_path, [{"near_duplicates": step}], duck, source=source)
    kept = [row["_id"] for row in rows(made, duck)]
    # Of the chain the first of those with the highest score, 6: line 7.
    assert kept == [7, *range(31, 36)]
    ledger = duck.rows(duck.read(made.folders["01-near_duplicates"] / "removed"))
    assert {row["kept_id"] for row in ledger} == {7} and len(ledger) == 29


def test_recall_and_precision_against_planted_pairs(tmp_path, duck):
    made = texts(400)
    lines(tmp_path / "data.jsonl", [qa("q", text) for text in made])
    step = {"column": "answer", "ngram": 3, "jaccard": 0.8}
    result = run(tmp_path, [{"near_duplicates": step}], duck)
    found = duck.rows(duck.read(result.folders["01-near_duplicates"] / "similar"))
    planted = {(k, k + 1) for k in range(1, 400, 2) if jaccard(made[k - 1], made[k], 3) >= 0.8}
    pairs = {(row["a"], row["b"]) for row in found}
    assert len(planted) > 30
    assert len(pairs & planted) / len(planted) >= 0.95
    assert pairs <= planted
    assert result.rows.count == 400 - len(pairs)


@pytest.mark.parametrize(("similarity", "least"), [(0.8, 0.98), (0.9, 0.999)])
def test_the_stated_probability_of_a_candidate(similarity, least):
    assert near.probability(similarity) >= least
    assert near.probability(0.3) < 0.02
