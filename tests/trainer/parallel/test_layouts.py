"""The same training in every layout of ranks and of memory is the same training."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.runs import LINEAR, Runs, lora_model, metrics, train, write_config

# fp32 on the CPU: only the order of summation differs. Adam divides by the root of tiny second
# moments in its first steps, which enlarges that difference in single weights.
LOSS_TOLERANCE = 2e-5
WEIGHT_TOLERANCE = 5e-4
ADAMW = {"_component_": "torch.optim.AdamW", "lr": 3e-3}
FUSED = {"optimizer": ADAMW | {"fused": True}}
SLOW = {"max_steps": 16, "optimizer": ADAMW | {"lr": 1e-5}}
PLAN = {"tensor_parallel_plan": {"_component_": "torchtune.models.llama3.base_llama_tp_plan"}}
TRACED = {
    "profiler": {"enabled": True, "wait_steps": 1, "warmup_steps": 1, "active_steps": 1},
}
TP, COPIES = {"tensor_parallel_dim": 2}, {"data_parallel_replicate_dim": 2}
TWICE, MASTERS = {"gradient_accumulation_steps": 2}, {"master_weights": "fp32"}
OFFLOAD, BF16 = {"fsdp_cpu_offload": True}, {"dtype": "bf16"}
RECOMPUTED = {"activation_checkpointing": "full"}
BY_OPERATION = {"activation_checkpointing": "op"}
EVERY_SECOND = {"activation_checkpointing": 2}
INPUTS_ON_CPU = RECOMPUTED | {"enable_activation_offloading": True}
BASES: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"model": lora_model()},
    "lora-output": {"model": lora_model(lora_modules=[*LINEAR, "lm_head"])},
    "tied": {"loss": {"_component_": "torch.nn.CrossEntropyLoss", "label_smoothing": 0.1}},
    "slow": SLOW,
}
# What equals its base: ranks, and changes of its config.
SAME: dict[str, tuple[int, dict[str, Any]]] = {
    "full-fsdp2": (2, {"gradient_accumulation_steps": 4}),
    # In the sixth step half of the ranks have nothing to train on.
    "full-fsdp4": (4, {}),
    "lora-fsdp2": (2, {}),
    "full-every-second": (1, EVERY_SECOND),
    "lora-by-operation": (1, BY_OPERATION),
    "full-tp2": (2, TP | FUSED),
    "full-tp2-offload": (2, TP | {"fsdp_cpu_offload": True} | BY_OPERATION),
    "full-tp2-fsdp2": (4, TP | FUSED | PLAN),
    "lora-tp2-masters": (2, TP | MASTERS),
    "lora-output-tp2-fsdp2": (4, TP | TWICE | RECOMPUTED),
    "tied-tp2-fsdp2": (4, TP),
    "full-prefetch": (2, TWICE | INPUTS_ON_CPU | {"fsdp_prefetch": 8}),
    "full-fsdp2-offload": (2, TWICE | OFFLOAD | MASTERS),
    "full-copies": (4, COPIES | TWICE | TRACED | {"fsdp_reshard_after_forward": False}),
    "full-copies-synced": (
        4,
        COPIES | TWICE | TRACED | OFFLOAD | {"sync_each_micro_batch": True},
    ),
    "lora-copies-tp2-offload": (4, COPIES | TP | OFFLOAD | INPUTS_ON_CPU),
    "lora-four-copies": (4, {"data_parallel_replicate_dim": 4} | EVERY_SECOND),
}
QUICK = ("full-fsdp2", "full-fsdp4", "lora-fsdp2")
OTHERS: dict[str, tuple[int, dict[str, Any]]] = {
    "full-unchanged": (
        4,
        RECOMPUTED | {"max_steps": 1, "optimizer": ADAMW | {"lr": 0.0, "fused": True}},
    ),
    "full-reduced": (2, {"fsdp_reduce_dtype": "bf16"}),
    "lora-bf16": (2, BF16 | RECOMPUTED),
    "slow-bf16": (1, BF16),
    "slow-masters": (1, BF16 | MASTERS),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model_folder, dataset):
    """All runs take the same 8 samples in a step; the sixth one the 4 that are left of the 44."""
    layouts = SAME | OTHERS
    tied = tied_folder(tmp_path_factory.mktemp("model") / "tied", model_folder)

    def config(folder: Path, **changes: Any) -> Path:
        ranks, _ = layouts.get(folder.name, (1, {}))
        size = 8 // (ranks // changes.get("tensor_parallel_dim", 1))
        size //= changes.get("gradient_accumulation_steps", 1)
        standard = {"batch_size": size, "save_every_n_steps": 0}
        source = tied if folder.name.startswith("tied") else model_folder
        return write_config(folder, source, dataset, **standard | changes)

    return Runs(tmp_path_factory.mktemp("layouts"), config, BASES, layouts)


def tied_folder(folder: Path, model_folder: Path) -> Path:
    """The demo model with its embedding as its output, as Llama 3.2 has it."""
    shutil.copytree(model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def losses(folder: Path) -> torch.Tensor:
    return torch.tensor([line["loss"] for line in metrics(folder)])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n not in QUICK)) for n in SAME]
)
def test_it_equals_the_single_process(name, runs):
    runs.assert_same(name, LOSS_TOLERANCE, 1e-3, WEIGHT_TOLERANCE)
    assert len(metrics(runs[name])) == 6


def test_export_round_trip_is_exact(runs, model_folder):
    before = load_file(model_folder / "model.safetensors")
    after = load_file(runs["full-unchanged"] / "export/model.safetensors")
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_checkpointing_and_sharded_tables_change_nothing(runs):
    plain, changed = metrics(runs["full"])[0], metrics(runs["full-unchanged"])[0]
    assert changed["loss"] == pytest.approx(plain["loss"], abs=1e-6)
    assert changed["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)


def test_bf16_follows_fp32_and_is_exported_as_bf16(runs):
    assert (losses(runs["lora-bf16"]) - losses(runs["lora"])).abs().max() < 0.05
    export = runs["lora-bf16"] / "export"
    assert {t.dtype for t in load_file(export / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((export / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.long
def test_gradients_may_be_summed_in_bf16(runs):
    difference = (losses(runs["full-reduced"]) - losses(runs["full"])).abs()
    assert difference[0] < LOSS_TOLERANCE and difference[-1] > 0 and difference.max() < 0.02


@pytest.mark.long
def test_master_weights_keep_updates_that_bf16_loses(runs):
    """At a small learning rate most updates are smaller than bf16's spacing."""
    exact, short, masters = (losses(runs[n]) for n in ("slow", "slow-bf16", "slow-masters"))
    assert (masters - exact).abs().max() < 2e-3
    assert (short - exact).abs().max() > 0.05
    # The first step's loss is before any update.
    assert exact[0] - exact[-1] > 2 * (short[0] - short[-1])
    export = load_file(runs["slow-masters"] / "export/model.safetensors")
    assert {tensor.dtype for tensor in export.values()} == {torch.bfloat16}


