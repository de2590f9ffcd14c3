"""Preferences as samples, what is wrong with them, and their losses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from runspec.keys.preference import DpoConfig, KtoConfig
from tests.trainer.methods.test_preference import LORA, PAIRS, UNPAIRED, config
from trainer.check import faults
from trainer.config import parse, read_yaml
from trainer.data.form import SINGLE, SampleForm
from trainer.data.preview import previews
from trainer.data.source import Source, sample
from trainer.data.tokenizers import hugging_face_tokenizer
from trainer.errors import ConfigError
from trainer.methods import preference_losses as losses
from trainer.methods.dpo import PreferenceTuning
from trainer.methods.kto import UnpairedPreferenceTuning

INF, NAN = float("inf"), float("nan")
USER, TOOL = {"role": "user", "content": "Q?"}, {"role": "tool", "content": "4"}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def shown(
    tmp_path: Path, model_folder: Path, rows: list[dict[str, Any]], **changes: Any
) -> tuple[list[list[str]], list[str], list[str]]:
    """Prompt and trained text of each document, the faults, and the notes."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    component = changes.pop("component", PAIRS)
    kto = component == UNPAIRED
    block = changes.pop("dataset", {})
    standard = {"dataset_val": None, "run_val_every_n_steps": None, "row_length": 256}
    content = read_yaml(config(tmp_path, model_folder, path, component, **standard | changes))
    content["dataset"] |= {"split": "train", **block}
    method = KtoConfig if kto else DpoConfig
    form = (UnpairedPreferenceTuning if kto else PreferenceTuning).form
    found, wrong = previews(parse(content, method), 9, form)
    texts = [
        [span["text"].replace("<|endoftext|>", "") for span in each["spans"]]
        for one in found
        for each in one["shown"]
    ]
    return texts, wrong, [note for one in found for note in one["notes"]]


ASKED = "<|user|>Q?<|end|><|assistant|>"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Q?", "chosen": "A.", "rejected": "B."},
        {"prompt": [USER], "chosen": [answer("A.")], "rejected": [answer("B.")]},
        {"prompt": [USER], "chosen": answer("A."), "rejected": answer("B.")},
        {"chosen": [USER, answer("A.")], "rejected": [USER, answer("B.")]},
        {"prompt": "other", "chosen": [USER, answer("A.")], "rejected": [USER, answer("B.")]},
    ],
    ids=["texts", "messages", "message", "whole", "whole with prompt"],
)
def test_every_form_gives_the_same_pair(row, tmp_path, model_folder):
    texts, wrong, _ = shown(tmp_path, model_folder, [row])
    assert wrong == [] and texts == [[ASKED, "A.<|end|>"], [ASKED, "B.<|end|>"]]


def test_texts_share_their_prompt(tmp_path, model_folder):
    row = {"chosen": "Human: hi Assistant: Good day", "rejected": "Human: hi Assistant: Go"}
    texts, wrong, _ = shown(tmp_path, model_folder, [row])
    asked = "Human: hi Assistant: "
    assert wrong == [] and texts == [[asked, "Good day<|end|>"], [asked, "Go<|end|>"]]


def test_answers_of_several_turns_begin_where_they_differ(tmp_path, model_folder):
    start = [USER, answer("Same."), USER]
    row = {
        "chosen": [*start, answer("A."), USER, answer("More.")],
        "rejected": [*start, answer("B.")],
    }
    texts, wrong, _ = shown(tmp_path, model_folder, [row])
    before = f"{ASKED}Same.<|end|>{ASKED}"
    assert wrong == []
    assert texts == [[before, "A.<|end|>", ASKED, "More.<|end|>"], [before, "B.<|end|>"]]


def test_labelled_answers_come_with_another_records_answer(tmp_path, model_folder):
    rows = [
        {"prompt": "Q?", "completion": "A.", "label": True},
        {"prompt": "R?", "completion": "B.", "label": False},
    ]
    texts, wrong, _ = shown(tmp_path, model_folder, rows, component=UNPAIRED)
    other = ASKED.replace("Q?", "R?")
    assert wrong == []
    assert [text for _, text in texts] == ["A.<|end|>", "B.<|end|>", "B.<|end|>", "A.<|end|>"]
    assert [text for text, _ in texts] == [ASKED, ASKED, other, other]
    texts, wrong, _ = shown(
        tmp_path,
        model_folder,
        [{"prompt": p, "chosen": f"{p}+", "rejected": f"{p}-"} for p in ("Q?", "R?")],
        component=UNPAIRED,
    )
    assert wrong == []
    answers = ["Q?+", "R?+", "Q?-", "R?-", "R?+", "Q?+", "R?-", "Q?-"]
    assert [text for _, text in texts] == [f"{text}<|end|>" for text in answers]


