"""Odd model folders: the trainer takes each as transformers does, or names the file and a remedy.

Compared are the tokens of rendered conversations, the logits, and the loss of the answers.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)

from plugins.evaluate.model import Answerer
from plugins.evaluate.samples import Sample
from runspec.weights import content_sha256
from tests.trainer.models.folders import (
    CHATML,
    END,
    HEAD,
    MAP,
    NO_MAP,
    REFUSED,
    ROWS,
    SAME,
    SIZES,
    TEXT_END,
    UNTIED,
    WHOLE,
    Change,
    all_of,
    copied,
    decoder,
    edit,
    model_ids,
    tensors,
    text,
    without,
    write,
)
from trainer import check
from trainer.checkpoint import adapter
from trainer.checkpoint import export as exports
from trainer.config import instantiate, parse
from trainer.data import tokenised
from trainer.data.folder import read_tokenizer
from trainer.generate import answers
from trainer.inference import loading
from trainer.layers.batch import MicroBatch
from trainer.layers.loss import TokenLoss
from trainer.methods.sft import SupervisedFineTuning
from trainer.model import Inputs
from trainer.models import build as models

NODE, MACHINE = (
    {"role": "user", "content": "a node?"},
    {"role": "assistant", "content": "a machine"},
)
TURNS = [NODE, MACHINE, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c d"}]
CONVERSATIONS = [TURNS[:2], [{"role": "system", "content": "short"}, *TURNS]]


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return write(tmp_path_factory.mktemp("folders") / "base")


def content_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """A train.yaml."""
    return {
        "output_dir": str(folder.parent / "run"),
        "device": "cpu",
        "dtype": "fp32",
        "tokenizer": {
            "_component_": "trainer.data.tokenizers.hugging_face_tokenizer",
            "path": str(folder),
        },
        "checkpointer": {"checkpoint_dir": str(folder)},
        "dataset": {
            "_component_": "trainer.data.conversations.conversation_dataset",
            "source": "json",
            "data_files": "none.jsonl",
        },
        "batch_size": 1,
        "epochs": 1,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
    } | changes


@pytest.mark.parametrize("name", SAME)
def test_a_folder_means_what_transformers_makes_of_it(name, base, tmp_path, world):
    folder = copied(base, tmp_path / "model", SAME[name])
    content = content_of(folder)
    assert check.faults(content, SupervisedFineTuning) == []
    config = parse(content)
    tokenizer = instantiate("tokenizer", config.tokenizer)
    theirs = AutoTokenizer.from_pretrained(folder)
    model = models.build(config, world).module
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loss = TokenLoss(config)
    for turns in CONVERSATIONS:
        answers = [n for n, turn in enumerate(turns) if turn["role"] == "assistant"]
        tokens, mask = tokenizer.tokenize_turns(turns, answers)
        assert tokens == theirs.apply_chat_template(turns, tokenize=True, return_dict=False)
        row = torch.tensor([tokens])
        with torch.inference_mode():
            logits = reference(row).logits
            torch.testing.assert_close(model(Inputs(row)), logits, rtol=0, atol=1e-5)
        labels = torch.tensor([[-100 if m else t for t, m in zip(tokens, mask, strict=True)]])
        wanted = F.cross_entropy(logits[0, :-1], labels[0, 1:])
        assert loss_of(loss, model, row, labels) == pytest.approx(wanted.item(), abs=1e-5)


def loss_of(loss: Callable[..., torch.Tensor], model: Any, row: Any, labels: Any) -> float:
    """The mean over the trained tokens, as the trainer computes it."""
    shifted = torch.cat([labels[:, 1:], torch.full((1, 1), -100)], 1)
    trained = (shifted.flatten() != -100).nonzero().flatten()
    counts = row.numel(), len(trained)
    owners, one = torch.zeros_like(trained), torch.arange(1)
    batch = MicroBatch(Inputs(row), shifted, trained, *counts, (1,), owners, one, torch.zeros(1))
    with torch.no_grad():
        return loss(model, batch, torch.device("cpu")).item() / len(trained)


@pytest.mark.parametrize("name", REFUSED)
def test_what_transformers_makes_something_else_of_is_refused(name, base, tmp_path):
    change, told = REFUSED[name]
    folder = copied(base, tmp_path / "model", change)
    faults = check.faults(content_of(folder), SupervisedFineTuning)
    assert any(all(part in fault for part in told) for fault in faults), faults


# What a generation config may say beside what is asked for.
ODD: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 3},
    "penalties": {"repetition_penalty": 1.8, "encoder_repetition_penalty": 1.3},
    "no repetition": {"no_repeat_ngram_size": 2},
    "a minimum": {"min_new_tokens": 12, "min_length": 90},
    "beams": {"num_beams": 4, "length_penalty": 2.0},
    "a length": {"max_length": 30},
    "words": {"bad_words_ids": [[5]], "suppress_tokens": [7, 8], "forced_eos_token_id": 9},
    "another end": {"eos_token_id": [259, 5], "pad_token_id": 7},
}


@pytest.mark.parametrize("name", ODD)
def test_temperature_zero_takes_the_likeliest_token(name, base, tmp_path):
    folder = copied(base, tmp_path / "model", edit("generation_config", **ODD[name]))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoTokenizer.from_pretrained(folder)
    ends, expected = {258, *ODD[name].get("eos_token_id", ())}, {}
    for question in ("a node?", "b"):
        turns = [{"role": "user", "content": question}]
        tokens = theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        made = len(tokens)
        while len(tokens) < made + 16 and not (len(tokens) > made and tokens[-1] in ends):
            with torch.inference_mode():
                tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
        expected[question] = theirs.decode(tokens[made:], skip_special_tokens=True).strip()
    settings = {"seed": 0, "dtype": "fp32", "max_new_tokens": 16, "temperature": 0, "top_p": 1.0}
    answerer = Answerer(folder, settings | {"template": "chat"}, torch.device("cpu"))
    samples = [Sample(n, question, "", "") for n, question in enumerate(expected)]
    assert [row["answer"] for row in answerer.answers(samples, {})] == [*expected.values()]
    assert dict(answers(folder, [*expected], 16, torch.device("cpu"))) == expected


BASE = all_of(
    model_ids(eos_token_id=259),
    edit("tokenizer_config", eos_token=TEXT_END),
    text("chat_template.jinja", CHATML),
)
TEXTS = {
    "_component_": "torchtune.datasets.text_completion_dataset",
    "source": "text",
    "data_files": "none.txt",
}
CLOSED = CHATML.replace("'<|im_end|>\n'", "('<|im_end|>' if closed else '') + '\n'")
# By its name: the change, what the recipe says, and the exported model's and tokenizer's ends.
ENDS: dict[str, tuple[Change, dict[str, Any], int | list[int], str]] = {
    "a base model with a template": (BASE, {}, [258, 259], END),
    "a base model with the recipe's template": (
        all_of(BASE, without("chat_template.jinja")),
        {"chat_template": CHATML},
        [258, 259],
        END,
    ),
    "a base model with another folder's tokenizer": (
        all_of(BASE, without("chat_template.jinja")),
        {"path": BASE},
        [258, 259],
        END,
    ),
    "a base model without generation_config.json": (
        all_of(BASE, without("generation_config.json")),
        {},
        [258, 259],
        END,
    ),
    "a base model whose tokenizer has another file": (
        all_of(BASE, NO_MAP, edit("special_tokens_map", **MAP | {"eos_token": TEXT_END})),
        {},
        [258, 259],
        END,
    ),
    "a template that writes eos_token elsewhere": (
        all_of(BASE, text("chat_template.jinja", "{{ eos_token }}" + CHATML)),
        {},
        [258, 259],
        TEXT_END,
    ),
    "a template that ends answers by its arguments only": (
        all_of(BASE, text("chat_template.jinja", CLOSED)),
        {"chat_template_kwargs": {"closed": True}},
        [258, 259],
        END,
    ),
    "a token that the decoder changes": (
        all_of(BASE, decoder("Replace", pattern={"String": "_"}, content=" ")),
        {},
        [258, 259],
        END,
    ),
    "plain texts": (BASE, {"texts": True}, 259, TEXT_END),
    "an instruct model": (lambda folder: None, {}, 258, END),
    "an instruct model of two ends": (
        all_of(BASE, model_ids(eos_token_id=[259, 258])),
        {},
        [259, 258],
        TEXT_END,
    ),
    "a generation config that lacks the end": (
        all_of(BASE, edit("config", eos_token_id=[259, 258])),
        {},
        [258, 259],
        TEXT_END,
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_answer_ends_by_one_token_wherever_it_is_named(name, base, tmp_path, world):
    change, says, ends, last = ENDS[name]
    folder = copied(base, tmp_path / "model", change)
    content = content_of(folder, model={"lora_rank": 2, "lora_alpha": 2})
    content["tokenizer"] |= {key: says[key] for key in says if key.startswith("chat_template")}
    if "path" in says:
        content["tokenizer"]["path"] = str(copied(base, tmp_path / "own", says["path"]))
    content["dataset"] = TEXTS if says.get("texts") else content["dataset"]
    assert check.faults(content, SupervisedFineTuning) == []
    config = parse(content)
    tokenizer = instantiate("tokenizer", config.tokenizer)
    tokens, mask = tokenizer.tokenize_turns(TURNS, [1, 3])
    trained = [token for token, masked in zip(tokens, mask, strict=True) if not masked]
    assert trained.count(258) == 2 and trained[-1] == 258

    exported = exports.export(models.build(config, world), config, world)
    reference = AutoModelForCausalLM.from_pretrained(exported)
    assert reference.generation_config.eos_token_id == ends
    for place in (exported, exported / "adapter" if last != tokenizer_end(folder) else exported):
        theirs = AutoTokenizer.from_pretrained(place)
        assert theirs.eos_token == last
        assert tokens == theirs.apply_chat_template(
            TURNS, tokenize=True, return_dict=False, **says.get("chat_template_kwargs", {})
        )
    # vLLM reads it, for an adapter over its base.
    assert GenerationConfig.from_pretrained(exported / "adapter").eos_token_id == ends
    if not says.get("texts"):
        named = reference.config.eos_token_id
        assert 258 in (named if isinstance(named, list) else [named])
    assert loading.end_tokens(reference, theirs)[1] == 258
    # Before the training, too: a base model is compared with what was made of it.
    before = AutoModelForCausalLM.from_pretrained(folder)
    if not says.keys() & {"chat_template", "chat_template_kwargs", "path"}:
        assert 258 in loading.end_tokens(before, AutoTokenizer.from_pretrained(folder))[0]


def tokenizer_end(folder: Path) -> str:
    return AutoTokenizer.from_pretrained(folder).eos_token


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_an_adapters_own_tokenizer_is_of_the_class_that_its_base_says(kind, base, tmp_path):
    """transformers takes it from model_type where tokenizer_config.json names none."""
    change = all_of(edit("tokenizer_config", tokenizer_class=None), edit("config", model_type=kind))
    whole = copied(base, tmp_path / "base", change)
    own = all_of(without("config.json", "generation_config.json", WHOLE))
    place = all_of(own, edit("adapter_config", base_model_name_or_path=str(whole)))
    adapted = read_tokenizer(copied(whole, tmp_path / "adapter", place))
    expected, asked = AutoTokenizer.from_pretrained(whole), "One row\nof 12.\n<|im_end|>"
    assert type(adapted) is type(expected)
    assert adapted(asked)["input_ids"] == expected(asked)["input_ids"]


def test_further_chat_templates_are_exported_and_hashed(base, tmp_path, world):
    file = "additional_chat_templates/tool_use.jinja"
    folder = copied(base, tmp_path / "model", lambda made: (made / file).parent.mkdir())
    (folder / file).write_text(CHATML)
    content = content_of(folder, model={"lora_rank": 2, "lora_alpha": 2})
    # The name of a tokenised dataset is a hash of them, too.
    assert folder / file in tokenised.tokenizer_files(content["tokenizer"])
    weights_before = content_sha256(folder)
    (folder / file).write_text("tools: " + CHATML)
    assert content_sha256(folder) != weights_before
    for template, names in ((None, {"default", "tool_use"}), (CHATML, None)):
        content["tokenizer"]["chat_template"] = template
        config = parse(content)
        exported = exports.export(models.build(config, world), config, world)
        found = AutoTokenizer.from_pretrained(exported).chat_template
        assert (set(found) if names else found) == (names or CHATML)
    assert AutoTokenizer.from_pretrained(exported / "adapter").chat_template == CHATML


# What PEFT's adapter is over, the model's change, and what a refusal says ("" for none).
OVER = {
    "the output head": (["q_proj", "lm_head"], {}, UNTIED, ""),
    "the embedding": (["q_proj", "embed_tokens"], {}, UNTIED, "no layer embed_tokens; has .*lm_h"),
    "the head of another model": (
        ["q_proj", "lm_head"],
        {},
        tensors(lambda held: held.update({HEAD: held[HEAD] * 2})),
        "contains other weights of lm_head.base_layer.weight than .*; merge it into its base",
    ),
    "some layers": (
        ["q_proj"],
        {"layers_to_transform": [1]},
        UNTIED,
        r"layers_to_transform=\[1\], and the model an adapter in every layer; merge it into",
    ),
    "all layers by number": (["q_proj"], {"layers_to_transform": [0, 1]}, UNTIED, ""),
}


@pytest.mark.parametrize("name", OVER)
def test_an_adapter_that_peft_wrote_is_gone_on_with(name, base, tmp_path, world):
    modules, more, change, told = OVER[name]
    torch.manual_seed(0)
    theirs = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=2, lora_alpha=4, target_modules=modules, init_lora_weights=False, **more),
    )
    theirs.save_pretrained(tmp_path / "adapter")
    folder = copied(base, tmp_path / "model", change)
    lora = {"lora_rank": 2, "lora_alpha": 4, "lora_modules": modules}
    paths = {"checkpoint_dir": str(folder), "adapter_checkpoint": str(tmp_path / "adapter")}
    content = content_of(folder, model=lora, checkpointer=paths)
    faults = "\n".join(check.faults(content, SupervisedFineTuning))
    assert re.search(told, faults) if told else faults == ""
    if told:
        return
    config = parse(content)
    model = models.build(config, world)
    adapter.load(model, config)
    row = torch.arange(40).view(1, -1) * 7 % ROWS
    with torch.inference_mode():
        torch.testing.assert_close(
            model.module(Inputs(row)), theirs.eval()(row).logits, rtol=0, atol=1e-5
        )


IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}
LARGER: dict[str, dict[str, Any]] = {
    "mistral3": {"vision_config": {"model_type": "pixtral", "head_dim": 8, **IMAGES}},
    "smolvlm": {"vision_config": IMAGES, "scale_factor": 2},
}


@pytest.mark.parametrize("kind", LARGER)
def test_the_text_part_of_a_larger_model_is_trained_exported_and_asked(kind, base, tmp_path, world):
    ids = {"bos_token_id": 256, "eos_token_id": 258, "pad_token_id": None}
    part = {"model_type": "llama", **SIZES, **ids}
    config = AutoConfig.for_model(kind, text_config=part, tie_word_embeddings=False, **LARGER[kind])
    torch.manual_seed(1)
    folder = copied(base, tmp_path / "model", without(WHOLE, "config.json"))
    reference = AutoModelForImageTextToText.from_config(config)
    reference.save_pretrained(folder)
    content = content_of(folder)
    assert check.faults(content, SupervisedFineTuning) == []
    settings = parse(content)
    exported = exports.export(models.build(settings, world), settings, world)
    asked = {"seed": 0, "dtype": "fp32", "max_new_tokens": 8, "temperature": 0, "top_p": 1.0}
    answerer = Answerer(exported, asked | {"template": "chat"}, torch.device("cpu"))
    assert answerer.limit == SIZES["max_position_embeddings"]
    (row,) = answerer.answers([Sample(0, "a node?", "", "")], {})
    tokens = answerer.tokenizer.apply_chat_template(
        TURNS[:1], add_generation_prompt=True, return_dict=False
    )
    made = len(tokens)
    with torch.inference_mode():
        while len(tokens) < made + 8 and 258 not in tokens[made:]:
            tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
    expected = answerer.tokenizer.decode(tokens[made:], skip_special_tokens=True).strip()
    assert row["answer"] == expected
    assert dict(answers(exported, ["a node?"], 8, torch.device("cpu"))) == {"a node?": expected}