@pytest.mark.long
def test_gradients_are_sent_once_a_step_or_within_a_copy_after_each_micro_step(runs):
    """The sums of the loss, of tokens and of the norm are no gradients."""

    def sent(name: str, operation: str) -> int:
        """How often rank 0 sent gradients in the one step of its trace."""
        (trace,) = (runs[name] / "profile").glob("rank_0.*")
        return [e.get("name") for e in json.loads(trace.read_text())["traceEvents"]].count(
            operation
        )

    once, each = (partial(sent, name) for name in ("full-copies", "full-copies-synced"))
    # One for each of three layers, embedding, output head, and the rest of the model.
    assert once("c10d::_reduce_scatter_base_") == 6 and each("c10d::_reduce_scatter_base_") == 12
    assert each("c10d::allreduce_") == once("c10d::allreduce_"), "copies must agree once only"


@pytest.mark.long
def test_the_layout_is_told_and_nothing_warns(runs):
    for name, told in {
        "full-tp2": "tensor parallel over 2",
        "full-tp2-fsdp2": "FSDP over 2, tensor parallel over 2",
        "full-copies": "4 on cpu, fp32, FSDP over 2, 2 data-parallel replicas",
        "lora-copies-tp2-offload": "4 on cpu, fp32, 2 data-parallel replicas, tensor parallel over "
        "2, parameters and optimizer on the CPU",
    }.items():
        assert runs[name] and told in runs.said[name]
    assert "FSDP" not in runs.said["full-tp2"]
    assert "note: tensor_parallel_plan is not used" in runs.said["full-tp2-fsdp2"]
    for name in ("full-tp2", "full-tp2-fsdp2", "lora-output-tp2-fsdp2", "tied-tp2-fsdp2"):
        assert runs[name] and "arning" not in runs.said[name]
        assert "sequential all_gather" not in runs.said[name]


@pytest.mark.long
def test_tokens_per_second_are_shared_by_all_gpus(runs):
    """Two ranks that split the layers see the same tokens, and count them once."""
    lines = metrics(runs["full-tp2"])
    for before, line in zip([{"tokens": 0}, *lines], lines, strict=False):
        tokens = line["tokens"] - before["tokens"]
        rate = tokens / line["step_time_s"] / 2
        assert line["tokens_per_second_per_gpu"] == pytest.approx(rate, rel=0.05)


def test_a_line_has_the_mean_loss_since_the_line_before(runs, tmp_path, model_folder, dataset):
    path = write_config(tmp_path, model_folder, dataset, batch_size=4, log_every_n_steps=3)
    train(path, ranks=2)
    each, lines = metrics(runs["full-fsdp2"]), metrics(tmp_path)
    assert [line["loss_mean"] for line in each] == [pytest.approx(line["loss"]) for line in each]
    assert [line["step"] for line in lines] == [1, 3, 6]
    losses = [line["loss"] for line in each]
    means = [losses[0], sum(losses[1:3]) / 2, sum(losses[3:6]) / 3]
    assert [line["loss_mean"] for line in lines] == pytest.approx(means, abs=LOSS_TOLERANCE)
