"""Experts in every layout: expert and tensor parallelism, routers, NF4, resuming."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.trainer.runs import (
    assert_same_curve,
    assert_same_tensors,
    metrics,
    progress,
    tensors,
    train,
)
from tests.trainer.transformers_cases import write
from tests.trainer.transformers_runs import (
    ADAPTED,
    AUXILIARY,
    BY_OPERATION,
    CHECKPOINTED,
    EP,
    FULL,
    HALF,
    LINEAR,
    LORA,
    TP,
    Runs,
    assert_same_training,
    config_of,
    train_all,
)
from trainer.config import load
from trainer.layers import experts
from trainer.layers.balance import Balance
from trainer.models import build as models
from trainer.parallel import fsdp
from trainer.parallel import world as distributed

COPIES = {"data_parallel_replicate_dim": 2}
RUNS: Runs = {
    "moe": (1, "qwen3-moe", None, FULL),
    "moe-fsdp2": (2, "qwen3-moe", "moe", FULL | HALF | CHECKPOINTED | {"loss": LINEAR}),
    "moe-aux": (1, "qwen3-moe", None, FULL | AUXILIARY),
    "moe-aux-ep2": (2, "qwen3-moe", "moe-aux", FULL | AUXILIARY | HALF | EP | CHECKPOINTED),
    "moe-aux-tp2": (2, "qwen3-moe", "moe-aux", FULL | AUXILIARY | TP),
    "moe-frozen-router": (1, "qwen3-moe", None, FULL | {"train_router": False}),
    "moe-lora": (1, "qwen3-moe", None, ADAPTED),
    "moe-lora-fsdp2": (2, "qwen3-moe", "moe-lora", ADAPTED | HALF),
    "moe-tp2": (2, "qwen3-moe", "moe", FULL | TP | {"loss": LINEAR}),
    "moe-ep2": (2, "qwen3-moe", "moe", FULL | HALF | EP),
    "moe-ep2-tp2": (2, "qwen3-moe", "moe", FULL | EP | TP),
    "moe-ep2-fsdp2": (4, "qwen3-moe", "moe", FULL | {"batch_size": 1} | EP),
    "moe-ep2-copies": (4, "qwen3-moe", "moe", FULL | {"batch_size": 1} | EP | COPIES),
    "moe-lora-ep2": (2, "qwen3-moe", "moe-lora", ADAPTED | HALF | EP | CHECKPOINTED),
    # Three experts have no equal parts for two ranks: each has a part of every expert.
    "odd": (1, "mixtral", None, FULL),
    "odd-fsdp2": (2, "mixtral", "odd", FULL | HALF | CHECKPOINTED),
    "qlora-moe": (1, "mixtral", None, ADAPTED | {"model": LORA | {"quantize_base": True}}),
    "qlora-moe-fsdp2": (
        2,
        "mixtral",
        "qlora-moe",
        ADAPTED | HALF | {"model": LORA | {"quantize_base": True}},
    ),
}
# What their tensor parallelism has beside: sinks and biases; latent attention, and a block without
# experts.
RUNS |= {
    "gpt-oss": (1, "gpt-oss", None, ADAPTED),
    "gpt-oss-ep2-tp2": (2, "gpt-oss", "gpt-oss", ADAPTED | EP | TP),
    "deepseek-v3": (1, "deepseek-v3", None, FULL),
    # The shared experts come after the others, which are a group of FSDP's in what is recomputed.
    "deepseek-v3-ep2": (2, "deepseek-v3", "deepseek-v3", FULL | HALF | EP | BY_OPERATION),
    "deepseek-v3-tp2": (2, "deepseek-v3", "deepseek-v3", FULL | TP | CHECKPOINTED),
}
PAIRS = [(name, of) for name, (_, _, of, _) in RUNS.items() if of]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    names = ("qwen3-moe", "gpt-oss", "deepseek-v3")
    odd = write("mixtral", root / "mixtral", model_folder, num_local_experts=3)
    return {name: write(name, root / name, model_folder) for name in names} | {"mixtral": odd}


@pytest.fixture(scope="module")
def world() -> Iterator[distributed.World]:
    yield distributed.start("cpu")
    distributed.stop()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, sources: dict[str, Path], dataset: Path) -> Path:
    """The folder in which every run lies by its name."""
    return train_all(tmp_path_factory.mktemp("runs"), RUNS, sources, dataset)


@pytest.mark.long
@pytest.mark.parametrize(("name", "reference"), PAIRS, ids=[name for name, _ in PAIRS])
def test_experts_in_every_layout_equal_the_single_process(
    name: str, reference: str, root: Path
) -> None:
    assert_same_training(root / name, root / reference)


@pytest.mark.long
def test_routers_are_balanced_or_frozen(root: Path, sources: dict[str, Path]) -> None:
    """The auxiliary loss lowers itself; the balance is the same whatever the layout is."""
    names = ("router_aux_loss", "router_entropy", "expert_load_max", "expert_load_min")
    alone, spread, plain = (metrics(root / n) for n in ("moe-aux", "moe-aux-ep2", "moe"))
    assert alone[-1]["router_aux_loss"] < alone[0]["router_aux_loss"]
    assert alone[-1]["router_entropy"] > plain[-1]["router_entropy"]
    for line, other in zip(alone, spread, strict=True):
        for name in names:
            assert other[name] == pytest.approx(line[name], rel=1e-4), name
    before = tensors(sources["qwen3-moe"])
    for name, frozen in (("moe", False), ("moe-frozen-router", True)):
        after = tensors(root / name / "export")
        same = [torch.equal(after[k], t) for k, t in before.items() if "mlp.gate." in k]
        assert same == [frozen] * 3


@pytest.mark.parametrize(
    ("shape", "ranks", "axis"),
    [
        ((8, 64, 32), 4, None),
        ((8, 64, 32), 16, 1),
        ((12, 24, 32), 16, 2),
        # Nothing is even, and biases are small.
        ((8, 12, 20), 16, None),
        ((8, 64), 16, None),
    ],
)
def test_fsdp_cuts_experts_inside_if_their_number_has_no_equal_parts(shape, ranks, axis) -> None:
    found = fsdp._placement(ranks, torch.nn.Parameter(torch.empty(shape, device="meta")))
    assert (found and found.dim) == axis


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("width", [24, 20])
@pytest.mark.parametrize("operator", [experts.grouped, experts._grouped])
def test_a_grouped_product_is_each_experts_own(operator, width: int, transposed: bool) -> None:
    """Of rows that the kernel takes and of others, and an expert without a row."""
    torch.manual_seed(0)
    x, ends = torch.randn(11, 16, requires_grad=True), torch.tensor([4, 4, 11]).int()
    weight = torch.randn(3, *((16, width) if transposed else (width, 16)), requires_grad=True)
    each = weight if transposed else weight.transpose(1, 2)
    parts = zip(x.split([4, 0, 7]), each, strict=True)
    wanted = torch.cat([part @ own for part, own in parts])
    found, scale = operator(x, each, ends), torch.randn_like(wanted)
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad((o * scale).sum(), (x, weight)) for o in (found, wanted)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert gradients[0][1].stride() == weight.stride(), "autograd copies another layout"


def test_the_auxiliary_loss_is_transformers(
    tmp_path: Path, sources: dict[str, Path], dataset: Path, world: distributed.World
) -> None:
    """Of one layer, to which transformers' function is given; its gradient too."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    module = models.build(load(config_of(tmp_path, sources["mixtral"], dataset)), world).module
    router = module.routers()[0]
    hidden = torch.randn(50, 64, generator=torch.Generator().manual_seed(3))
    expected = load_balancing_loss_func((router(hidden)[0],), 3, 2)
    (wanted,) = torch.autograd.grad(expected, [router.weight])
    balance = Balance([router], 0.5, 1)
    (router(hidden)[1].sum() * 0).backward()
    torch.testing.assert_close(router.weight.grad, 0.5 * wanted)
    torch.testing.assert_close(balance.metrics()["router_aux_loss"], expected.detach())


@pytest.mark.long
def test_a_run_goes_on_with_its_experts_on_other_ranks(
    tmp_path: Path, sources: dict[str, Path], dataset: Path
) -> None:
    """AdamW's moments come along, whatever expert_parallel_dim was when they were saved."""
    common = {"row_length": 96, "max_steps": 8}
    whole = config_of(tmp_path / "whole", sources["qwen3-moe"], dataset, batch_size=4, **common)
    train(whole)
    parts = [(2, HALF | EP), (2, {"batch_size": 4} | EP | TP), (4, {"batch_size": 1} | EP)]
    parts += [(1, {"batch_size": 4})]
    for index, (ranks, layout) in enumerate(parts):
        changes = common | layout | {"max_steps": 2 * (index + 1)}
        path = config_of(tmp_path / "parts", sources["qwen3-moe"], dataset, **changes)
        told = train(path, ranks=ranks, attempt=index)
        assert not index or f"resuming from checkpoints/step_{2 * index}" in told
        going_on = progress(path.parent) | {"state": "running"}
        (path.parent / "progress.json").write_text(json.dumps(going_on))
    assert_same_curve(path.parent, whole.parent, 5e-5, 1e-3)
    assert_same_tensors(path.parent, whole.parent, 2e-4)
