"""cookbook start of other trainers' configs: each key is accounted for, the training the same."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from launcher import yamlfile
from launcher.checks import samples
from launcher.cli import cookbook
from launcher.executors import choose
from launcher.recipes import recipe as recipes
from launcher.site import complete, load
from launcher.workflows import convert
from launcher.workflows.submit import context, plan
from tests.launcher.foreign import __main__ as foreign

COUNTS = yamlfile.load(foreign.COUNTS)
PEFT = "nemo_automodel.components._peft.lora.PeftConfig"
SQUAD = "nemo_automodel.components.datasets.llm.squad.make_squad_dataset"


@pytest.mark.parametrize("peer", convert.PEERS)
def test_each_key_of_ten_published_configs_is_accounted_for(peer):
    folder = foreign.FOLDER / peer.rstrip(":")
    files = sorted(folder.glob("*.yaml"))
    found = {f"{folder.name}/{file.name}": foreign.counted(file) for file in files}
    assert len(files) == 10
    assert found == {name: each for name, each in COUNTS.items() if name in found}
    assert not any(each["unknown"] for each in found.values())
    assert sum(not each["refused"] for each in found.values()) >= 4


def test_the_page_has_the_counts():
    text = foreign.PAGE.read_text(encoding="utf-8")
    assert foreign.page(text, COUNTS) == text, "python -m tests.launcher.foreign writes it"


def start(*arguments: str) -> Result:
    return CliRunner().invoke(cookbook, ["start", *arguments])


def written(folder: Path, content: Any, name: str = "config.yml") -> str:
    path = folder / name
    path.write_text(
        content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
    )
    return str(path)


AXOLOTL = {"base_model": "Qwen/Qwen3-8B", "datasets": [{"path": "a/b", "type": "alpaca"}]}


def test_a_config_becomes_a_recipe_beside_it(tmp_path):
    before = {"val_set_size": 0.1, "micro_batch_size": 2, "flash_attention": True}
    config = written(tmp_path, {**before, **AXOLOTL})
    done = start(config)
    assert done.exit_code == 0, done.output + repr(done.exception)
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert "taken micro_batch_size batch_size=2" in lines
    assert any(line.startswith("unused flash_attention the trainer chooses") for line in lines)
    assert "default max_grad_norm clip_grad_norm=1.0" in lines
    assert "5 keys: 4 taken, 1 unused\n" in done.output
    assert f"axolotl itself under the same launch: cookbook submit {config} " in done.output
    recipe = recipes.load(str(tmp_path / "config_recipe.yaml"), ())
    assert recipe.config["batch_size"] == 2 and recipe.method == "full"
    assert recipe.config["dataset"]["split"] == "train[:90%]"
    assert "config_recipe.yaml exists" in str(start(config).exception)


def test_model_and_data_take_the_place_of_the_configs(tmp_path):
    data = written(tmp_path, '{"question": "a", "answer": "b"}\n', "mine.jsonl")
    mixed = {**AXOLOTL, "datasets": [{"path": "a/b"}, {"path": "c/d"}], "val_set_size": 0.1}
    config = written(tmp_path, mixed)
    done = start(config, "org/other", "--data", data, "--json")
    assert done.exit_code == 0, done.output + repr(done.exception)
    found = json.loads(done.output)
    assert found["keys"]["datasets"]["note"] == "--data takes its place"
    block = recipes.load(found["recipe"], ()).config
    assert block["hub"]["model"] == "org/other" and block["hub"]["dataset"] is None
    assert block["dataset"]["data_files"] == data and block["dataset"]["split"] == "train[:90%]"


@pytest.mark.parametrize(
    ("content", "arguments", "fault"),
    [
        ("", (), "is empty"),
        ("- 1\n", (), "holds no 'key: value' lines"),
        ({"a": 1}, (), "is not known as a config"),
        (
            {**AXOLOTL, "model_name_or_path": "a", "stage": "sft"},
            (),
            "axolotl and of LLaMA-Factory",
        ),
        ({"entry": "sft"}, (), "is a recipe of this kit, which is taken as it is: cookbook submit"),
        ({"model": {"_component_": "a.b"}}, (), "is a torchtune config, which is taken as it is"),
        ({**AXOLOTL, "lora_rr": 1}, (), "lora_rr: unknown key (did you mean lora_r?)"),
        ({**AXOLOTL, "rl": "grpo"}, (), "rl: grpo is not converted: write a recipe of entry: grpo"),
        ({**AXOLOTL, "adapter": "llama-adapter"}, (), "no adapter llama-adapter here"),
        ({**AXOLOTL, "lora_r": 0, "adapter": "lora"}, (), "lora_rank must be"),
        ({"base_model": "a/b", "sequence_len": 512}, (), "names no data: give --data FILE"),
        (AXOLOTL, ("--leave-out", "nothing"), "has no such key"),
    ],
)
def test_what_is_no_config_or_cannot_be_taken_is_said(tmp_path, content, arguments, fault):
    done = start(written(tmp_path, content), *arguments)
    assert done.exit_code != 0 and fault in str(done.exception), done.output
    assert not list(tmp_path.glob("*_recipe.yaml"))


def test_all_faults_are_listed_and_a_key_can_be_left_out(tmp_path):
    config = written(tmp_path, {**AXOLOTL, "lisa_n_layers": 4, "relora": True})
    done = start(config)
    faults = str(done.exception).splitlines()
    assert [line.partition(":")[0] for line in faults[:2]] == ["lisa_n_layers", "relora"]
    assert f"axolotl itself: cookbook submit {config}" in faults[2]
    done = start(config, "--leave-out", "lisa_n_layers", "--leave-out", "relora")
    assert done.exit_code == 0 and "2 taken, 2 left out" in done.output


# The same training, one config of each ------------------------------------------------------------

ROWS = [
    {
        "question": f"What is {name}?",
        "context": "It is about Slurm.",
        "answer": f"{name} is a part.",
    }
    for name in ("a node", "a partition", "srun", "sbatch")
]


def _alpaca(row: dict[str, str]) -> str:
    asked = f"### Instruction:\n{row['question']}\n\n### Input:\n{row['context']}"
    return (
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n\n"
        f"{asked}\n\n### Response:\n"
    )


Texts = Callable[[Any, dict[str, str]], tuple[str, str]]


def _plain(prompt: Callable[[dict[str, str]], str]) -> Texts:
    """Prompt and answer between the tokenizer's first and last token."""
    return lambda made, row: (made.bos_token + prompt(row), row["answer"] + made.eos_token)