def test_the_other_answer_is_to_another_prompt(tmp_path, model_folder):
    """Answers to a prompt stand beside each other; as texts, whole conversations, and pairs."""
    asked = "QQQRRS"
    rows = [{"prompt": p, "completion": f"{p}{n}", "label": True} for n, p in enumerate(asked)]
    others = ["S5", "S5", "S5", "Q2", "Q2", "R4"]
    whole = [
        row
        | {"completion": [{"role": "user", "content": row["prompt"]}, answer(row["completion"])]}
        for row in rows
    ]
    for given in (rows, whole):
        texts, wrong, _ = shown(tmp_path, model_folder, given, component=UNPAIRED)
        assert wrong == [] and [text for _, text in texts[1::2]] == [f"{o}<|end|>" for o in others]
        assert [text for text, _ in texts[1::2]] == [
            f"<|user|>{q}<|end|><|assistant|>" for q in asked
        ]
    pairs = [
        {"prompt": p, "chosen": f"{p}{n}", "rejected": f"{p}{n} not"} for n, p in enumerate(asked)
    ]
    texts, wrong, _ = shown(tmp_path, model_folder, pairs, component=UNPAIRED)
    assert [text for _, text in texts[1::4]] == [f"{other}<|end|>" for other in others[:5]]
    assert [text for _, text in texts[3::4]] == [f"{other} not<|end|>" for other in others[:4]]
    _, wrong, _ = shown(tmp_path, model_folder, rows[:3], component=UNPAIRED)
    assert len(wrong) == 3 and "line 1: there is no other record to use" in wrong[0]


INSTRUCT = "torchtune.datasets.instruct_dataset"
CONVERSATIONS = "trainer.data.conversations.conversation_dataset"
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": NaN}'}}


@pytest.mark.parametrize(
    ("component", "row", "more", "words"),
    [
        (PAIRS, {"prompt": "Q?", "chosen": "A.", "rejected": "B.", "margin": -INF}, {}, "'margin'"),
        (UNPAIRED, {"prompt": "Q?", "completion": "A.", "label": NAN}, {}, "'label' contains nan"),
        (
            CONVERSATIONS,
            {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]},
            {},
            "arguments that are no JSON: NaN",
        ),
        ("trainer.data.prompts.prompt_dataset", {"prompt": "Q?", "answer": INF}, {}, "'answer'"),
        (
            INSTRUCT,
            {"q": "Q?", "n": NAN, "unused": NAN},
            {"prompt": "{q}", "answer": "{n:.1f}"},
            "'n' contains nan",
        ),
    ],
)
@pytest.mark.parametrize("split", ["train", "train[:100%]"])
def test_a_number_that_is_not_finite_is_named_by_its_line(
    component, row, more, words, split, tmp_path, model_folder
):
    path = tmp_path / "rows.jsonl"
    good = json.loads(json.dumps(row).replace("NaN", "2.0").replace("-Infinity", "0.5"))
    good = json.loads(json.dumps(good).replace("Infinity", "0.5"))
    path.write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n")
    block = {"_component_": component, "source": "json", "data_files": str(path), "split": split}
    form = {PAIRS: PreferenceTuning.form, UNPAIRED: UnpairedPreferenceTuning.form}.get(component)
    tokenizer = hugging_face_tokenizer(str(model_folder))
    samples = Source("dataset", block | more, tokenizer, form or SINGLE)
    with pytest.raises(ConfigError, match=re.escape(words)) as told:
        samples.pieces(1)
    assert f"dataset: {path}, line 2: " in str(told.value)


def test_a_samples_number_must_be_finite():
    """Also that of somebody else's component."""
    made = {"tokens": [1], "labels": [1], "margin": INF}
    with pytest.raises(ConfigError, match="its margin is inf; it must be a finite number"):
        sample([made], 0, None, SampleForm(number="margin"))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"prompt": "Q?", "chosen": "A.", "rejected": "A."},
            "rejected answer are the same",
        ),
        ({"prompt": "Q?", "chosen": " ", "rejected": "A."}, "the chosen answer is empty"),
        ({"prompt": "Q?", "chosen": "A.", "rejected": None}, "there is no 'rejected'"),
        ({"prompt": "Q?", "worse": "B."}, "there is no 'chosen' and no 'rejected'"),
        (
            {"prompt": [USER], "chosen": [TOOL], "rejected": [answer("A.")]},
            "chosen answer is empty",
        ),
    ],
)
def test_a_wrong_record_is_named_by_its_line(row, words, tmp_path, model_folder):
    rows = [row]
    texts, (wrong,), _ = shown(tmp_path, model_folder, rows)
    assert texts == [] and f"{tmp_path}/rows.jsonl, line 1: " in wrong and words in wrong
    assert "dataset.drop_invalid=True" in wrong
    good = {"prompt": "Q?", "chosen": "A.", "rejected": "B."}
    if row.keys() == good.keys() and not isinstance(row["prompt"], list):
        options = {"drop_invalid": True}
        texts, wrong, notes = shown(tmp_path, model_folder, [good, row], dataset=options)
        assert wrong == [] and len(texts) == 2
        assert any(words in note and "1 of 2" in note and "line 2" in note for note in notes)


