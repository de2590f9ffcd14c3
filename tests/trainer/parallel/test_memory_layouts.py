"""Copies of shards, offloading, recomputation: what saves memory changes no result."""

import json
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from tests.trainer.runs import (
    assert_same_curve,
    assert_same_tensors,
    curve,
    kill_at,
    lora_model,
    metrics,
    train,
    write_config,
)
from trainer import optimizers
from trainer.config import load
from trainer.errors import ConfigError
from trainer.models import build as models
from trainer.parallel import world as distributed
from trainer.parallel.activations import InputOffloading

# For several runs in one start, and for the compiler.
LIMIT_S = 1200
# fp32 on the CPU: only the order of summation differs.
LOSS_TOLERANCE = 2e-5
NORM_TOLERANCE = 2e-5
WEIGHT_TOLERANCE = 1e-4
LORA = {"model": lora_model(lora_dropout=0.0)}
OFFLOAD = {"fsdp_cpu_offload": True}
MASTERS = {"master_weights": "fp32"}
COPIES = {"data_parallel_replicate_dim": 2}
TP = {"tensor_parallel_dim": 2}
EVERY_SECOND = {"ac_mode": "selective", "ac_option": 2}
SLOW = {"max_steps": 16, "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-5}}
TRACED = {
    "profiler": {"enabled": True, "wait_steps": 1, "warmup_steps": 1, "active_steps": 1},
}
BY_OPERATION = {"ac_mode": "selective", "ac_option": "op"}
INPUTS_ON_CPU = {"enable_activation_checkpointing": True, "enable_activation_offloading": True}
# Changes to the config by name, by number of ranks; what the name begins with it must equal.
RUNS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "full": {},
        "lora": LORA,
        "full-every-second": EVERY_SECOND,
        "lora-by-operation": LORA | BY_OPERATION,
        "slow": SLOW,
        "slowbf16": SLOW | {"dtype": "bf16"},
        "slowmasters": SLOW | {"dtype": "bf16"} | MASTERS,
    },
    2: {
        "full-tp-offload": TP | {"fsdp": {"cpu_offload": True}} | BY_OPERATION,
        "lora-tp-masters": LORA | TP | MASTERS,
        "full-prefetch": {"fsdp_prefetch": 8, "gradient_accumulation_steps": 2} | INPUTS_ON_CPU,
        "fullreduced": {"fsdp_reduce_dtype": "bf16"},
        "full-shards-offload": OFFLOAD | MASTERS | {"gradient_accumulation_steps": 2},
    },
    4: {
        "full-copies": COPIES
        | TRACED
        | {"gradient_accumulation_steps": 2, "fsdp_reshard_after_forward": False},
        "full-copies-synced": COPIES
        | OFFLOAD
        | TRACED
        | {"gradient_accumulation_steps": 2, "sync_each_micro_batch": True},
        "lora-copies-tp-offload": LORA | COPIES | TP | OFFLOAD | INPUTS_ON_CPU,
        "lora-four-copies": LORA | {"data_parallel_replicate_dim": 4} | EVERY_SECOND,
    },
}


@pytest.fixture(scope="module")
def root(tmp_path_factory, model_folder, dataset):
    """The folder in which the runs lie by name, all on the same 8 samples a step."""
    folder = tmp_path_factory.mktemp("memory")
    for ranks, configs in RUNS.items():
        paths = []
        for name, changes in configs.items():
            groups = ranks // changes.get("tensor_parallel_dim", 1)
            batch_size = 8 // groups // changes.get("gradient_accumulation_steps", 1)
            settings = {"batch_size": batch_size, "save_every_n_steps": 0} | changes
            paths.append(write_config(folder / name, model_folder, dataset, **settings))
        (folder / f"said_{ranks}.txt").write_text(train(*paths, ranks=ranks, limit_s=LIMIT_S))
    return folder


