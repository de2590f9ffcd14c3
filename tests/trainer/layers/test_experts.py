"""Experts in every layout: expert and tensor parallelism, routers, NF4, resuming."""

import json
import shutil

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from runspec import versions
from tests.trainer.forks import Ranks
from tests.trainer.models.transformers_cases import write
from tests.trainer.models.transformers_runs import (
    ADAPTED,
    AUXILIARY,
    BY_OPERATION,
    CHECKPOINTED,
    EP,
    FULL,
    HALF,
    LORA,
    TP,
    Bases,
    Layouts,
    config_of,
    runs_of,
)
from tests.trainer.runs import (
    assert_same_curve,
    assert_same_tensors,
    metrics,
    progress,
    tensors,
    train,
)
from trainer.config import load
from trainer.layers import experts
from trainer.layers.adapters.lora_experts import PEFT_VERSION, ExpertsLoRA, from_peft, to_peft
from trainer.layers.balance import Balance
from trainer.model import Inputs
from trainer.models import build as models
from trainer.parallel import expert_parallel

COPIES = {"data_parallel_replicate_dim": 2}
# With the seed of runs.py rounding decides between two experts at the fourth step.
OTHER_ORDER = {"seed": 7}
QLORA = ADAPTED | {"model": LORA | {"quantize_base": True}}
BASES: Bases = {
    "moe": FULL | {"family": "qwen3-moe"},
    "moe-aux": FULL | AUXILIARY | {"family": "qwen3-moe"},
    "moe-frozen-router": FULL | {"family": "qwen3-moe", "freeze": ["*.mlp.gate.*"]},
    "moe-lora": ADAPTED | {"family": "qwen3-moe"},
    "moe-ia3": FULL
    | {"family": "qwen3-moe", "model": {"adapter": "ia3"}, "save_adapter_weights_only": True},
    "mixtral": FULL | {"family": "mixtral"},
    "qlora": QLORA | {"family": "mixtral"},
    # Sinks and biases; latent attention, and a block without experts.
    "gpt-oss": ADAPTED | OTHER_ORDER | {"family": "gpt-oss"},
    "deepseek-v3": FULL | {"family": "deepseek-v3"},
}
LAYOUTS: Layouts = {
    "moe-fsdp2": (2, HALF | CHECKPOINTED),
    "moe-aux-ep2": (2, HALF | EP | CHECKPOINTED),
    "moe-ep2-fsdp2": (4, {"batch_size": 1} | EP),
    "moe-ep2-copies": (4, {"batch_size": 1} | EP | COPIES),
    "moe-lora-ep2": (2, HALF | EP | CHECKPOINTED),
    "moe-ia3-ep2": (2, HALF | EP),
    # Three experts have no equal parts for two ranks: each has a part of every expert.
    "mixtral-fsdp2": (2, HALF | CHECKPOINTED),
    "qlora-fsdp2": (2, HALF),
    "gpt-oss-ep2-tp2": (2, EP | TP),
    # The shared experts come after the others, which are a group of FSDP's in what is recomputed.
    "deepseek-v3-ep2": (2, HALF | EP | BY_OPERATION),
    "deepseek-v3-tp2": (2, TP | CHECKPOINTED),
}
if versions.sharding_fault(torch.__version__):
    del LAYOUTS["qlora-fsdp2"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory, model_folder):
    root = tmp_path_factory.mktemp("families")
    names = ("qwen3-moe", "gpt-oss", "deepseek-v3")
    odd = write("mixtral", root / "mixtral", model_folder, num_local_experts=3)
    return {name: write(name, root / name, model_folder) for name in names} | {"mixtral": odd}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, sources, dataset):
    return runs_of(tmp_path_factory.mktemp("runs"), sources, dataset, BASES, LAYOUTS)