def _chat(prompt: Callable[[dict[str, str]], str]) -> Texts:
    """Prompt and answer by the model's chat template."""

    def texts(made: Any, row: dict[str, str]) -> tuple[str, str]:
        asked = [{"role": "user", "content": prompt(row)}]
        turns = [*asked, {"role": "assistant", "content": row["answer"]}]
        before = made.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        whole = made.apply_chat_template(turns, tokenize=False)
        return before, whole.removeprefix(before)

    return texts


def _cosine(step: int, warmup: int, total: int) -> float:
    share = (step - warmup) / (total - warmup)
    return step / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * share))


# Each: the config, the GPUs, samples per step, LoRA (rank, alpha, dropout), the rate at step 60 of
# 100, what is trained of a sample, and whether its prompt is trained.
CASES: dict[str, tuple[dict[str, Any], int, int, tuple[Any, ...], float, Texts, bool]] = {
    "axolotl": (
        {
            "base_model": "MODEL",
            "datasets": [{"path": "DATA", "type": "alpaca"}],
            "adapter": "lora",
            "lora_r": 8,
            "lora_alpha": 32,
            "lora_dropout": 0.05,
            "lora_target_linear": True,
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "learning_rate": 2e-4,
            "warmup_steps": 10,
        },
        2,
        16,
        (8, 32, 0.05),
        2e-4 * _cosine(60, 10, 100),
        _plain(_alpaca),
        False,
    ),
    "llamafactory": (
        {
            "model_name_or_path": "MODEL",
            "stage": "sft",
            "finetuning_type": "lora",
            "lora_rank": 4,
            "dataset": "mine",
            "dataset_dir": "FOLDER",
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 8,
            "learning_rate": 1e-4,
            "lr_scheduler_type": "cosine",
            "warmup_ratio": 0.1,
        },
        1,
        8,
        (4, 8, 0.0),
        1e-4 * _cosine(60, 10, 100),
        _chat(lambda row: f"{row['question']}\n{row['context']}"),
        False,
    ),
    "trl": (
        {
            "model_name_or_path": "MODEL",
            "dataset_name": "PAIRS",
            "use_peft": True,
            "lora_r": 16,
            "lora_alpha": 16,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "learning_rate": 5e-6,
            "beta": 0.05,
        },
        2,
        16,
        (16, 16, 0.05),
        5e-6 * 0.4,
        _chat(lambda row: row["question"]),
        False,
    ),
    "litgpt": (
        {
            "checkpoint_dir": "MODEL",
            "devices": 2,
            "precision": "32-true",
            "lora_r": 32,
            "lora_alpha": 16,
            "lora_dropout": 0.05,
            "lora_query": True,
            "lora_value": True,
            "data": {"class_path": "litgpt.data.JSON", "init_args": {"json_path": "DATA"}},
            "train": {"global_batch_size": 16, "micro_batch_size": 2, "lr_warmup_steps": 10},
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 2e-4}},
        },
        2,
        16,
        (32, 16, 0.05),
        2e-4 * _cosine(60, 10, 100),
        _plain(_alpaca),
        True,
    ),
    "automodel": (
        {
            "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
            "model": {"pretrained_model_name_or_path": "MODEL"},
            "peft": {"_target_": PEFT, "target_modules": "*_proj", "dim": 8, "alpha": 32},
            "step_scheduler": {"global_batch_size": 32, "local_batch_size": 4},
            "distributed": {"strategy": "fsdp2"},
            "dataset": {"_target_": SQUAD, "dataset_name": "SQUAD", "split": "train"},
            "optimizer": {"_target_": "torch.optim.Adam", "lr": 1e-5, "betas": [0.9, 0.999]},
            "lr_scheduler": {"lr_decay_style": "cosine", "min_lr": 1e-6, "lr_warmup_steps": 10},
        },
        2,
        32,
        (8, 32, None),
        1e-6 + 9e-6 * _cosine(60, 10, 100),
        _chat(lambda row: f"Context: {row['context']} Question: {row['question']} Answer: "),
        False,
    ),
}


