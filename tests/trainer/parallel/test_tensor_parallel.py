"""Layers split over ranks, alone and with FSDP, train exactly as on one process."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.runs import (
    MODEL_SIZES,
    assert_same_curve,
    assert_same_tensors,
    curve,
    error_record,
    lora_model,
    metrics,
    train,
    write_config,
)
from trainer.errors import ConfigError
from trainer.models.build import empty_module
from trainer.parallel import tensor_parallel
from trainer.parallel import world as distributed

# fp32 on the CPU: only the order of summation differs. Adam divides by the root of tiny second
# moments in its first steps, which enlarges that difference in single weights.
LOSS_TOLERANCE = 2e-5
NORM_TOLERANCE = 2e-5
WEIGHT_TOLERANCE = 2e-4
ADAMW = {"_component_": "torch.optim.AdamW", "lr": 3e-3}
SMOOTHED = {"_component_": "torch.nn.CrossEntropyLoss", "label_smoothing": 0.1}
LORA = lora_model(apply_lora_to_output=True)
TIED = {"_component_": "torchtune.models.llama3_2.llama3_2", **MODEL_SIZES, "scale_factor": 1}
# Runs by name: ranks, the run that it must equal, changes to the config.
RUNS: dict[str, tuple[int, str | None, dict]] = {
    "full": (1, None, {}),
    "lora": (1, None, {"model": LORA}),
    "tied": (1, None, {"model": TIED, "loss": SMOOTHED}),
    "full-tp2": (2, "full", {"optimizer": ADAMW | {"fused": True}}),
    "full-tp2-dp2": (
        4,
        "full",
        {
            "batch_size": 4,
            "optimizer": ADAMW | {"fused": True},
            "custom_sharded_layers": ["tok_embeddings", "output"],
            "tensor_parallel_plan": {"_component_": "torchtune.models.llama3.base_llama_tp_plan"},
        },
    ),
    "lora-tp2-dp2": (
        4,
        "lora",
        {
            "model": LORA,
            "batch_size": 2,
            "gradient_accumulation_steps": 2,
            "enable_activation_checkpointing": True,
        },
    ),
    "tied-tp2-dp2": (4, "tied", {"model": TIED, "loss": SMOOTHED, "batch_size": 4}),
}
PAIRS = [(name, reference) for name, (_, reference, _) in RUNS.items() if reference]


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory, model_folder):
    """The demo model with its embedding as its output, as Llama 3.2 has it."""
    folder = tmp_path_factory.mktemp("model") / "tied"
    shutil.copytree(model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory, model_folder, tied_folder, dataset):
    """Every run trained in three starts; and what each start said, by its number of ranks."""
    root = tmp_path_factory.mktemp("tensor_parallel")
    configs: dict[int, list[Path]] = {}
    for name, (ranks, _, changes) in RUNS.items():
        path = write_config(
            root / name,
            tied_folder if name.startswith("tied") else model_folder,
            dataset,
            # The sixth step takes the 4 samples that are left of the 44, none for the second half.
            **({"max_steps": 6, "tensor_parallel_dim": min(ranks, 2)} | changes),
        )
        configs.setdefault(ranks, []).append(path)
    said = {ranks: train(*paths, ranks=ranks) for ranks, paths in configs.items()}
    return {name: root / name for name in RUNS}, said


@pytest.mark.long
@pytest.mark.parametrize(("name", "reference"), PAIRS, ids=[name for name, _ in PAIRS])
def test_curve_norm_and_weights_equal_the_single_process(name, reference, folders):
    wanted, own = folders[0][reference], folders[0][name]
    assert len(curve(own)) == 6
    assert_same_curve(own, wanted, LOSS_TOLERANCE, NORM_TOLERANCE)
    assert metrics(own)[-1]["loss"] < metrics(own)[0]["loss"], "the loss must fall"
    assert_same_tensors(own, wanted, WEIGHT_TOLERANCE)
    if reference == "lora":
        assert_same_tensors(
            own, wanted, WEIGHT_TOLERANCE, "export/adapter/adapter_model.safetensors"
        )


@pytest.mark.long
def test_tokens_per_second_are_shared_by_all_gpus(folders):
    """Two ranks that split the layers see the same tokens, and count them once."""
    lines = metrics(folders[0]["full-tp2"])
    for before, line in zip([{"tokens": 0}, *lines], lines, strict=False):
        tokens = line["tokens"] - before["tokens"]
        rate = tokens / line["step_time_s"] / 2
        assert line["tokens_per_second_per_gpu"] == pytest.approx(rate, rel=0.05)


@pytest.mark.long
def test_the_layout_is_told_and_nothing_warns(folders):
    said = folders[1]
    assert "tensor parallel over 2" in said[2] and "FSDP" not in said[2]
    assert "FSDP over 2, tensor parallel over 2" in said[4]
    assert "note: tensor_parallel_plan is not used" in said[4]
    assert [line for text in said.values() for line in text.splitlines() if "arning" in line] == []
    assert "sequential all_gather" not in said[4]


def test_a_model_that_cannot_be_split_is_refused_on_every_rank(tmp_path, model_folder, dataset):
    path = write_config(
        tmp_path,
        model_folder,
        dataset,
        tensor_parallel_dim=2,
        model=lora_model(max_seq_len=511),
    )
    train(path, ranks=2, status=1)
    for rank in range(2):
        record = error_record(tmp_path, rank)
        assert (record["type"], record["permanent"]) == ("ConfigError", True)
        (length,) = record["message"].splitlines()
        assert length.startswith("tensor_parallel_dim 2 does not divide the model's max_seq_len")


def test_every_size_that_does_not_divide_is_named():
    with torch.device("meta"):
        model = empty_module(TIED | {"vocab_size": 1001, "intermediate_dim": 500})
    found = tensor_parallel.faults(model, 3)
    for name in ("num_heads 4", "num_kv_heads 2", "intermediate_dim 500", "vocab_size 1001"):
        assert any(f"3 does not divide the model's {name}: choose" in fault for fault in found)
    assert tensor_parallel.faults(model, 1) == []


def test_ranks_that_do_not_divide_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="tensor_parallel_dim 3 does not divide 4 ranks"):
        distributed.start("cpu", {"tensor_parallel_dim": 3})
    assert not torch.distributed.is_initialized()