def assert_same(own: Path, wanted: Path, weight_tolerance: float = WEIGHT_TOLERANCE) -> None:
    """Losses, gradient norms and exported weights of two runs are equal."""
    assert len(curve(own)) == len(curve(wanted)) == 6
    assert_same_curve(own, wanted, LOSS_TOLERANCE, NORM_TOLERANCE)
    assert metrics(own)[-1]["loss"] < metrics(own)[0]["loss"], "the loss must fall"
    assert_same_tensors(own, wanted, weight_tolerance)


@pytest.mark.long
@pytest.mark.parametrize("name", [n for configs in RUNS.values() for n in configs if "-" in n])
def test_every_combination_equals_the_plain_single_process(name, root):
    assert_same(root / name, root / name.partition("-")[0])


def gradient_sums(folder: Path) -> dict[str, int]:
    """How often rank 0 sent gradients in the one step of its trace."""
    (trace,) = (folder / "profile").glob("rank_0.*")
    events = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    wanted = ("c10d::_reduce_scatter_base_", "c10d::allreduce_")
    return {name: events.count(name) for name in wanted}


# One for each of three layers, embedding, output head, and the rest of the model.
SHARDED_GROUPS = 6


@pytest.mark.long
def test_gradients_are_sent_once_a_step(root):
    """Two micro-steps; the sums of the loss, of tokens and of the norm make up the rest."""
    assert gradient_sums(root / "full-copies")["c10d::_reduce_scatter_base_"] == SHARDED_GROUPS


@pytest.mark.long
def test_gradients_may_be_sent_within_a_copy_after_each_micro_step(root):
    once, each = (gradient_sums(root / f"full-copies{n}") for n in ("", "-synced"))
    assert each["c10d::_reduce_scatter_base_"] == 2 * once["c10d::_reduce_scatter_base_"]
    assert each["c10d::allreduce_"] == once["c10d::allreduce_"], "copies must agree once only"


@pytest.mark.long
def test_master_weights_keep_updates_that_bf16_loses(root):
    """At a small learning rate most updates are smaller than bf16's spacing."""
    exact, short, masters = (
        torch.tensor([line["loss"] for line in metrics(root / name)])
        for name in ("slow", "slowbf16", "slowmasters")
    )
    assert (masters - exact).abs().max() < 2e-3
    assert (short - exact).abs().max() > 0.05
    # The first step's loss is before any update.
    assert exact[0] - exact[-1] > 2 * (short[0] - short[-1])
    export = load_file(root / "slowmasters/export/model.safetensors")
    assert {tensor.dtype for tensor in export.values()} == {torch.bfloat16}


