"""Models of transformers' code against transformers, PEFT and a plain loop, in every layout."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from plugins.estimate.launcher.model_flops import of_shape
from tests.trainer.models.transformers_cases import (
    FAMILIES,
    LARGER,
    SIZES,
    reference,
    write,
    write_larger,
)
from tests.trainer.models.transformers_runs import (
    ADAPTED,
    AUXILIARY,
    BY_OPERATION,
    CHECKPOINTED,
    COPIES,
    EP,
    FULL,
    HALF,
    LORA,
    TOKENS,
    TP,
    Bases,
    Layouts,
    assert_equals_transformers,
    assert_peft_agrees,
    config_of,
    runs_of,
    write_sources,
)
from tests.trainer.runs import assert_same_curve, assert_same_tensors, randomise_adapter, tensors
from trainer import check
from trainer.checkpoint import export as exports
from trainer.config import load, read_yaml
from trainer.describe import of_block
from trainer.inference.loading import language_model
from trainer.layers.batch import MicroBatch
from trainer.layers.loss import TokenLoss
from trainer.methods.sft import SupervisedFineTuning
from trainer.metrics import model_flops
from trainer.model import Decoder, Inputs
from trainer.models import build as models


@pytest.fixture(scope="module")
def sources(tmp_path_factory, model_folder):
    return write_sources(tmp_path_factory.mktemp("families"), model_folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_and_export_is_exact(family, tmp_path, sources, dataset, world):
    config = load(config_of(tmp_path, sources[family], dataset))
    model = models.build(config, world)
    assert_equals_transformers(model, config, world)
    _assert_shape(sources[family], model.module)


def _assert_shape(source: Path, module: Decoder) -> None:
    """Its description has the sizes and FLOPs that the model has."""
    shape = of_block({}, source)
    assert shape.parameters == sum(p.numel() for p in module.parameters())
    assert model_flops(module) == of_shape(shape, True, {})


# What has a backward pass of this trainer's own: experts of each layout, the delta rule. Attention
# with windows and scaled embeddings stands for the others, whose layers are transformers'.
OWN_BACKWARD = ("qwen3-moe", "gpt-oss", "deepseek-v3", "llama4", "qwen3.5-moe")


@pytest.mark.parametrize(
    "family", ["gemma3", *(pytest.param(f, marks=pytest.mark.long) for f in OWN_BACKWARD)]
)
def test_losses_and_gradients_equal_a_plain_loops(family, tmp_path, sources, dataset, world):
    """20 steps on two rows, without full logits here and with transformers' own loss there.

    Before each step both have the same weights. Two loops of their own would part: AdamW gives the
    rounding of a gradient near zero a whole step, and at a tie a router chooses another expert.
    """
    config = load(config_of(tmp_path, sources[family], dataset))
    loss = TokenLoss(config)
    ours = models.build(config, world).module
    theirs = reference(sources[family]).train()
    labels = TOKENS.roll(-1, 1)
    labels[:, -1] = -100
    labels[0, :20] = -100
    trained = (labels.flatten() != -100).nonzero().flatten()
    count = len(trained)
    owners, numbers = torch.zeros_like(trained), torch.zeros(1)
    counts = TOKENS.numel(), count
    batch = MicroBatch(
        Inputs(TOKENS), labels, trained, *counts, (1,), owners, torch.arange(1), numbers
    )
    step = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    own = {n.replace("final_norm", "model.norm"): p for n, p in ours.named_parameters()}
    losses: list[float] = []
    for _ in range(20):
        found = loss(ours, batch, world.device) / count
        wanted = theirs(TOKENS, labels=labels, shift_labels=labels).loss
        assert found.item() == pytest.approx(wanted.item(), abs=5e-6)
        found.backward()
        wanted.backward()
        losses.append(wanted.item())
        gradients = {n: p.grad for n, p in theirs.named_parameters()}
        assert own.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(own[name].grad, gradient, rtol=0, atol=1e-5)
        step.step()
        step.zero_grad()
        ours.zero_grad()
        with torch.no_grad():
            for name, value in theirs.named_parameters():
                own[name].copy_(value)
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize(
    ("family", "use_dora"),
    [(name, False) for name in ("qwen3", "gemma2", "gemma3", "phi4-mini", "granite", "mixtral")]
    + [("qwen2.5", True), ("phi4-mini", True)]
    + [
        pytest.param(name, False, marks=pytest.mark.long)
        for name in ("llama3-tied", "mistral", "gpt-oss", "deepseek-v3", "qwen3.5")
    ],
)
def test_the_adapter_in_peft_gives_the_merged_models_logits(
    family, use_dora, tmp_path, sources, dataset, world, capsys
):
    adapter = "dora" if use_dora else "lora"
    block = LORA | {"_component_": "transformers", "adapter": adapter}
    if family == "deepseek-v3":
        # PEFT 0.21 takes the layers of the dense and the shared MLPs for experts.
        whole = load(config_of(tmp_path / "whole", sources[family], dataset, model=block))
        exports.export(models.build(whole, world), whole, world)
        assert "PEFT 0.21 does not load export/adapter" in capsys.readouterr().out
        block["lora_modules"] = ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj", "experts"]
    config = load(config_of(tmp_path, sources[family], dataset, model=block))
    assert_peft_agrees(models.build(config, world), config, world)
    assert "PEFT 0.21" not in capsys.readouterr().out


@pytest.mark.parametrize("name", LARGER)
def test_the_text_part_of_a_larger_model(name, tmp_path, dataset, world):
    """Its tensors among the others of the folder, which the export has as they were."""
    from peft import PeftModel

    source = write_larger(name, tmp_path / "source")
    whole = AutoModelForImageTextToText.from_pretrained(source, attn_implementation="eager").eval()
    assert type(language_model(source, "auto", world.device)) is type(whole)
    spread = language_model(source, "auto", world.device, spread=True)
    with torch.inference_mode():
        torch.testing.assert_close(spread(TOKENS).logits, whole(TOKENS).logits)
    config = load(config_of(tmp_path, source, dataset, model=LORA))
    model = models.build(config, world)
    assert set(model.module.linear_layers()) <= dict(whole.named_modules()).keys()
    with torch.inference_mode():
        torch.testing.assert_close(
            model.module(Inputs(TOKENS)), whole(TOKENS).logits, rtol=0, atol=1e-5
        )
    unchanged = exports.export(model, config, world)
    before, after = tensors(source), tensors(unchanged)
    assert any("vision" in key or "visual" in key for key in before)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    randomise_adapter(model.module)
    with torch.no_grad():
        trained = model.module(Inputs(TOKENS))
    folder = exports.export(model, config, world)
    with torch.inference_mode():
        adapted = PeftModel.from_pretrained(whole, folder / "adapter").eval()(TOKENS).logits
    torch.testing.assert_close(adapted, trained, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "settings", "told"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "it has bidirectional attention"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type dyna"),
        ("llama", {"num_attention_heads": "four"}, "is refused by transformers"),
        ("qwen3_vl", {"text_config": {}}, "for the text part of the qwen3_vl model"),
        ("falcon_h1", {}, "it has layers of hybrid, which is not supported yet"),
        ("stablelm", {}, "do not hand the documents of packed rows to their attention"),
        ("gpt2", {}, "its code has no layers"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_config_json(
    kind, settings, told, tmp_path, dataset, model_folder
):
    """By `cookbook check`, which asks trainer.check; weights are not looked at."""
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": kind, **SIZES, **settings}))
    (source / "model.safetensors").symlink_to(model_folder / "model.safetensors")
    faults = check.faults(read_yaml(config_of(tmp_path, source, dataset)), SupervisedFineTuning)
    assert any(told in fault for fault in faults), faults


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("cohere2", TP, "cannot be split: model.layers.*.input_layernorm is no RMSNorm; set ten"),
        (
            "qwen3",
            {"model": {"lora_modules": ["q_proj"]}},
            "model.lora_modules: needs model.lora_r",
        ),
        ("qwen3", {"model": {"head_dim": 16}}, "model.head_dim: is an argument of no model that"),
        (
            "qwen3-moe",
            {"model": LORA | {"quantize_base": True}},
            "has layers with 48 inputs; set model.quantize_base=False",
        ),
        ("mixtral", {"model": LORA | {"adapter": "dora"}}, "model.lora_modules=[k_proj,o_proj,q_p"),
        ("qwen3", EP, "expert_parallel_dim: this model has no experts; set expert_parallel_dim=1"),
        ("qwen3.5", {"tensor_parallel_dim": 4}, "the model's linear_num_key_heads 2: choose"),
        ("qwen3", AUXILIARY, "router_aux_loss_coef: this model has no routers of experts that it"),
        ("mixtral", {"expert_parallel_dim": 3}, "does not divide the model's 4 experts"),
    ],
)
def test_what_a_family_cannot_do_is_refused(family, changes, told, tmp_path, sources, dataset):
    faults = check.faults(
        read_yaml(config_of(tmp_path, sources[family], dataset, **changes)), SupervisedFineTuning
    )
    assert any(told in fault for fault in faults), faults


def test_linear_attention_of_another_kind_is_neither_packed_nor_split(tmp_path, sources, dataset):
    source = write("qwen3.5", tmp_path / "source", sources["llama3"], hidden_act="gelu")
    config = config_of(tmp_path / "run", source, dataset, row_length=64, **TP)
    faults = check.faults(read_yaml(config), SupervisedFineTuning)
    assert [fault.partition(":")[0] for fault in faults] == [
        "tensor_parallel_dim",
        "dataset.packed",
    ]
    assert (
        check.faults(read_yaml(config_of(tmp_path / "run", source, dataset)), SupervisedFineTuning)
        == []
    )


# The families differ in what the layouts must get right: norms of heads; scaled embeddings and
# norms with an offset; multipliers of embedding and logits; fused rows; linear attention.
BASES: Bases = {
    "qwen3": ADAPTED | {"family": "qwen3"},
    # Biases and windows; soft caps.
    "qwen2.5": ADAPTED | {"family": "qwen2.5"},
    "gemma2": FULL | {"family": "gemma2"},
    "gemma3": FULL | {"family": "gemma3"},
    # A length of packed rows that tensor parallelism must add to.
    "granite": FULL | {"family": "granite", "row_length": 95},
    "phi4-mini": FULL | {"family": "phi4-mini"},
    "qwen3.5": FULL | {"family": "qwen3.5"},
}
LAYOUTS: Layouts = {
    "qwen3-tp2": (2, TP),
    "qwen3-hsdp": (4, COPIES),
    "qwen2.5-tp2": (2, TP),
    "gemma2-tp2": (2, TP),
    "gemma2-fsdp2": (2, HALF | CHECKPOINTED),
    "qwen3-fsdp2": (2, HALF | BY_OPERATION | {"compile": True}),
    "qwen3-tp2-fsdp2": (4, TP | HALF | CHECKPOINTED | {"enable_activation_offloading": True}),
    "gemma3-tp2": (2, TP | CHECKPOINTED),
    "granite-tp2": (2, TP),
    "phi4-mini-fsdp2": (2, HALF),
    "phi4-mini-tp2": (2, TP | {"compile": True}),
    "qwen3.5-fsdp2": (2, HALF | CHECKPOINTED),
    "qwen3.5-tp2": (2, TP | {"compile": True}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, sources, dataset):
    return runs_of(tmp_path_factory.mktemp("runs"), sources, dataset, BASES, LAYOUTS)


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_equals_the_single_process(name, runs):
    runs.assert_same(name, weights=5e-5)


SPLIT = ("gemma4", "glm4", "olmo2", "exaone4", "smollm3", "glm4.5-moe", "granite-moe", "llama4")
SPLIT += ("qwen3.5", "qwen3-next", "qwen3.5-moe")


@pytest.mark.named
@pytest.mark.parametrize("family", SPLIT)
def test_other_families_under_tensor_parallelism_equal_the_single_process(
    family, tmp_path, sources, dataset
):
    # A single head of keys in some layers cannot be split.
    heads = {"num_key_value_heads": 4, "num_global_key_value_heads": 2}
    sizes = heads if family == "gemma4" else {}
    own = {family: write(family, tmp_path / "source", sources["llama3"], **sizes)}
    bases = {"full": FULL | {"family": family}, "lora": ADAPTED | {"family": family}}
    layouts = {"full-tp2": (2, TP | CHECKPOINTED), "lora-tp2": (2, TP)}
    runs = runs_of(tmp_path / "runs", own, dataset, bases, layouts)
    runs.assert_same("full-tp2", weights=5e-5)
    # Not that the loss falls: Granite MoE's adapters learn nothing in four steps.
    assert_same_curve(runs["lora-tp2"], runs["lora"], 2e-5, 1e-4)
    assert_same_tensors(runs["lora-tp2"], runs["lora"], 5e-5)
