"""Layers that read the same tensor share a product of their A's: the same as one by one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.layers import nf4
from trainer.layers.adapters.base import disabled
from trainer.layers.adapters.lora_linear import LowRankLinear, share
from trainer.model import Inputs, plain_name
from trainer.models import build as models
from trainer.parallel import activations

TOKENS = torch.arange(48).reshape(2, 24) * 13 % 1024
QKV, GATE_UP = {"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}
BOTH = [QKV, GATE_UP]
NO = {"compile": False, "activation_checkpointing": None, "enable_activation_offloading": False}
COMPILED = {"compile": True}
# By name: of the model block, which layers share, and how the blocks are run.
CASES: dict[str, tuple[dict[str, Any], list[set[str]], dict[str, Any]]] = {
    "plain": ({}, BOTH, {}),
    "compiled": ({}, BOTH, COMPILED),
    "rslora": ({"use_rslora": True}, BOTH, {}),
    "dora": ({"adapter": "dora"}, BOTH, COMPILED),
    "nf4": ({"quantize_base": True}, BOTH, COMPILED),
    "nf4-dora": ({"quantize_base": True, "adapter": "dora"}, BOTH, {}),
    "two of three": ({"lora_modules": ["q_proj", "v_proj"]}, [{"q_proj", "v_proj"}], COMPILED),
    "one of two": ({"lora_modules": ["o_proj", "up_proj"]}, [], {}),
    "recomputed": ({}, BOTH, {"activation_checkpointing": 1}),
    "recomputed, compiled": ({}, BOTH, COMPILED | {"activation_checkpointing": 1}),
    "offloaded": (
        {},
        BOTH,
        {"activation_checkpointing": 1, "enable_activation_offloading": True},
    ),
    "by operation": ({}, BOTH, {"activation_checkpointing": "op"}),
    "by operation, compiled": ({}, BOTH, COMPILED | {"activation_checkpointing": "op"}),
    "dropout": ({"lora_dropout": 0.1}, [], {}),
}


def build(folder, block: dict[str, Any], keys: dict[str, Any]) -> torch.nn.Module:
    """A model in fp32 on the CPU whose adapter's numbers are not zero."""
    given = {"_component_": "transformers", "lora_rank": 4, "lora_alpha": 8, **block}
    with torch.device("meta"):
        model = models.empty_module(given, folder)
    model = model.to_empty(device="cpu")
    model.fill_buffers(torch.device("cpu"))
    nf4.fill_tables(model)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        value = torch.randn(nf4.dense_shape(parameter)) * 0.05
        own = nf4.quantise(value) if nf4.is_packed(parameter) else value
        parameter.data.copy_(own)
        if not nf4.is_packed(parameter):
            # The embedding's gradient is made of those of the first layers' inputs.
            parameter.requires_grad_(model.is_adapter(name) or parameter.shape[0] == 1024)
    activations.prepare(model, SimpleNamespace(**NO | keys))
    return model


def layers_of(model: torch.nn.Module) -> dict[str, LowRankLinear]:
    modules = ((plain_name(name), module) for name, module in model.named_modules())
    return {name: module for name, module in modules if isinstance(module, LowRankLinear)}


def results(model: torch.nn.Module) -> list[torch.Tensor]:
    """Output, and the gradients of A, B, magnitudes and the embedding."""
    out = model(Inputs(TOKENS))
    model.zero_grad()
    (out * torch.linspace(-1, 1, out.shape[-1])).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    return [out.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_same_as_layer_by_layer(case, model_folder, monkeypatch):
    block, groups, keys = CASES[case]
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        model = build(model_folder, block, keys)
        layers = layers_of(model)
        shared = {layer.together for layer in layers.values() if layer.together is not None}
        names = {id(layer): name.rpartition(".")[2] for name, layer in layers.items()}
        found = [{names[id(layer)] for layer in each.layers} for each in shared]
        assert sorted(map(sorted, found)) == sorted(map(sorted, groups * len(model.blocks)))
        if not groups:
            return
        own = results(model)
        assert all(each.x is None and not each.parts for each in shared), "nothing is kept"
    other = build(model_folder, block, NO)
    for layer in layers_of(other).values():
        layer.together = None
    for one, wanted in zip(own, results(other), strict=True):
        assert (one - wanted).abs().max() <= 1e-6 * max(1.0, wanted.abs().max())
    with disabled(model), disabled(other), torch.no_grad():
        assert torch.equal(model(Inputs(TOKENS)), other(Inputs(TOKENS)))


def test_other_tensors_other_ranks_and_a_second_call_are_right_too():
    """As in a model whose layers do not read what they read when it was built."""
    torch.manual_seed(0)
    layers = [LowRankLinear(torch.nn.Linear(8, 6), rank, 2 * rank) for rank in (2, 3)]
    for layer in layers:
        torch.nn.init.normal_(layer.lora_b.weight)
    inputs = [torch.randn(5, 8) for _ in range(2)]
    wanted = [[layer(x) for x in inputs] for layer in layers]
    share(layers)
    together = layers[0].together
    for calls in ([(0, 0), (1, 0)], [(1, 0), (0, 1)], [(0, 0), (0, 0)], [(1, 1), (0, 1), (1, 1)]):
        for layer, x in calls:
            torch.testing.assert_close(layers[layer](inputs[x]), wanted[layer][x])
    layers[0](inputs[1])
    assert together.x is None and not together.parts
