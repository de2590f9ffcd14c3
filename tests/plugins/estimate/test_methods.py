"""Memory and FLOPs of each method by the closed form, against a trace of its step."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.errors import RecipeFault
from launcher.recipe import entries
from launcher.recipe import load as recipes
from plugins.estimate.launcher.memory import StepMemory, state_bytes
from plugins.estimate.launcher.recipe_step import step_of
from plugins.estimate.trace import trace
from runspec.keys.distill import DistillConfig
from runspec.keys.preference import DpoConfig
from runspec.keys.reward import RewardConfig
from runspec.keys.train import TrainConfig
from runspec.tokens import grown
from tests.trainer.layers.test_adapter_kinds import KINDS
from tests.trainer.methods.pairs import pairs_config
from tests.trainer.methods.toy_objective import ToyConfig
from tests.trainer.models import test_new_tokens
from tests.trainer.models.test_new_tokens import folders, tagged
from tests.trainer.runs import lora_model, write_config
from trainer import check
from trainer.config import load, parse, read_yaml
from trainer.methods.sft import SupervisedFineTuning
from trainer.models import build
from trainer.parallel import world as distributed

__all__ = ["folders", "tagged"]

LONG = pytest.mark.long
LORA = lora_model(lora_dropout=0.0)
TP = {"tensor_parallel_dim": 2}
WIDE = {"hidden_size": 512, "intermediate_size": 1536, "head_dim": 128}
LARGE = {"dtype": "bf16", "row_length": 2048, "batch_size": 2}
TOY = "tests.trainer.methods.toy_objective"
PAIRS = "trainer.data.preferences.PreferenceDataset"
METHODS: dict[str, type[TrainConfig]] = {
    "dpo": DpoConfig,
    "toy_objective": ToyConfig,
}


@pytest.fixture
def world() -> Iterator[distributed.World]:
    """For one test: a trace of another one starts a world of its own."""
    yield distributed.start("cpu")
    distributed.stop()


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method of somebody else is an entry, too."""
    monkeypatch.setenv("COOKBOOK_COMPONENTS", TOY)
    module = f"trainer.train {TOY}:{ToyConfig.__name__}"
    monkeypatch.setitem(entries.rows(), "toy_objective", entries.method(module, ToyConfig))


def resized(model_folder: Path, folder: Path, **sizes: int) -> Path:
    """A copy of a model's folder with other sizes, which are wide enough for estimates.

    It has no weights.
    """
    shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"max_position_embeddings": 2048, **sizes}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def wide_content(folder: Path, model_folder: Path, dataset: Path, **more: Any) -> dict[str, Any]:
    """A config in bf16 of a student and a larger teacher."""
    student = resized(model_folder, folder / "student", **WIDE)
    content: dict[str, Any] = read_yaml(write_config(folder, student, dataset, **LARGE | more))
    # In blocks of NF4.
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 4}
    sizes |= {"head_dim": 64, "vocab_size": 1024}
    return content | {"teacher": str(resized(model_folder, folder / "wide", **sizes))}


@pytest.mark.long
@pytest.mark.parametrize(
    ("entry", "changes", "held"),
    [
        ("dpo", {"model": LORA}, 0),
        ("dpo", {}, 1),
        ("toy_objective", {"activation_checkpointing": "full"}, 1),
    ],
    ids=["adapter_off", "model", "toy-model"],
)
@pytest.mark.usefixtures("toy")
def test_a_reference_is_counted(entry, changes, held, tmp_path, model_folder, dataset):
    component = PAIRS if entry == "dpo" else f"{TOY}.Pairs"
    folder = resized(model_folder, tmp_path / "policy", **WIDE)
    content = read_yaml(pairs_config(tmp_path, folder, dataset, component, **LARGE | changes))
    step, plain = (step_of(content | {"entry": name}, 1, 2) for name in (entry, "sft"))
    found, alone = StepMemory(step), StepMemory(plain)
    assert found.peak == pytest.approx(trace(parse(content, METHODS[entry]), 2).peak, rel=0.1)
    assert found.peak <= (2 if held else 1.25) * alone.peak
    weights = held * alone.terms["weights"]
    assert found.terms.get("frozen models", 0.0) == pytest.approx(weights, rel=0.1)
    assert 1.25 < step.flops.model / plain.flops.model < 1.55


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(TP | {"beta": 0.5, "temperature": 2.0}, marks=LONG),
        pytest.param({"model": LORA, "teacher_quantize_base": True, "beta": 1.0}, marks=LONG),
    ],
    ids=["tensor", "nf4-fsdp"],
)
def test_a_teacher_is_counted(changes, tmp_path, model_folder, dataset):
    content = wide_content(tmp_path, model_folder, dataset, **changes)
    step = step_of(content | {"entry": "distill"}, 1, 2)
    found = StepMemory(step)
    traced = trace(parse(content, DistillConfig), 2)
    assert found.peak == pytest.approx(traced.peak, rel=0.1)
    assert found.terms["frozen models"] > 0
    ratio = step.flops.model / step_of(content | {"entry": "sft"}, 1, 2).flops.model
    assert ratio > 1.2