class Layer(torch.nn.Module):
    """A layer that takes a tensor which nothing else needs."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((8, 8), 0.1 * step))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


def test_offloaded_inputs_are_let_go_and_come_back():
    class Alive(TorchFunctionMode):
        """Notes every tensor that the layers make, without keeping it."""

        def __torch_function__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            if function is torch.tanh:
                inputs.append(weakref.ref(made))
            return made

    found = []
    for checkpointing in (partial(checkpoint, use_reentrant=False), InputOffloading()):
        layers = [Layer(step) for step in range(1, 5)]
        x, inputs = torch.ones(4, 8, requires_grad=True), []
        with Alive():
            out = x
            for layer in layers:
                out = checkpointing(layer, out)
        kept = sum(made() is not None for made in inputs[:-1])
        out.sum().backward()
        found.append((kept, [layer.weight.grad for layer in layers]))
    (kept, gradients), (offloaded, same_gradients) = found
    assert (kept, offloaded) == (3, 0)
    for gradient, same in zip(gradients, same_gradients, strict=True):
        assert torch.equal(gradient, same)


@pytest.mark.long
def test_gradients_may_be_summed_in_bf16(root):
    exact, short = ([line["loss"] for line in metrics(root / n)] for n in ("full", "fullreduced"))
    assert short == pytest.approx(exact, abs=0.02)
    assert short[0] == pytest.approx(exact[0], abs=LOSS_TOLERANCE) and short[-1] != exact[-1]


@pytest.mark.parametrize(
    ("replicate", "shard", "fault"),
    [
        (3, -1, "data_parallel_replicate_dim 3 x data_parallel_shard_dim 1 x .* is not 8 ranks"),
        (2, 4, "data_parallel_replicate_dim 2 x data_parallel_shard_dim 4 x .* is not 8 ranks"),
    ],
)
def test_dimensions_must_make_up_the_ranks(replicate, shard, fault, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match=fault):
        distributed.start(
            "cpu",
            {
                "tensor_parallel_dim": 2,
                "data_parallel_replicate_dim": replicate,
                "data_parallel_shard_dim": shard,
            },
        )
    assert not torch.distributed.is_initialized()


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (4, COPIES | {"batch_size": 2}),
        (2, OFFLOAD | MASTERS | {"batch_size": 4}),
        (
            2,
            {
                "batch_size": 4,
                "optimizer": {"_component_": "torchao.optim.AdamW8bit", "lr": 3e-3},
                "lr_scheduler": {
                    "_component_": "torchtune.training.lr_schedulers"
                    ".get_cosine_schedule_with_warmup",
                    "num_warmup_steps": 2,
                },
            },
        ),
    ],
    ids=["copies", "offload", "8-bit"],
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    ranks, changes, tmp_path, model_folder, dataset, monkeypatch
):
    # torchao compiles its optimizers, as in the next test.
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    whole, killed = (
        write_config(
            tmp_path / name, model_folder, dataset, max_steps=10, save_every_n_steps=2, **changes
        )
        for name in ("whole", "killed")
    )
    train(whole, ranks=ranks)
    kill_at(killed, 5, ranks)
    assert "resuming from checkpoints/step_" in train(killed, ranks=ranks, attempt=1)
    assert curve(killed.parent) == curve(whole.parent)
    export = "export/model.safetensors"
    assert (killed.parent / export).read_bytes() == (whole.parent / export).read_bytes()


@pytest.mark.long
def test_optimizers_by_name(root, tmp_path, model_folder, dataset, monkeypatch):
    """Each trains, 8 bits nearly as 32 do."""
    optimizers = {
        "torch.optim.SGD": {"lr": 0.01, "momentum": 0.9},
        "torchao.optim.AdamW8bit": {},
        "torchao.optim._AdamW": {"bf16_stochastic_round": True},
    }
    paths = [
        write_config(
            tmp_path / name,
            model_folder,
            dataset,
            batch_size=4,
            save_every_n_steps=3,
            optimizer={"_component_": name, "lr": 3e-3} | settings,
            **(MASTERS | {"dtype": "bf16"} if name == "torch.optim.SGD" else {}),
        )
        for name, settings in optimizers.items()
    ]
    for path in paths:
        # torchao compiles its own, which takes the longest: once is enough.
        compiled = path.parent.name == "torchao.optim.AdamW8bit"
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", str(int(not compiled)))
        train(path, ranks=2, limit_s=LIMIT_S)
    falls = {path.parent.name: [line["loss"] for line in metrics(path.parent)] for path in paths}
    for name, losses in falls.items():
        assert losses[-1] < losses[0] - 0.5, name
    exact = [line["loss"] for line in metrics(root / "full")]
    assert falls["torchao.optim.AdamW8bit"] == pytest.approx(exact, abs=0.05)


def test_an_optimizer_that_cannot_update_this_layout_is_refused(tmp_path, model_folder, dataset):
    config = load(write_config(tmp_path, model_folder, dataset, **OFFLOAD))
    model = models.build(config, distributed.start("cpu"))
    try:
        for name in ("torch.optim.Adafactor", "torch.optim.LBFGS"):
            with pytest.raises(ConfigError, match=f"{name} cannot update .*sharded"):
                optimizers.build({"_component_": name}, model.trainable)
        found = optimizers.build({"_component_": "torch.optim.AdamW"}, model.trainable)
        assert found.defaults["fused"] and not found.state, "the try must leave nothing behind"
    finally:
        distributed.stop()
