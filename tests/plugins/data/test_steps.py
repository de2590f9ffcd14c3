"""Each step: which rows it keeps, changes and removes, and what it says of wrong options."""

import json

import pytest

from plugins.data.errors import DataError
from tests.plugins.data.kit import answers, chat, lines, qa, rows, run


@pytest.mark.long
def test_tokens_are_those_of_the_model_s_own_chat_template(tmp_path, duck):
    """Counted as transformers' tokenizer counts the conversation that a trainer sees."""
    from transformers import AutoTokenizer

    from trainer import demo

    texts = [qa(f"Where is order {n}?", "It is on its way, " * (n % 7 + 1)) for n in range(40)]
    lines(tmp_path / "data.jsonl", texts)
    demo._tokenizer([row["answer"] for row in texts]).save_pretrained(tmp_path / "model")
    step = {"tokens": {"tokenizer": str(tmp_path / "model"), "min": 20, "max": 60}}
    made = run(tmp_path, [{"template": {"system": "Be brief."}}, step], duck)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    wanted = {}
    for number, row in enumerate(texts, 1):
        turns = chat(row["question"], row["answer"], "Be brief.")
        wanted[number] = len(tokenizer.apply_chat_template(turns)["input_ids"])
    kept = {number: count for number, count in wanted.items() if 20 <= count <= 60}
    assert 0 < len(kept) < len(wanted)
    assert {row["_id"]: row["tokens"] for row in rows(made, duck)} == kept
    assert made.records[1]["notes"]["tokens_before"]["sum"] == sum(wanted.values())
    # Plain text is counted as it is.
    lines(tmp_path / "plain.jsonl", [{"text": "Where is it?"}])
    source = {"path": "plain.jsonl", "format": "text"}
    step = {"tokens": {"tokenizer": str(tmp_path / "model")}}
    (row,) = rows(run(tmp_path, [step], duck, work="plain", source=source), duck)
    assert row["tokens"] == len(tokenizer("Where is it?", add_special_tokens=False)["input_ids"])
    with pytest.raises(DataError, match=r"has no tokenizer.json: give the model's folder"):
        run(tmp_path, [{"tokens": {"tokenizer": str(tmp_path)}}], duck, work="none")


def test_conditions_and_lengths(tmp_path, duck):
    records = [
        qa("short", "a", quality=0.9, kind="x"),
        qa("a longer question", "b", quality=0.85, kind="y"),
        qa("a longer question", "c", quality=0.2, kind="y"),
        qa("a longer question", "d", quality=None, kind="z"),
    ]
    lines(tmp_path / "data.jsonl", records)
    source = {"keep": {"quality": "number", "kind": "text"}}
    for step, kept in (
        ({"filter": "quality >= 0.85 and not contains(kind, 'q')"}, ["a", "b"]),
        ({"length": {"min": 10, "column": "prompt"}}, ["b", "c", "d"]),
        ({"filter": "kind in ['x', 'z'] or 10 < len(text) * quality <= 20"}, ["a", "b", "d"]),
    ):
        assert answers(run(tmp_path, [step], duck, source=source), duck) == kept


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("qualty > 1", "no column 'qualty' (did you mean quality?)"),
        ("__import__('os').system('id')", "cannot be used in a condition"),
        ("quality >", "cannot read the condition"),
        ("quality + 1", "is not a condition"),
        ("quality == [1]", "cannot be used in a condition"),
        ("len(quality) > 2", "does not fit its columns"),
    ],
)
def test_a_wrong_condition_is_one_line(tmp_path, duck, condition, words):
    lines(tmp_path / "data.jsonl", [qa("q", "a", quality=1)])
    source = {"keep": {"quality": "number"}}
    with pytest.raises(DataError) as error:
        run(tmp_path, [{"filter": condition}], duck, source=source)
    (fault,) = error.value.faults
    assert words in fault and "\n" not in fault and error.value.exit_code == 2