@pytest.mark.long
def test_an_export_in_files_of_several_ranks_is_the_same(runs, tmp_path):
    one, own = runs["moe-lora-ep2"], tmp_path / "moe-lora-ep2"
    shutil.copytree(one, own)
    shutil.rmtree(own / "export")
    (own / "progress.json").unlink()
    config = own / "train.yaml"
    config.write_text(config.read_text().replace(str(one), str(own)))
    ranks = Ranks("tests.trainer.checkpoint.small_shards", [str(config)], 2)
    said, _ = ranks.communicate(timeout=120)
    assert ranks.returncode == 0 and "resuming from checkpoints/step_4" in said, said
    assert len(list((own / "export").glob("*.safetensors"))) > 5
    again, first = (tensors(folder / "export") for folder in (own, one))
    assert again.keys() == first.keys()
    assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_experts_in_every_layout_equal_the_single_process(name, runs):
    runs.assert_same(name, weights=5e-5)


@pytest.mark.long
def test_routers_are_balanced_or_frozen(runs, sources):
    """The auxiliary loss lowers itself; the balance is the same whatever the layout is."""
    names = ("router_aux_loss", "router_entropy", "expert_load_max", "expert_load_min")
    alone, spread, plain = (metrics(runs[n]) for n in ("moe-aux", "moe-aux-ep2", "moe"))
    assert alone[-1]["router_aux_loss"] < alone[0]["router_aux_loss"]
    assert alone[-1]["router_entropy"] > plain[-1]["router_entropy"]
    for line, other in zip(alone, spread, strict=True):
        for name in names:
            assert other[name] == pytest.approx(line[name], rel=1e-4), name
    before = tensors(sources["qwen3-moe"])
    for name, frozen in (("moe", False), ("moe-frozen-router", True)):
        after = tensors(runs[name] / "export")
        same = [torch.equal(after[k], t) for k, t in before.items() if "mlp.gate." in k]
        assert same == [frozen] * 3


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("width", [24, 20])
@pytest.mark.parametrize("operator", [experts.grouped, experts._grouped])
def test_a_grouped_product_is_each_experts_own(operator, width, transposed):
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


def test_the_auxiliary_loss_is_transformers(tmp_path, sources, dataset, world):
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
def test_a_run_goes_on_with_its_experts_on_other_ranks(tmp_path, sources, dataset):
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


def test_a_router_that_changes_its_choice_in_place_is_computed_again(
    world, tmp_path, sources, dataset
):
    """Mixtral's and three other families' do; the results of kept operations must stay."""
    gradients = []
    for name, mode in (("none", {}), ("op", BY_OPERATION)):
        path = config_of(tmp_path / name, sources["mixtral"], dataset, **mode)
        module = models.build(load(path), world).module
        module(Inputs(torch.arange(48).view(2, 24))).square().mean().backward()
        gradients.append([p.grad for p in module.parameters()])
    assert all(map(torch.equal, *gradients))


