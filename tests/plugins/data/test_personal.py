"""Personal data: what is found and what is not, and that no file shows what was found."""

import json
from pathlib import Path

import pytest

from benchmarks import personal
from plugins.data import datarecipe
from plugins.data import run as preparation
from plugins.data.errors import DataError
from plugins.data.recognisers import find, hidden, replaced
from tests.plugins.data.kit import answers, chat, lines, qa, rows, run


def test_personal_data_is_masked_and_secrets_are_dropped(tmp_path, duck):
    key = "hf_" + "a1B2" * 8
    texts = {
        "write to jo.h-n+1@mail.example.co.uk.": "write to [EMAIL].",
        "IBAN DE89 3704 0044 0532 0130 00 ok": "IBAN [IBAN] ok",
        "card 4111 1111 1111 1111.": "card [CARD].",
        "call +49 170 1234567 now": "call [PHONE] now",
    }
    turns = [*chat("one\nmail@example.org", "two"), *chat("three", "four")]
    asked = (chat("q", text) for text in (*texts, f"my key is {key}"))
    lines(tmp_path / "data.jsonl", [{"messages": each} for each in (turns, *asked)])
    made = run(tmp_path, ["personal_data"], duck, source={"format": "messages"})
    first, *others = rows(made, duck)
    assert json.loads(first["messages"])[0]["content"] == "one\n[EMAIL]"
    assert first["prompt"] == "one\n[EMAIL]\ntwo\nthree"
    assert [row["answer"] for row in others] == [*texts.values()]
    found = made.records[0]["notes"]["rows_with"]
    assert found == {"email": 2, "phone": 1, "iban": 1, "card": 1, "secret": 1}
    steps = [{"personal_data": {"email": "drop", "secret": "leave", "phone": "leave"}}]
    made = run(tmp_path, steps, duck, source={"format": "messages"})
    left = answers(made, duck)
    assert len(left) == 4 and left[-1].endswith(key) and "call +49 170 1234567 now" in left


def test_planted_values_are_masked_and_numbers_are_not(tmp_path, duck):
    corpus = list(personal.rows(20))
    lines(tmp_path / "data.jsonl", [row["record"] for row in corpus])
    made = run(tmp_path, [personal.STEP], duck, source={"format": "text"})
    left = {number: {"text": text} for number, text in enumerate(answers(made, duck))}
    found = personal.judged(corpus, left)
    for kind, figures in found["kinds"].items():
        least = (0.85, 0.96) if kind == "phone" else (0.99, 0.98)
        assert figures["recall"] > least[0], (kind, figures)
        assert figures["precision"] > least[1], (kind, figures)
    assert found["masked_share"] < 0.02, found["masked"]


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("IBAN AT61 1904 3002 3457 3201 BIC GIBAATWW", "IBAN [IBAN] BIC GIBAATWW"),
        ("iban at611904300234573201 bic x", "iban [IBAN] bic x"),
        ("DE89 3704 0044 0532 0130 00 MAX 2026", "[IBAN] MAX 2026"),
        ("jörg.groß@büro-köln.de, git@github.com:a/b", "[EMAIL], git@github.com:a/b"),
        ("4111 1111 1111 1111 12/27 123", "[CARD] 12/27 123"),
        ("80331 089/123456 oder 0049 89 123456", "80331 [PHONE] oder [PHONE]"),
        ("at 212 555 0187, (212) 555-0187 x2", "at [PHONE], [PHONE]"),
        ("call (030) 1234-5678 now", "call [PHONE] now"),
        ("mobil 01701234567; 2125550187", "mobil [PHONE]; 2125550187"),
        ("(+49 89 123456) +49 (0)89 123456", "[PHONE]) [PHONE]"),
        (f"github_pat_11{'aB3_' * 15} and sk_live_{'aB3d' * 6}", "[SECRET] and [SECRET]"),
        ("ORCID 0000-0002-1825-0097", None),
        ("1 234 567 890, 01.02.2026 - 03.04.2026, 192.168.100.200", None),
        ("2020 2021 2022 2023, 4006381333931, 3.14159265358979", None),
        ("order 1234567 of 2026-11-22, 10.5.3.20", None),
        ("DE89 3704 0044 0532 0130 01, card 4111 1111 1111 1112.", None),
        ("Boston, MA 02110-1301, DOI-10.1038%2Fs41586--020--2649--2", None),
        ("shared=3887104, text=2867200, call(5550187), (0-999999)", None),
    ],
)
def test_where_a_value_begins_and_ends(text, masked):
    shown = replaced(text, find(text), lambda kind, value: f"[{kind.upper()}]")
    assert shown == (masked or text)


