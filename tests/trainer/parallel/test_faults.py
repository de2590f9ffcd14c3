"""Layouts that the model, the ranks or the optimizer cannot have are refused before a step."""

import shutil
from dataclasses import replace

import pytest
import torch

from tests.trainer.runs import (
    described,
    empty_model,
    error_record,
    lora_model,
    spec_of,
    train,
    write_config,
)
from trainer import optimizers
from trainer.config import load
from trainer.errors import ConfigError
from trainer.models import build as models
from trainer.parallel import world as distributed


def test_a_model_that_cannot_be_split_is_refused_on_every_rank(tmp_path, model_folder, dataset):
    source = shutil.copytree(model_folder, tmp_path / "odd")
    described(source, max_position_embeddings=511)
    path = write_config(tmp_path, source, dataset, tensor_parallel_dim=2, model=lora_model())
    train(path, ranks=2, status=1)
    for rank in range(2):
        record = error_record(tmp_path, rank)
        assert (record["type"], record["permanent"]) == ("ConfigError", True)
        (length,) = record["message"].splitlines()
        assert length.startswith("tensor_parallel_dim 2 does not divide the model's max_seq_len")


def test_every_size_that_does_not_divide_is_named(tmp_path):
    given = {"vocab_size": 1001, "intermediate_size": 500, "tie_word_embeddings": True}
    model = empty_model(described(tmp_path, **given))
    spec = spec_of({}, tensor_parallel_dim=3)
    found = models.layout_faults(model, spec)
    for name in ("num_heads 4", "num_kv_heads 2", "intermediate_dim 500", "vocab_size 1001"):
        assert any(f"3 does not divide the model's {name}: choose" in fault for fault in found)
    assert models.layout_faults(model, replace(spec, tensor_parallel_dim=1)) == []


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        ({"tensor_parallel_dim": 3}, "tensor_parallel_dim 3 does not divide 8 ranks"),
        (
            {"tensor_parallel_dim": 2, "data_parallel_replicate_dim": 3},
            "data_parallel_replicate_dim 3 x data_parallel_shard_dim 1 x .* is not 8 ranks",
        ),
        (
            {
                "tensor_parallel_dim": 2,
                "data_parallel_replicate_dim": 2,
                "data_parallel_shard_dim": 4,
            },
            "data_parallel_replicate_dim 2 x data_parallel_shard_dim 4 x .* is not 8 ranks",
        ),
    ],
    ids=["tensor", "replicas", "shards"],
)
def test_dimensions_must_make_up_the_ranks(layout, fault, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match=fault):
        distributed.start("cpu", layout)
    assert not torch.distributed.is_initialized()


def test_an_optimizer_that_cannot_update_this_layout_is_refused(tmp_path, model_folder, dataset):
    config = load(write_config(tmp_path, model_folder, dataset, fsdp_cpu_offload=True))
    model = models.build(config, distributed.start("cpu"))
    try:
        for name in ("torch.optim.Adafactor", "torch.optim.LBFGS"):
            with pytest.raises(ConfigError, match=f"{name} cannot update .*sharded"):
                optimizers.build({"_component_": name}, model.trainable)
        found = optimizers.build({"_component_": "torch.optim.AdamW"}, model.trainable)
        assert found.defaults["fused"] and not found.state, "the try must leave nothing behind"
    finally:
        distributed.stop()