def test_faults_of_all_steps_are_told_before_a_row_is_read(tmp_path, duck):
    steps = [
        {"filter": "qualty > 1"},
        {"exact_duplicates": {"columns": ["prompt", "kind"], "keep": "-stars"}},
        {"template": {"prompt": "{{ question }}"}},
        {"language": "de"},
        {"filter": "language == 'de'"},
        {"cap": {"by": "sourc", "rows": 3}},
        {"split": {"shares": {"train": 1.0}, "group": ["user", "near_duplicates"]}},
    ]
    lines(tmp_path / "data.jsonl", ["not a record"])
    with pytest.raises(DataError) as error:
        run(tmp_path, steps, duck, source={"keep": {"quality": "number"}})
    found = list(error.value.faults)
    wanted = [
        *("steps.0.filter: there is no column 'qualty'", "steps.2.template.prompt: the template"),
        *("steps.1.exact_duplicates: there is no column 'kind'", "no column 'stars'"),
        *("steps.5.cap: there is no column 'sourc' (did you mean source?)", "no column 'user'"),
    ]
    assert all(any(words in each for each in found) for words in wanted), found
    assert len(found) == len(wanted) and error.value.exit_code == 2


def test_exact_duplicates_keep_the_first_or_the_best(tmp_path, duck):
    records = [qa("q", "a", n=1), qa("q", "A!", n=3), qa("q", "a", n=2), qa("p", "a", n=0)]
    lines(tmp_path / "data.jsonl", records)
    source = {"keep": {"n": "whole"}}
    for options, kept in (
        ({}, [1, 3, 0]),
        ({"keep": "n"}, [3, 2, 0]),
        ({"normalise": True, "keep": "n"}, [3, 0]),
        ({"columns": ["answer"], "keep": "-n"}, [3, 0]),
    ):
        made = run(tmp_path, [{"exact_duplicates": options}], duck, source=source)
        assert [row["n"] for row in rows(made, duck)] == kept, options


def test_templates_set_prompt_and_system_and_cannot_reach_the_system(tmp_path, duck):
    lines(tmp_path / "data.jsonl", [qa("q{}", "a", kind="bill")])
    source = {"keep": {"kind": "text"}}
    template = {"prompt": "Kind: {{ kind }}\n{{ prompt }}", "system": "Be {{ 'brief' }}."}
    made = run(tmp_path, [{"template": template}], duck, source=source)
    (row,) = rows(made, duck)
    assert row["prompt"] == "Kind: bill\nq{}"
    told = json.loads(row["messages"])
    assert [each["role"] for each in told] == ["system", "user", "assistant"]
    assert told[0]["content"] == "Be brief."
    for text, words in (
        ("{{ promt }}", "unknown field 'promt' (did you mean prompt?)"),
        ("{{ kind", "fix the template"),
        ("{{ kind.__class__.__mro__[1].__subclasses__() }}", "fix the template"),
    ):
        with pytest.raises(DataError) as error:
            run(tmp_path, [{"template": {"prompt": text}}], duck, source=source)
        assert words in error.value.faults[0]


def test_languages(tmp_path, duck):
    records = [
        qa("Where is my order?", "It was sent yesterday and arrives on Monday."),
        qa("Wo ist meine Bestellung?", "Sie wurde gestern verschickt und kommt am Montag an."),
    ]
    lines(tmp_path / "data.jsonl", records)
    made = run(tmp_path, [{"language": "de"}], duck)
    assert [row["language"] for row in rows(made, duck)] == ["de"]
    assert made.records[0]["notes"]["languages"] == {"de": 1, "en": 1}
    with pytest.raises(DataError, match="'german' is not known"):
        run(tmp_path, [{"language": "german"}], duck)


def test_mixtures_and_caps(tmp_path, duck):
    lines(tmp_path / "a.jsonl", [qa("q", f"a{n}") for n in range(100)])
    lines(tmp_path / "b.jsonl", [qa("q", f"b{n}") for n in range(30)])
    sources = [{"path": f"{name}.jsonl", "format": "qa"} for name in "ab"]
    weights = {"mixture": {"a": 2, "b": 1}}
    made = run(tmp_path, [weights], duck, sources=sources)
    first = answers(made, duck)
    assert [sum(text[0] == name for text in first) for name in "ab"] == [60, 30]
    # Rows that are added do not exchange the others.
    lines(tmp_path / "a.jsonl", [qa("q", f"a{n}") for n in range(110)])
    again = set(answers(run(tmp_path, [weights], duck, sources=sources), duck))
    assert len(again & set(first)) > 80
    capped = run(tmp_path, [{"cap": {"by": "source", "rows": 7}}], duck, sources=sources)
    assert capped.rows.count == 14
    with pytest.raises(DataError, match="180 of a, which has 110: set rows=90 or less"):
        steps = [{"mixture": {"weights": {"a": 2, "b": 1}, "rows": 270}}]
        run(tmp_path, steps, duck, sources=sources)