def test_other_columns_are_named_and_labels_are_checked(tmp_path, model_folder):
    row = {"prompt": "Q?", "better": "A.", "worse": "B."}
    names = {"column_map": {"chosen": "better", "rejected": "worse"}}
    texts, wrong, _ = shown(tmp_path, model_folder, [row], dataset=names)
    assert wrong == [] and texts[1] == [ASKED, "B.<|end|>"]
    _, (wrong,), _ = shown(tmp_path, model_folder, [row], dataset={"column_map": {"best": "a"}})
    assert "column_map: unknown best; known: prompt, chosen, rejected" in wrong
    rows: list[dict[str, Any]] = [{"prompt": "Q?", "completion": "A.", "label": 3}]
    rows += [{"prompt": f"{a}?", "completion": f"{a}.", "label": True} for a in "BC"]
    # Only the wrong record is named, not the next one, which takes an older record's answer.
    texts, (wrong,), _ = shown(tmp_path, model_folder, rows, component=UNPAIRED)
    assert "line 1: the label is 3; it must be true or false" in wrong
    assert [text for _, text in texts] == [f"{each}.<|end|>" for each in ("B", "C", "C", "B")]


def test_a_prompt_that_fills_the_row_is_counted_and_left_out(tmp_path, model_folder):
    rows = [
        {"prompt": "Q?", "chosen": "A.", "rejected": "B."},
        {"prompt": "word " * 300, "chosen": "A.", "rejected": "B."},
        {"prompt": "Q?", "chosen": "long " * 300, "rejected": "B."},
    ]
    texts, wrong, notes = shown(tmp_path, model_folder, rows)
    assert wrong == [] and len(texts) == 4
    assert "no room for an answer in 256 tokens together in 1 of 3" in notes[0]
    assert "line 2" in notes[0]
    # The long answer has what the short one leaves of the row.
    assert texts[2][1].count("long") > 100 and texts[3] == [ASKED, "B.<|end|>"]
    texts, (fault,), notes = shown(tmp_path, model_folder, rows[1:2])
    assert texts == notes == [] and "no sample can be trained: the prompt leaves no room" in fault


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"label_smoothing": 0.5}, "label_smoothing: must be below 0.5"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "loss=ipo does not use it"),
        (
            {"loss": "simpo", "length_normalized": True},
            "length_normalized: loss=simpo does not use it",
        ),
        ({"loss": "orpo", "sft_weight": 0.1}, "sft_weight: loss=orpo does not use it"),
        ({"component": UNPAIRED, "batch_size": 1}, "batch_size: KTO compares with the other"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(changes, words, tmp_path, model_folder):
    component = changes.pop("component", PAIRS)
    content = read_yaml(config(tmp_path, model_folder, tmp_path / "a", component, **changes))
    method = UnpairedPreferenceTuning if component == UNPAIRED else PreferenceTuning
    (found,) = faults(content, method)
    assert words in found


def test_the_cheapest_reference_is_chosen():
    def kind(**content: Any) -> str:
        return DpoConfig.reference_of(content)

    assert kind(model=LORA) == "adapter_off" and kind(model={}) == "model"
    start = {"adapter_checkpoint": "a"}
    assert kind(model=LORA, checkpointer=start) == "model"
    assert kind(loss="simpo") == kind(loss="orpo") == ""


def test_losses_and_gradients_are_torchtunes():
    """What torchtune 0.6.1's DPOLoss(0.3, label_smoothing=0.1) gives for these numbers."""
    torch.manual_seed(0)
    sums = torch.randn(6, 2, requires_grad=True)
    before = torch.randn(6, 2)
    wanted = [0.3918494, 0.90644932, 0.56030023, 0.83175641, 0.60738242, 0.81636739]
    own = losses.dpo(sums - before, 0.3, 0.1)
    assert own.tolist() == pytest.approx(wanted, rel=1e-6)
    (slope,) = torch.autograd.grad(own.sum(), sums)
    chosen = [-0.042833291, -0.15433094, -0.092123874, -0.14347091, -0.1027473, -0.14109106]
    wanted_slope = torch.tensor([chosen, [-each for each in chosen]]).T
    assert slope.allclose(wanted_slope, atol=1e-7)


def test_odds_are_finite_for_certain_answers():
    sums = torch.tensor([[0.0, -2000.0], [-1e-7, -0.1]], requires_grad=True)
    answers = losses.Answers(sums, torch.zeros(2, 2), torch.ones(2, 2))
    loss = losses.orpo(answers, 0.1)
    loss.sum().backward()
    assert loss.isfinite().all() and sums.grad is not None and sums.grad.isfinite().all()