def _lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def _prepared(folder: Path, model: Path) -> dict[str, str]:
    """What the names in a case stand for: the model, and the rows in each form."""
    alpaca = [
        {"instruction": row["question"], "input": row["context"], "output": row["answer"]}
        for row in ROWS
    ]
    pairs = [
        {"prompt": row["question"], "chosen": row["answer"], "rejected": "No."} for row in ROWS
    ]
    squad = [{**row, "answers": {"text": [row["answer"]], "answer_start": [0]}} for row in ROWS]
    data = _lines(folder / "alpaca.jsonl", alpaca)
    info = {"mine": {"file_name": "alpaca.jsonl"}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return {
        "MODEL": str(model),
        "FOLDER": str(folder),
        "DATA": data,
        "PAIRS": _lines(folder / "pairs.jsonl", pairs),
        "SQUAD": _lines(folder / "squad.jsonl", squad),
    }


@pytest.mark.long
@pytest.mark.parametrize("peer", CASES)
def test_the_training_is_the_same(peer, model, tmp_path, monkeypatch):
    import torch
    from transformers import AutoTokenizer

    from trainer import optimizers

    monkeypatch.setenv("COOKBOOK_ROOT", str(tmp_path / "shared"))
    config, gpus, per_step, lora, rate, texts, prompt_is_trained = CASES[peer]
    text = yaml.safe_dump(config)
    for name, value in _prepared(tmp_path, model).items():
        text = text.replace(f": {name}\n", f": {value}\n")
    file = written(tmp_path, text)
    done = start(file, "--gpus-per-node", str(gpus))
    assert done.exit_code == 0, done.output + repr(done.exception)
    recipe = recipes.load(str(tmp_path / "config_recipe.yaml"), ())
    made = recipe.config
    assert recipe.resources.world_size == gpus
    assert made["batch_size"] * made.get("gradient_accumulation_steps", 1) * gpus == per_step
    given = made["model"]
    assert (given["lora_rank"], given["lora_alpha"]) == lora[:2]
    assert lora[2] is None or given["lora_dropout"] == lora[2]

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=made["optimizer"]["lr"])
    schedule = optimizers.schedule(made["lr_scheduler"], optimizer, 100)
    optimizers.advance(schedule, 60)
    assert optimizers.learning_rate(optimizer) == pytest.approx(rate, rel=1e-6)

    site = load(None)
    checked = context(plan(complete(recipe, site, choose(True)), site), choose(True))
    findings, (dataset, *_) = samples.read(checked, 1)
    assert [each.line for each in findings if each.state == "failed"] == []
    tokenizer = AutoTokenizer.from_pretrained(model)
    pairs = [texts(tokenizer, row) for row in ROWS]
    if peer == "trl":
        pairs += [texts(tokenizer, {**row, "answer": "No."}) for row in ROWS]

    def count(words: str) -> int:
        return len(tokenizer(words, add_special_tokens=False)["input_ids"])

    assert dataset["tokens"] == sum(count(before + after) for before, after in pairs)
    trained = [before + after if prompt_is_trained else after for before, after in pairs]
    # Nothing predicts the first token of a sample.
    firsts = len(pairs) if prompt_is_trained else 0
    assert dataset["trained_tokens"] == sum(map(count, trained)) - firsts
