"""Spark gives the rows that DuckDB gives, step by step."""

import random

import pytest

from plugins.data import output
from plugins.data.errors import DataError
from plugins.data.query_engines import java
from tests.plugins.data.kit import lines, qa, rows, run, written


def records() -> list:
    """Texts with duplicates, near duplicates, personal data, accents, emoji and nulls."""
    chance, made = random.Random(11), []
    words = ["order", "parcel", "Straße", "İstanbul", "猫", "naïve", "👩‍👩‍👧", "refund", "late"]
    words += [f"w{n}" for n in range(400)]
    for n in range(300):
        text = chance.choices(words, k=30)
        if n % 5 == 4:
            text = made[-1]["question"].split()[: 30 - n % 3]
        more = {
            "quality": chance.choice([None, round(chance.random(), 3)]),
            "kind": chance.choice("ab"),
        }
        if n % 40 == 0:
            text.append(
                f"mail me at u{n}@müller.de or ring 089/1234{n:02d}, DE89370400440532013000"
            )
        made.append(qa(" ".join(text), f"answer {n % 90}", user=f"u{n % 70}", **more))
    return made


STEPS = [
    {"filter": "quality >= 0.1 and len(answer) < 500 and kind in ['a', 'b']"},
    {"length": {"min": 40, "max": 2000}},
    {"exact_duplicates": {"columns": ["prompt"], "keep": "quality"}},
    "personal_data",
    {"near_duplicates": {"ngram": 3, "column": "prompt", "keep": "quality"}},
    {"template": {"prompt": "[{{ kind }}] {{ prompt }}", "system": "Be brief."}},
    {"mixture": {"data": 2, "more": 1}},
    {"cap": {"by": "kind", "rows": 40}},
    {"split": {"shares": {"train": 0.8, "test": 0.2}, "stratify": "kind", "group": ["user"]}},
]


@pytest.mark.named
def test_both_engines_give_the_same_rows(tmp_path, duck):
    pytest.importorskip("pyspark")
    from plugins.data.query_engines.spark import Spark

    made = records()
    lines(tmp_path / "data.jsonl", made[:200])
    lines(tmp_path / "more.jsonl", made[200:])
    keep = {"quality": "number", "kind": "text", "user": "text"}
    sources = [{"path": f"{name}.jsonl", "format": "qa", "keep": keep} for name in ("data", "more")]
    spark = Spark(2**30, tmp_path, 2, None, None)
    try:
        found = []
        for on in (duck, spark):
            result = run(tmp_path, STEPS, on, work=on.name, sources=sources)
            found.append((on, result, rows(result, on)))
            target, card = output.write(
                {"sources": sources}, result, on, tmp_path / f"set-{on.name}", tmp_path / on.name
            )
            found[-1] += (written(target / "data"), card)
        (_, one, ones, first, card), (_, other, others, second, card_2) = found
        counts = [record["rows_out"] for record in one.records]
        assert counts == [record["rows_out"] for record in other.records]
        worked = {r["step"][3:] for r in one.records if r["rows_in"] > r["rows_out"]}
        assert {"filter", "near_duplicates", "mixture"} <= worked
        assert min(
            one.records[3]["notes"]["rows_with"][kind] for kind in ("email", "phone", "iban")
        )
        for key, folder in one.folders.items():
            if (folder / "removed").is_dir():
                ledgers = [
                    sorted(map(str, on.rows(on.read(result.folders[key] / "removed"))))
                    for on, result in ((duck, one), (spark, other))
                ]
                assert ledgers[0] == ledgers[1], key
        assert one.records[0]["samples"] == other.records[0]["samples"]
        assert ones == others and first == second and len(first) > 30
        assert card["content_sha256"] == card_2["content_sha256"]
    finally:
        spark.close()


def test_no_java(monkeypatch):
    monkeypatch.setattr(java, "_candidates", lambda: [])
    with pytest.raises(DataError, match=r"Java 17 or 21, and there is none: .* --with spark"):
        java.home()