@pytest.mark.parametrize(
    "changes",
    [pytest.param({"model": lora_model()}, marks=LONG), TP],
    ids=["lora", "full-tensor"],
)
def test_a_reward_model_has_no_logits(changes):
    content = {
        "output_dir": "run",
        "dtype": "bf16",
        "model": {},
        "tokenizer": {"_component_": "trainer.none", "max_seq_len": 4096},
        "checkpointer": {"checkpoint_dir": "Qwen3-8B"},
        "dataset": {"_component_": "trainer.none", "packed": True},
        "batch_size": 2,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4, "foreach": False},
        "clip_grad_norm": 1.0,
        "activation_checkpointing": "full",
    } | changes
    step = step_of(content | {"entry": "reward"}, 1, 8)
    step = replace(step, shape=step.shape.cut(3))
    traced, found = trace(parse(content, RewardConfig), 8, 3), StepMemory(step)
    assert found.peak == pytest.approx(traced.peak, rel=0.1), (found.phases, traced.phases)
    assert found.terms["weights"] == pytest.approx(traced.weights, rel=1e-3)


HEAD = {"lora_rank": 4, "lora_modules": ["q_proj", "lm_head"]}
SAVED = {"lora_rank": 4, "modules_to_save": ["embed_tokens", "lm_head"]}


def assert_states(path: Path) -> int:
    """What the optimizer keeps, as the same step on fake tensors of two ranks keeps it."""
    step = step_of(yaml.safe_load(path.read_text()) | {"entry": "sft"}, 1, 2)
    kept = trace(load(path), 2).optimizer
    assert step.trainable * state_bytes(step) / 2 == pytest.approx(kept, rel=0.02)
    return step.shape.vocab


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"model": SAVED},
        {"freeze": ["model.layers.*.mlp.*", "lm_head.*"]},
        {"model": HEAD},
    ],
    ids=["saved", "frozen", "head"],
)
def test_the_estimate_knows_what_the_optimizer_keeps(changes, model_folder, dataset, tmp_path):
    changes = {"model": None, "row_length": 64, **changes}
    assert_states(write_config(tmp_path, model_folder, dataset, **changes))


@pytest.mark.long
@pytest.mark.parametrize("name", [test_new_tokens.UNTIED, test_new_tokens.TIED])
def test_the_estimate_counts_the_rows_of_new_tokens(name, folders, tagged, tmp_path):
    model = test_new_tokens.saved(name)
    path = test_new_tokens.config_of(tmp_path / "run", folders[name], tagged, model=model)
    assert assert_states(path) == grown(1024, 1024 + len(test_new_tokens.NEW))


@pytest.mark.parametrize("kind", [*KINDS, "lora"])
def test_the_estimate_counts_what_the_trainer_trains(kind, tmp_path, model_folder, dataset, world):
    model = KINDS.get(kind, {"lora_rank": 4})
    given = {"model": model, "save_adapter_weights_only": True}
    path = write_config(tmp_path, model_folder, dataset, row_length=64, **given)
    trained, _ = build.build(load(path), world).parameter_counts()
    content = yaml.safe_load(path.read_text()) | {"entry": "sft", "dtype": "bf16"}
    assert step_of(content, 1, 2).trainable == trained
    if kind in ("prompt", "prefix"):
        # A document may fill a row, and stands behind the virtual tokens.
        length = content["tokenizer"]["max_seq_len"] = 512 - 3
        reason = rf"{length} behind 7 virtual tokens \(model.num_virtual_tokens\) is more than"
        with pytest.raises(RecipeFault, match=reason):
            step_of(content, 1, 2)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama8b_qlora", ["enable_fp8_training=true"]),
        ("llama8b_lora", ["tensor_parallel_dim=8", "enable_fp8_training=true", "dtype=fp32"]),
        ("llama8b_full", ["optimizer._component_=torch.optim.Adafactor"]),
        ("llama8b_full", ["tokenizer.max_seq_len=262144"]),
        ("qwen0_5b_full", ["tensor_parallel_dim=4"]),
        ("smollm3_3b_full", ["expert_parallel_dim=2"]),
        pytest.param("llama4_scout_lora", ["tokenizer.max_seq_len=16384"], marks=LONG),
        pytest.param("qwen3_30b_a3b_lora", ["expert_parallel_dim=24"], marks=LONG),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value)[:40],
)
def test_the_estimate_refuses_what_check_refuses(name, changes, tmp_path):
    config = recipes.load(name, changes).train_config(tmp_path, str(tmp_path / "run"))
    config["optimizer"] = {"_component_": config["optimizer"]["_component_"], "lr": 1e-5}
    ranks = max(8, config.get("expert_parallel_dim", 1))
    shard = ranks // config.get("tensor_parallel_dim", 1)
    config |= {"data_parallel_replicate_dim": 1, "data_parallel_shard_dim": shard}
    with pytest.raises(RecipeFault) as refused:
        step_of(config, 1, ranks)
    assert check.faults(config, SupervisedFineTuning) == refused.value.faults