def test_countries_of_phone_numbers_can_be_chosen(tmp_path, duck):
    texts = ["at 212 555 0187", "ruf 089/123456 an", "+44 20 7946 0958"]
    lines(tmp_path / "data.jsonl", [qa("q", text) for text in texts])
    made = run(tmp_path, [{"personal_data": {"regions": ["DE"]}}], duck)
    assert answers(made, duck) == ["at 212 555 0187", "ruf [PHONE] an", "[PHONE]"]
    with pytest.raises(DataError, match=r"steps.0.personal_data.regions: 'UK' is not a country"):
        run(tmp_path, [{"personal_data": {"regions": ["UK"]}}], duck)
    source = {"path": "data.jsonl", "format": "qa"}
    config = {"sources": [source], "steps": [{"personal_data": {"regions": "DE"}}]}
    (fault,) = datarecipe.faults(config)
    assert "steps.0.personal_data.regions must be a list of strings" in fault


def test_hidden_keeps_the_form_only():
    text = "Ruf +49 170 1234567 an, Jo.1@müller.de, 20 Stück"
    assert hidden(text) == "Ruf +99 999 9999999 an, xx.9@xxxxxx.xx, 20 Stück"
    assert hidden(hidden(text)) == hidden(text)


def test_reports_and_bad_rows_show_no_value(tmp_path, capsys):
    """Samples of all steps, kept columns, bad rows and their reasons; in files and as printed."""
    values = ["+49 170 1234567", "jo@müller.de", "DE89370400440532013000", "4111111111111111"]
    told = f"Write to {values[1]} or {values[0]}; " + ", ".join(values[2:])
    records = [qa("q", told, owner=values[1], n=1), qa("q", told, owner=values[1], n=2)]
    records += [qa("q", f"{n} {told}", owner=values[1], n=n) for n in range(3, 9)]
    records += [{"question": told}, qa("q", "a", owner="x", n=values[0])]
    # Broken after the values, which JSON writes with escapes.
    records.append(json.dumps({"x": f"one\n{values[0]}\n{told}"})[:-2])
    # A value at the place where a sample is cut.
    records += [qa("q", f"{'x ' * (n // 2)}{values[1]}", owner="x", n=n) for n in range(220, 240)]
    lines(tmp_path / "data.jsonl", records)
    keep = {"owner": "text", "n": "whole"}
    recipe = {
        "sources": [{"path": "data.jsonl", "format": "qa", "keep": keep}],
        "steps": ["exact_duplicates", {"filter": "n != 3"}, "personal_data"],
        "threads": 1,
        "max_bad_share": 0.5,
    }
    settings = {"name": "set", "root": str(tmp_path / "sets"), "base": str(tmp_path)}
    settings |= {"engine": "duckdb", "recipe": recipe, "keep_work": True}
    folder = Path(preparation.prepare(settings)["folder"])
    texts = {"bad_rows.jsonl": (folder / "bad_rows.jsonl").read_text()}
    texts["lineage.json"] = json.dumps(json.loads((folder / "lineage.json").read_text()))
    texts["printed"] = "".join(capsys.readouterr())
    print("\n".join(preparation._lines(preparation.prepare(settings, preview=100))))
    texts["preview"] = capsys.readouterr().out.partition("  kept ")[0]
    for name, text in texts.items():
        for value in [*values, "jo@", "jo\\u0040", "170 123"]:
            assert value not in text, (name, value)
    assert "Write to xx@xxxxxx.xx or +99 999 9999999" in texts["lineage.json"]
    assert len(texts["bad_rows.jsonl"].splitlines()) == 3
    assert "+99 999 9999999" in texts["bad_rows.jsonl"], "as a reason"
    assert (folder / "bad_rows.jsonl").stat().st_mode & 0o777 == 0o600
    # What lies between the steps is not masked yet.
    assert (folder.parent / ".work").stat().st_mode & 0o777 == 0o700
