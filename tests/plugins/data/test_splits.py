"""Splits: shares, strata, groups that stay together, and sides that stay when data is added."""

import random
from collections import Counter

import pytest

from tests.plugins.data.kit import lines, qa, rows, run

SHARES = {"train": 0.8, "val": 0.1, "test": 0.1}


def records(count: int, seed: int = 1) -> list:
    chance = random.Random(seed)
    return [
        qa(
            f"q{n}",
            f"a{n} {chance.random()}",
            user=f"u{chance.randrange(count // 4)}",
            kind=chance.choice("aaaaaaab"),
        )
        for n in range(count)
    ]


KEEP = {"keep": {"user": "text", "kind": "text"}}


def sides(folder, duck, options, work="work") -> dict:
    made = run(folder, [{"split": options}], duck, work=work, source=KEEP)
    return {row["_id"]: row for row in rows(made, duck)}


def test_shares_and_stability_without_groups(tmp_path, duck):
    lines(tmp_path / "data.jsonl", records(4000))
    first = sides(tmp_path, duck, SHARES)
    counts = Counter(row["split"] for row in first.values())
    assert counts["train"] == pytest.approx(3200, abs=100) and counts["val"] > 300
    # The same rows at other places, and more of them.
    lines(tmp_path / "data.jsonl", [*records(900, seed=2), *records(4000)])
    again = {row["answer"]: row["split"] for row in sides(tmp_path, duck, SHARES).values()}
    assert all(again[row["answer"]] == row["split"] for row in first.values())
    other = run(tmp_path, [{"split": SHARES}], duck, source=KEEP, seed=1)
    changed = [row for row in rows(other, duck) if again[row["answer"]] != row["split"]]
    assert len(changed) > 500


def test_strata_have_the_shares_and_groups_are_not_cut(tmp_path, duck):
    lines(tmp_path / "data.jsonl", records(3000))
    found = sides(tmp_path, duck, {"shares": SHARES, "stratify": "kind"})
    for kind in "ab":
        counts = Counter(row["split"] for row in found.values() if row["kind"] == kind)
        whole = sum(counts.values())
        assert counts["val"] == pytest.approx(whole / 10, abs=1)
        assert counts["test"] == pytest.approx(whole / 10, abs=1)
    found = sides(tmp_path, duck, {"shares": SHARES, "stratify": "kind", "group": "user"})
    where: dict[str, set[str]] = {}
    for row in found.values():
        where.setdefault(row["user"], set()).add(row["split"])
    assert all(len(each) == 1 for each in where.values())
    assert Counter(row["split"] for row in found.values())["val"] == pytest.approx(300, abs=10)


def test_near_duplicates_and_users_are_never_on_two_sides(tmp_path, duck):
    """A row's user has a near duplicate of another user's row: all of them are one group."""
    chance, made = random.Random(3), []
    for n in range(300):
        words = [f"w{chance.randrange(9999)}" for _ in range(40)]
        made.append(qa("q", " ".join(words), user=f"u{n}", kind="a"))
        if n % 3 == 0:
            made.append(qa("q", " ".join([*words[:-1], "other"]), user=f"u{n + 1}", kind="a"))
    lines(tmp_path / "data.jsonl", made)
    steps = [
        {"near_duplicates": {"column": "answer", "ngram": 2, "action": "mark"}},
        {"split": {"shares": {"train": 0.5, "test": 0.5}, "group": "user"}},
    ]
    found = rows(run(tmp_path, steps, duck, source=KEEP), duck)
    assert len(found) == 400
    for column in ("near_group", "user"):
        where: dict = {}
        for row in found:
            if row[column] is not None:
                where.setdefault(row[column], set()).add(row["split"])
        assert all(len(each) == 1 for each in where.values()) and len(where) >= 100
    assert {row["split"] for row in found} == {"train", "test"}
