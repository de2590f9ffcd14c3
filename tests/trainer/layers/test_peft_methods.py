"""DoRA, QLoRA and QDoRA: against torchao and PEFT, in every layout, and resumed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from tests.trainer.runs import (
    LINEAR,
    Runs,
    assert_same_curve,
    assert_same_tensors,
    described,
    empty_model,
    lora_model,
    metrics,
    spec_of,
    write_config,
)
from trainer import config as configs
from trainer.demo import ARCHITECTURE
from trainer.errors import ConfigError
from trainer.layers import linear, nf4
from trainer.layers.adapters import lora_linear
from trainer.layers.adapters.base import method
from trainer.models import build as models

FOLDER = {"_component_": "transformers"}
METHODS = {
    "dora": {"adapter": "dora", "lora_modules": [*LINEAR, "lm_head"]},
    "qlora": {"quantize_base": True},
    "qdora": {"adapter": "dora", "quantize_base": True},
}


def dequantised(weight: torch.Tensor) -> torch.Tensor:
    return nf4.dequantise(nf4.quantise(weight), nf4.table(), weight.dtype)


@pytest.fixture(scope="module")
def dequantised_folder(tmp_path_factory, model_folder):
    """The demo model with the weights of its blocks rounded to NF4, as plain fp32."""
    folder = shutil.copytree(model_folder, tmp_path_factory.mktemp("model") / "nf4")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "_proj" in name:
            tensors[name] = dequantised(tensor)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_nf4_is_torchaos_without_the_second_quantisation():
    """torchao rounds the code table to 4 digits and the scales to 8 bits of their spread."""
    from torchao.quantization import to_nf4

    torch.manual_seed(0)
    weight = (torch.randn(512, 256) * 0.02).bfloat16().float()
    packed = nf4.quantise(weight)
    assert packed.shape == (512, 4, 34) and packed.dtype == torch.uint8
    assert packed.numel() / weight.numel() <= 0.54

    other = to_nf4(weight)
    codes = other.quantized_data.view(512, 4, 32)
    assert (packed[..., :32] == codes).float().mean() > 0.999
    ours, theirs = dequantised(weight), other.get_original_weight()
    scales = weight.view(512, 4, 64).abs().amax(2)
    spread = (scales - scales.mean()).abs().max() / 128
    alike = (packed[..., :32] == codes).repeat_interleave(2, 2).view(512, 256)
    # 1e-4: the table's digits times the largest weight, and the mean's rounding.
    assert (ours - theirs)[alike].abs().max() < spread + 1e-4 * scales.max()
    # The scale of a bf16 weight is exact: its largest weights come back as they were.
    blocks = weight.view(512, 4, 64)
    largest = blocks.abs().argmax(2, keepdim=True)
    assert torch.equal(ours.view_as(blocks).gather(2, largest), blocks.gather(2, largest))
    assert torch.equal(dequantised(ours), ours)


def test_nf4_values_are_the_same_however_many_are_computed_at_a_time(monkeypatch):
    weight = torch.randn(7, 96, 128, generator=torch.Generator().manual_seed(0))
    packed, table = nf4.quantise(weight), nf4.table()
    whole = [nf4.dequantise(part, table, torch.bfloat16) for part in (packed, packed[0])]
    for number in (2 * 96 * 128, 1000):
        monkeypatch.setattr(nf4, "AT_A_TIME", number)
        parts = [nf4.dequantise(part, table, torch.bfloat16) for part in (packed, packed[0])]
        assert all(torch.equal(*pair) for pair in zip(whole, parts, strict=True))


def test_blocks_take_zeros_parts_and_bytes_that_were_cast():
    torch.manual_seed(0)
    weight = torch.randn(8, 256)
    weight[2, 64:128] = 0
    packed, table = nf4.quantise(weight), nf4.table()
    assert torch.equal(dequantised(weight)[2, 64:128], torch.zeros(64))
    assert torch.equal(nf4.quantise(weight[2:5, 128:]), packed[2:5, 2:])
    for dtype in (torch.bfloat16, torch.float32):
        cast = packed.to(dtype)
        assert torch.equal(nf4.dequantise(cast, table, dtype), nf4.dequantise(packed, table, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_code_computes_the_same_bits(dtype):
    """Of every byte of codes, with scales of many sizes: zero, and so small that bf16 rounds."""
    codes = torch.arange(256, dtype=torch.uint8).unflatten(0, (2, 4, 32))
    scale = torch.tensor([0, 1, -3, 1e-3, 7e4, 1e-38, 1e-40, torch.inf]).bfloat16().view(2, 4, 1)
    packed, table = torch.cat([codes, scale.view(torch.uint8)], -1), nf4.table()
    torch._dynamo.reset()
    compiled = torch.compile(nf4.dequantise, backend="aot_eager", fullgraph=True)
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    for given in (packed, packed[:1], packed.bfloat16()):
        found, wanted = (each(given, table, dtype) for each in (compiled, nf4.dequantise))
        assert found.shape == (len(given), 256) and found.dtype == dtype
        assert torch.equal(found.view(bits), wanted.view(bits))


def test_nf4_linear_keeps_only_the_packed_weight():
    torch.manual_seed(0)
    packed, table = nf4.quantise(torch.randn(96, 128)), nf4.table()
    dense = nf4.dequantise(packed, table, torch.float32)
    x = torch.randn(2, 5, 128, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        out = nf4.linear(x, packed, table)
    assert [tuple(t.shape) for t in kept] == [(96, 2, 34), (256, 2)]
    wanted = torch.nn.functional.linear(x, dense)
    assert torch.equal(out, wanted)
    gradient = torch.randn_like(out)
    found = torch.autograd.grad(out, x, gradient)[0]
    torch.testing.assert_close(found, torch.autograd.grad(wanted, x, gradient)[0])


def test_a_compiled_layer_keeps_no_dense_weight(tmp_path):
    """Both passes dequantise alike, and neither does it for the other."""
    model = empty_model(described(tmp_path), **lora_model(quantize_base=True))
    model.to_empty(device="cpu")
    model.fill_buffers(torch.device("cpu"))
    nf4.fill_tables(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
        if nf4.is_packed(parameter):
            parameter.copy_(nf4.quantise(torch.randn(nf4.dense_shape(parameter)) * 0.05))
        elif "norm" in name:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=0.05)
    layer, kept = model.blocks[0], []
    x = torch.randn(2, 24, ARCHITECTURE["hidden_size"], requires_grad=True)
    angles = {"position_embeddings": model.base.rotary_emb(x, torch.arange(24).unsqueeze(0))}
    layer(x, **angles).sum().backward()
    gradients = [x.grad, *(p.grad for p in layer.parameters() if p.requires_grad)]
    layer.zero_grad()
    x.grad = None
    torch._dynamo.reset()
    compiled = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        out = compiled(x, **angles)
    dense = {torch.Size(nf4.dense_shape(p)) for p in layer.parameters() if nf4.is_packed(p)}
    assert not dense & {shape for t in kept for shape in (t.shape, t.T.shape)}
    assert sum(nf4.is_packed(tensor) for tensor in kept) == 7
    assert all(t.is_floating_point() or nf4.is_packed(t) for t in kept), "no codes in int32"
    out.sum().backward()
    found = [x.grad, *(p.grad for p in layer.parameters() if p.requires_grad)]
    for own, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quantised", [False, True])
def test_dora_layer_is_pefts(quantised):
    """Outputs and gradients, away from the start, where B is not zero and m is not the norm."""
    torch.manual_seed(0)
    base = nn.Linear(128, 96, bias=False)
    if quantised:
        base.weight = nn.Parameter(dequantised(base.weight.detach()))
    settings = LoraConfig(r=4, lora_alpha=8, use_dora=True, target_modules=["0"])
    (layer,) = inject_adapter_in_model(settings, nn.Sequential(base))
    a, b = layer.lora_A["default"], layer.lora_B["default"]
    magnitude = layer.lora_magnitude_vector["default"].weight
    nn.init.normal_(b.weight, std=0.1)
    with torch.no_grad():
        magnitude += torch.randn(96) * 0.1
    x = torch.randn(2, 5, 128, requires_grad=True)
    moved = [x, a.weight, b.weight, magnitude]
    gradient = torch.randn(2, 5, 96)
    wanted = layer(x)
    wanted_gradients = torch.autograd.grad(wanted, moved, gradient)
    own = lora_linear.LowRankLinear(base, rank=4, alpha=8, use_dora=True)
    own.lora_a, own.lora_b, own.magnitude = a, b, magnitude
    if quantised:
        own.weight = nn.Parameter(nf4.quantise(base.weight), requires_grad=False)
        own.register_buffer("nf4_table", nf4.table())
    torch.testing.assert_close(lora_linear.row_norms(own), base.weight.norm(dim=1))
    found = own(x)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    found_gradients = torch.autograd.grad(found, moved, gradient)
    for one, other in zip(found_gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
    merged = nn.functional.linear(x, linear.merged(own, "weight", torch.float32))
    torch.testing.assert_close(merged, wanted, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model_folder, dequantised_folder, dataset):
    """Every method, and LoRA on the dequantised base."""

    def config(folder: Path, **changes: Any) -> Path:
        source = dequantised_folder if folder.name == "dense" else model_folder
        return write_config(folder, source, dataset, **changes)

    bases = {name: {"model": lora_model(**changes)} for name, changes in METHODS.items()}
    return Runs(
        tmp_path_factory.mktemp("runs"), config, bases | {"dense": {"model": lora_model()}}, LAYOUTS
    )


def test_over_a_quantised_base_it_is_lora_on_the_dequantised_one(runs):
    assert_same_curve(runs["qlora"], runs["dense"], 1e-6, 1e-5)
    assert_same_tensors(runs["qlora"], runs["dense"], 1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_adapter_in_peft_gives_the_merged_models_logits(
    name, runs, model_folder, dequantised_folder
):
    assert metrics(runs[name])[-1]["loss"] < metrics(runs[name])[0]["loss"]
    export = runs[name] / "export"
    settings = json.loads((export / "adapter/adapter_config.json").read_text())
    assert settings["use_dora"] is ("dora" in name)
    folder = dequantised_folder if name.startswith("q") else model_folder
    tokens = torch.arange(40).reshape(2, 20) * 13 % 1024
    with torch.inference_mode():
        base = AutoModelForCausalLM.from_pretrained(folder)
        plain = base(tokens).logits
        adapted = PeftModel.from_pretrained(base, export / "adapter").eval()(tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(export)(tokens).logits
    torch.testing.assert_close(adapted, merged, rtol=0, atol=2e-5)
    assert (adapted - plain).abs().max() > 1e-3, "the adapter must have learned something"


def test_parameters_count_as_many_weights_as_they_stand_for(runs, world):
    config = configs.load(runs["qlora"] / "train.yaml")
    model, plain = (
        models.build(replace(config, model=FOLDER | lora_model(**changes)), world)
        for changes in (METHODS["qlora"], {})
    )
    assert (model.method, plain.method) == ("QLoRA", "LoRA")
    assert model.parameter_counts() == plain.parameter_counts()
    names = model.module.linear_layers()
    assert len(names) == 3 * 7
    stored = sum(model.module.get_submodule(name).weight.nbytes for name in names)
    dense = sum(plain.module.get_submodule(name).weight.numel() for name in names)
    assert stored / dense <= 0.54


def test_what_may_have_a_base_in_4_bits(tmp_path):
    folder = described(tmp_path / "model")
    for block, wanted in (
        (METHODS["qlora"], "QLoRA"),
        (METHODS["qlora"] | {"quantize_base": False}, "LoRA"),
        (METHODS["qdora"], "QDoRA"),
    ):
        assert method(empty_model(folder, **lora_model(**block))) == wanted
    with pytest.raises(ConfigError, match="only adapters can be trained"):
        empty_model(folder, quantize_base=True)
    with pytest.raises(ConfigError, match=r"needs inputs in blocks of 64, .* with 96 inputs"):
        empty_model(
            described(tmp_path / "narrow", hidden_size=96), **lora_model(quantize_base=True)
        )


CHECKPOINTING = {"activation_checkpointing": "full"}
BOTH = {"tensor_parallel_dim": 2, "batch_size": 4}
# Layouts of METHODS: ranks, changes to the config.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "qlora-fsdp2": (2, {"batch_size": 2, "gradient_accumulation_steps": 2}),
    "qlora-tp2": (2, {"tensor_parallel_dim": 2} | CHECKPOINTING),
    "dora-tp2-fsdp2": (4, BOTH),
    "qdora-tp2-fsdp2": (4, BOTH | CHECKPOINTING),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_equals_the_single_process(name, runs):
    runs.assert_same(name)
    assert "arning" not in runs.said[name]


def test_blocks_that_the_ranks_do_not_divide_are_refused(tmp_path):
    given = lora_model(quantize_base=True)
    model = empty_model(described(tmp_path), **given)
    spec = spec_of(given, tensor_parallel_dim=4)
    found = models.layout_faults(model, spec)
    assert any(
        "tensor_parallel_dim 4 does not divide 2 blocks of 64 inputs: " in fault for fault in found
    )