class Sent(TorchDispatchMode):
    """Counts all-to-alls: of numbers of rows, which the host waits for, and of rows."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.rows = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "alltoall_base" in str(func):
            is_rows = args[0].is_floating_point()
            self.rows, self.counts = self.rows + is_rows, self.counts + (not is_rows)
        return func(*args, **(kwargs or {}))


def test_the_host_waits_for_a_layers_rows_once(world):
    """Also if the layer is computed again: its rows go the same way, with the same results."""
    torch.manual_seed(2)
    layer = torch.nn.Module()
    for name, shape in (("gate_up_proj", (3, 8, 16)), ("down_proj", (3, 16, 8))):
        setattr(layer, name, torch.nn.Parameter(torch.randn(shape)))
    experts.prepare(layer, lambda _, x: x.tanh(), transposed=False)
    hidden, index = torch.randn(10, 16, requires_grad=True), torch.randint(3, (10, 2))
    given = (layer, hidden, index, torch.rand(10, 2))
    leaves = [hidden, *layer.parameters()]
    whole = experts.forward(*given)
    wanted = torch.autograd.grad(whole.square().sum(), leaves)
    layer.exchange = expert_parallel.Exchange(init_device_mesh("cpu", (world.size,)), 1.0)
    again = {"use_reentrant": False, "context_fn": expert_parallel.remembered}
    with Sent() as sent:
        out = checkpoint(experts.forward, *given, **again)
        found = torch.autograd.grad(out.square().sum(), leaves)
    assert (sent.counts, sent.rows) == (1, 6), "there and back: forward, again, backward"
    assert torch.equal(out, whole)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("outputs", [24, 16])
def test_adapters_of_experts_are_read_in_the_layouts_of_old_and_new_peft(outputs):
    """With sides of one length, too, where only the version tells."""
    torch.manual_seed(1)
    adapter = ExpertsLoRA(torch.empty(3, outputs, 16), 2, transposed=False)
    for stack in (adapter.lora_a, adapter.lora_b):
        torch.nn.init.normal_(stack.weight)
    a, b = adapter.lora_a.weight.detach(), adapter.lora_b.weight.detach()
    found = from_peft(*to_peft(a, b), adapter, False, PEFT_VERSION)
    assert torch.equal(found[0], a) and torch.equal(found[1], b)
    # PEFT 0.18 took the weight for [experts, in, out].
    old = to_peft(b.transpose(1, 2), a.transpose(1, 2))
    for version in ("0.18.1", None):
        found = from_peft(*old, adapter, False, version)
        assert torch.equal(found[0], a) and torch.equal(found[1], b)
    # PEFT 0.21's ParamWrapper.get_delta_weight.
    new_a, new_b = torch.randn(3 * 2, 16), torch.randn(outputs, 2 * 3)
    wanted = torch.einsum("ore,eri->eoi", new_b.view(outputs, -1, 3), new_a.view(3, -1, 16))
    found = from_peft(new_a, new_b, adapter, False, "0.21.0@unknown")
    torch.testing.assert_close(found[1] @ found[0], wanted)
    assert (found[0].shape, found[1].shape) == (a.shape, b.shape)


def test_a_rank_that_the_grouped_product_does_not_take_is_filled_up():
    torch.manual_seed(1)
    adapter = ExpertsLoRA(torch.empty(3, 24, 16), 6, transposed=False)
    for stack in (adapter.lora_a, adapter.lora_b):
        torch.nn.init.normal_(stack.weight)
    x, ends = torch.randn(10, 16), torch.tensor([4, 4, 10], dtype=torch.int32)
    found = adapter(x, ends, lambda weight: weight, 2.0)
    for rows, expert in ((slice(0, 4), 0), (slice(4, 10), 2)):
        update = adapter.lora_b.weight[expert] @ adapter.lora_a.weight[expert]
        torch.testing.assert_close(found[rows], 2 * x[rows] @ update.T)
    found.square().sum().backward()
    assert adapter.lora_a.weight.grad.shape == (3, 6, 16)


def test_gradients_of_experts_without_rows_are_zeros(monkeypatch):
    """Where torch's product leaves them as they are: the kit's derivative is taken, and masks."""
    gradient = torch.full((4, 8, 8), torch.nan)
    ends = torch.tensor([0, 4, 4, 10], dtype=torch.int32)
    found = experts.zeroed_without_rows(gradient, ends)
    assert [bool(each.isnan().all()) for each in found] == [False, True, False, True]
    assert not found[::2].any()
    torch.manual_seed(1)
    x, weight = torch.randn(10, 8), torch.randn(4, 8, 8, requires_grad=True)
    experts.grouped(x, weight, ends).square().sum().backward()
    expected, weight.grad = weight.grad, None
    monkeypatch.setattr(experts, "_leaves_gaps", lambda x: True)
    out = experts.grouped(x, weight, ends)
    assert "grouped_mm" not in type(out.grad_fn).__name__.lower()
    out.square().sum().backward()
    torch.testing.assert_close(weight.grad, expected)
