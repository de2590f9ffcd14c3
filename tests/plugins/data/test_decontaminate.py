"""Decontamination: which rows hold an item of an evaluation set, and which are only like one."""

import random

import pytest

from benchmarks import contamination
from plugins.data.errors import DataError
from tests.plugins.data.kit import chat, ids, lines, qa, run


def test_planted_items_are_found_and_like_rows_stay(tmp_path, duck):
    corpus = list(contamination.rows(100))
    lines(tmp_path / "data.jsonl", [row["record"] for row in corpus])
    (tmp_path / "items.jsonl").write_text(contamination.FILES["items.jsonl"])
    made = run(tmp_path, [contamination.STEP], duck, source={"format": contamination.FORMAT})
    left = {number - 1: {} for number in ids(made, duck)}
    found = contamination.judged(corpus, left)
    assert all(share > 0.99 for share in found["recall"].values()), found
    assert all(share < 0.01 for share in found["false_alarms"].values()), found
    notes = made.records[0]["notes"]
    assert notes["evaluation_texts"] == 3 * len(contamination.ITEMS)
    assert notes["compared"] == {"by_ngrams": 500, "whole": 1000}, "questions and answers"


def test_items_by_ngrams(tmp_path, duck):
    chance = random.Random(2)
    words = [f"w{n}" for n in range(500)]
    test = " ".join(chance.choices(words, k=30))
    inside = " ".join([*chance.choices(words, k=20), *test.split()[5:18], "end"])
    almost = " ".join([*chance.choices(words, k=20), *test.split()[5:17], "end"])
    lines(tmp_path / "data.jsonl", [qa("q", test), qa("q", inside), qa("q", almost)])
    # JSON of any nesting, and JSON lines.
    lines(tmp_path / "eval.json", [{"data": [{"label": "bill", "turns": [{"text": test}]}]}])
    made = run(tmp_path, [{"decontaminate": "eval.json"}], duck)
    assert ids(made, duck) == {3}
    lines(tmp_path / "eval.jsonl", [{"text": test}, "{"])
    step = {"decontaminate": {"against": "eval.jsonl", "min_hits": 2}}
    with pytest.raises(DataError, match=r"eval.jsonl, line 2: is not JSON: .*: fix the file"):
        run(tmp_path, [step], duck)
    lines(tmp_path / "eval.jsonl", [{"text": test}])
    assert ids(run(tmp_path, [step], duck), duck) == {2, 3}


ITEMS = (
    'question,choice\nWho wrote Faust?,All of the above\n"What is 12 - 7, Jo?",42\n你叫什么名字,A\n'
)


@pytest.mark.parametrize("form", ["qa", "messages", "text", "preference"])
def test_short_items_by_the_forms_of_rows(tmp_path, duck, form):
    (tmp_path / "eval.csv").write_text(ITEMS)
    asked = ["who wrote  FAUST", "What is 12-7, Jo?", "What is 12+7, Jo?", "你叫什么名字？"]
    asked += ["Who wrote Faust, and when?", "42", "A", "Question: Who wrote Faust?\nAnswer:"]
    records = {
        "qa": [qa(text, "Goethe, I think.") for text in asked],
        "messages": [{"messages": chat(text, "Goethe, I think.", "Be brief.")} for text in asked],
        "text": [{"text": text} for text in asked],
        "preference": [{"prompt": text, "chosen": "42", "rejected": "A"} for text in asked],
    }
    lines(tmp_path / "data.jsonl", records[form])
    made = run(tmp_path, [{"decontaminate": "eval.csv"}], duck, source={"format": form})
    assert ids(made, duck) == ({3, 5, 6, 7, 8} if form == "text" else {3, 5, 6, 7})


def test_answers_need_more_words_than_questions(tmp_path, duck):
    told = "Faust was written by Johann Wolfgang von Goethe in Weimar."
    lines(
        tmp_path / "eval.jsonl",
        [{"q": "Who wrote Faust?", "a": told}, {"a": "It was Goethe, I think."}],
    )
    answers = [told, "It was Goethe, I think.", told.upper(), f"{told} Then he slept."]
    records = [{"prompt": f"q{n}", "chosen": a, "rejected": "no"} for n, a in enumerate(answers)]
    records.append({"prompt": "q", "chosen": "yes", "rejected": told})
    lines(tmp_path / "data.jsonl", records)
    made = run(tmp_path, [{"decontaminate": "eval.jsonl"}], duck, source={"format": "preference"})
    assert ids(made, duck) == {2, 4}


def test_phrases_of_many_items_are_no_items(tmp_path, duck):
    items = [{"q": f"Who wrote book {n}?", "choice": "None of the above"} for n in range(11)]
    lines(
        tmp_path / "data.jsonl", [qa("None of the above", "Right."), qa("Who wrote book 3?", "I.")]
    )
    lines(tmp_path / "eval.jsonl", items)
    assert ids(run(tmp_path, [{"decontaminate": "eval.jsonl"}], duck), duck) == {1}
    lines(tmp_path / "eval.jsonl", [{"answer": "yes"}, {"answer": "42"}])
    with pytest.raises(DataError, match="has no text of 3 words and 10 characters or more"):
        run(tmp_path, [{"decontaminate": "eval.jsonl"}], duck)
