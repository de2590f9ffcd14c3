"""How many process groups a rank of 512 belongs to, and how often torch makes them."""

from typing import Any

import pytest
import torch
from torch.distributed import device_mesh, distributed_c10d

from runspec.keys.model import TRANSFORMERS
from tests.trainer.models.transformers_cases import write
from tests.trainer.runs import write_config
from trainer.config import load
from trainer.models import build as models
from trainer.parallel import gradients
from trainer.parallel.copies import holders
from trainer.parallel.fake import fake_world

RANKS, NODES = 512, 64
ONE_PER_NODE = {"data_parallel_replicate_dim": NODES}
TP, EP = {"tensor_parallel_dim": 2}, {"expert_parallel_dim": 8}
SPREAD = {"model": {"_component_": TRANSFORMERS}} | EP
# The layout; how many groups a rank is in beside that of all ranks, one for each dimension of its
# meshes (torch splits NCCL's communicator once for each, as `start` has named the rank's GPU); and
# how many torch makes one after the other where no GPU is named.
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "FSDP": ({}, 0, 0),
    "HSDP": (ONE_PER_NODE, 2, 8 + 64),
    "FSDP x TP": (TP, 2, 2 + 256),
    "HSDP x TP": (ONE_PER_NODE | TP, 3, 8 + 128 + 256),
    "replicas x TP": ({"data_parallel_replicate_dim": 256} | TP, 3, 2 + 512 + 256),
    "FSDP x EP": (SPREAD, 2, 8 + 64),
    "HSDP x EP": (SPREAD | ONE_PER_NODE, 5, 8 + 64 + 8 + 512 + 64),
    "FSDP x EP x TP": (SPREAD | TP, 4, 2 + 256 + 8 + 64),
    "HSDP x EP x TP": (
        SPREAD | TP | {"data_parallel_replicate_dim": 32},
        6,
        16 + 64 + 256 + 16 + 256 + 64,
    ),
}


@pytest.fixture(scope="module")
def experts(tmp_path_factory, model_folder):
    folder = tmp_path_factory.mktemp("models") / "moe"
    return write("qwen3-moe", folder, model_folder, num_experts=64)


def groups() -> int:
    """So many process groups this rank belongs to; torch has no public name for it."""
    return len(distributed_c10d._world.pg_map)


@pytest.mark.parametrize("name", CASES)
def test_a_rank_of_512_has_few_groups(name, tmp_path, model_folder, dataset, experts, monkeypatch):
    changes, own, made = CASES[name]
    source = {"checkpointer": {"checkpoint_dir": str(experts)}} if "model" in changes else {}
    config = load(write_config(tmp_path, model_folder, dataset, **changes | source))
    calls: list[Any] = []
    new_group = device_mesh.new_group
    monkeypatch.setattr(
        device_mesh, "new_group", lambda **more: (calls.append(more), new_group(**more))[1]
    )
    with fake_world(vars(config), RANKS) as world:
        before = groups()
        module = models.empty(config)
        models.lay_out(module, config, world)
        models.allocate(module, torch.device("cpu"), parameters_on_cpu=False)
        # What reads weights, and what sums gradients, asks for groups too.
        for parameter in module.parameters():
            holders(parameter, world)
            parameter.grad = torch.zeros_like(parameter)
        gradients.reduce_partial_gradients(list(module.parameters()))
        gradients.gradient_norm(list(module.parameters()))
        found = groups() - before
    assert found == own and len(calls) == made
