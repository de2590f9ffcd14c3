"""Every model family against transformers: logits, export, adapters; and split over two ranks."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from tests.trainer.models import transformers_cases
from tests.trainer.models.transformers_cases import LLAMA3, WINDOW
from tests.trainer.models.transformers_runs import assert_equals_transformers, assert_peft_agrees
from tests.trainer.runs import Runs, write_config
from trainer.checkpoint import export as exports
from trainer.config import load
from trainer.errors import ConfigError
from trainer.model import Decoder
from trainer.models import build as models

SIZES = {
    "vocab_size": 1024,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 64,
    "intermediate_dim": 88,
    "max_seq_len": 256,
}
HF_SIZES = transformers_cases.SIZES | {"intermediate_size": 88}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
GEMMA2 = {
    "head_dim": 20,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 2.5,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    **WINDOW,
}
GEMMA2_BUILDER = {
    "head_dim": 20,
    "query_pre_attn_scalar": 24,
    "hidden_capping_value": 1.5,
    "final_capping_value": 2.5,
    "sliding_window_size": 16,
}


YARN = {"rope_type": "yarn", "factor": 2.0}


def theta(base: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base}}


# name: transformers' model type and numbers; torchtune's package, builder's numbers, model type
CASES: dict[str, tuple[str, dict, str, dict, str]] = {
    "llama2": (
        "llama",
        {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, **theta(10_000.0)},
        "llama2.llama2",
        {"num_kv_heads": 4},
        "LLAMA2",
    ),
    "llama3": (
        "llama",
        {"rms_norm_eps": 1e-5, **theta(500_000.0)},
        "llama3.llama3",
        {},
        "LLAMA3",
    ),
    "llama3_1": (
        "llama",
        {"rms_norm_eps": 1e-5, "rope_parameters": LLAMA3},
        "llama3_1.llama3_1",
        {"scale_factor": 4},
        "LLAMA3",
    ),
    "llama3_2": (
        "llama",
        {"rms_norm_eps": 1e-5, "rope_parameters": LLAMA3, "tie_word_embeddings": True},
        "llama3_2.llama3_2",
        {"scale_factor": 4},
        "LLAMA3_2",
    ),
    "mistral": (
        "mistral",
        {"rms_norm_eps": 1e-5, **WINDOW, **theta(10_000.0)},
        "mistral.mistral",
        {},
        "MISTRAL",
    ),
    "qwen2": (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 1, **WINDOW, **theta(1_000_000.0)},
        "qwen2.qwen2",
        {"norm_eps": 1e-6},
        "QWEN2",
    ),
    "qwen2-tied": (
        "qwen2",
        {"tie_word_embeddings": True, **theta(1_000_000.0)},
        "qwen2.qwen2",
        {"norm_eps": 1e-6, "tie_word_embeddings": True},
        "QWEN2",
    ),
    "gemma2": ("gemma2", GEMMA2, "gemma2.gemma2", GEMMA2_BUILDER, "GEMMA2"),
    "phi3": ("phi3", {**WINDOW, **theta(10_000.0)}, "phi3.phi3", {}, "PHI3_MINI"),
    "phi4": ("phi3", theta(250_000.0), "phi3.phi3", {"rope_base": 250_000}, "PHI4"),
}
LORA = {
    "lora_attn_modules": ["q_proj", "v_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 4,
    "lora_alpha": 8,
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A random model of each family as transformers makes and saves it, in several files."""
    root = tmp_path_factory.mktemp("sources")
    for name, (model_type, changes, *_) in CASES.items():
        torch.manual_seed(1)
        settings = AutoConfig.for_model(model_type, **(HF_SIZES | changes))
        model = AutoModelForCausalLM.from_config(settings)
        with torch.no_grad():
            for parameter in model.parameters():
                # Norms and biases start alike, and would not tell which is which.
                if parameter.dim() == 1:
                    parameter += 0.2 * torch.randn_like(parameter)
        model.save_pretrained(root / name, max_shard_size="100KB")
    return {name: root / name for name in CASES}


def builder(name: str, lora: dict[str, Any] | None = None) -> dict[str, Any]:
    """The `model` block of a case, plain or with LoRA."""
    package, _, component = CASES[name][2].rpartition(".")
    component = f"lora_{component}" if lora else component
    return {
        "_component_": f"torchtune.models.{package}.{component}",
        **SIZES,
        **CASES[name][3],
        **(lora or {}),
    }


def config_of(name: str, folder: Path, source: Path, dataset: Path, **changes: Any) -> Path:
    checkpointer = {"checkpoint_dir": str(source), "model_type": CASES[name][4]}
    changes = {"model": builder(name)} | changes
    return write_config(folder, source, dataset, checkpointer=checkpointer, **changes)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_and_export_is_exact(
    name, tmp_path, sources, dataset, world, monkeypatch
):
    config = load(config_of(name, tmp_path, sources[name], dataset))
    # Small files, so that the export has several and an index too.
    monkeypatch.setattr(exports, "MAX_SHARD_BYTES", 150_000)
    folder = assert_equals_transformers(models.build(config, world), config, world)
    assert len(list(folder.glob("*.safetensors"))) > 1


@pytest.mark.parametrize(
    ("name", "use_dora"),
    [(name, False) for name in ("llama3_2", "mistral", "qwen2", "gemma2", "phi3")]
    + [("phi3", True), ("gemma2", True)],
)
def test_the_adapter_in_peft_gives_the_merged_models_logits(
    name, use_dora, tmp_path, sources, dataset, world
):
    """With q and v alone adapted, so that a fused matrix has rows with and without an adapter."""
    block = builder(name, LORA | {"use_dora": use_dora})
    config = load(config_of(name, tmp_path, sources[name], dataset, model=block))
    assert_peft_agrees(models.build(config, world), config, world)


def fitted(block: dict[str, Any], hf_config: dict[str, Any]) -> tuple[Decoder, list[str]]:
    """An empty model made to fit a config.json, and what could not be made equal."""
    with torch.device("meta"):
        model = models.empty_module(block)
    return model, model.fit(hf_config, SimpleNamespace(model=block, checkpointer={}))


# The numbers of real models' config.json: hidden size, layers, heads, key-value heads, the others.
REAL: dict[str, tuple[str, tuple[int, int, int, int], dict[str, Any]]] = {
    "llama3_1.llama3_1_8b": (
        "llama",
        (4096, 32, 32, 8),
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
        },
    ),
    "mistral.mistral_7b": (
        "mistral",
        (4096, 32, 32, 8),
        {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "sliding_window": 4096},
    ),
    "qwen2_5.qwen2_5_0_5b": (
        "qwen2",
        (896, 24, 14, 2),
        {
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "sliding_window": 32768,
            "use_sliding_window": False,
        },
    ),
    "gemma2.gemma2_27b": (
        "gemma2",
        (4608, 46, 32, 16),
        {"head_dim": 128, "query_pre_attn_scalar": 144, "final_logit_softcapping": 30.0},
    ),
    "phi3.phi3_mini": ("phi3", (3072, 32, 32, 32), {"sliding_window": 2047}),
    "phi4.phi4_14b": ("phi3", (5120, 40, 40, 10), {"rope_theta": 250_000}),
}


@pytest.mark.parametrize("component", REAL)
def test_torchtunes_builders_fit_the_real_models(component):
    """Its Gemma 2 has the two soft caps the wrong way round, its Phi 4 the rotary base of Phi 3,
    and its Mistral and Phi 3 no window; what they cannot be told comes from config.json."""
    model_type, sizes, others = REAL[component]
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    hf_config = {"model_type": model_type, **dict(zip(keys, sizes, strict=True)), **others}
    module, faults = fitted({"_component_": f"torchtune.models.{component}"}, hf_config)
    assert faults == []
    assert module.layers[0].attn.pos_embeddings.base == others.get("rope_theta", 10_000)
    attention = module.layers[0].attn.core
    if model_type == "gemma2":
        assert (attention.softcap, module.output_softcap) == (50.0, 30.0)
        assert attention.scale == others.get("query_pre_attn_scalar", 256) ** -0.5
        assert module.layers[1].attn.core.window is None
    expected = None if model_type in ("llama", "qwen2") or "phi4" in component else 4096
    assert attention.window == others.get("sliding_window" * bool(expected), expected)


@pytest.mark.parametrize(
    ("name", "model", "settings", "fault"),
    [
        ("llama3", {}, {"model_type": "gpt2"}, "model_type 'gpt2', which is not supported; known"),
        ("llama3", {}, {"hidden_act": "gelu"}, "has activation silu, the model's config.json has"),
        ("llama3", {"norm_eps": 1e-6}, {}, "rms_norm_eps 1e-06, the model's config.json has 1e-05"),
        ("llama3", {}, {"rope_parameters": LLAMA3}, "has rope type default, the model's"),
        ("llama3_1", {"scale_factor": 8}, {}, "has factor 8, the model's config.json has 4.0; set"),
        ("mistral", {}, {"rope_parameters": YARN}, "has rope type 'yarn', which"),
        ("phi3", {}, {"rope_scaling": {"type": "longrope"}}, "refused by transformers: "),
        ("phi3", {}, {"rope_parameters": PARTIAL}, "has partial_rotary_factor 0.75, and only"),
        ("gemma2", {"hidden_capping_value": 50.0}, {}, "set model.hidden_capping_value=1.5"),
        ("gemma2", {"query_pre_attn_scalar": 16}, {}, "query_pre_attn_scalar 16.0, the model's"),
        ("gemma2", {"sliding_window_size": 8}, {}, "set model.sliding_window_size=16"),
        (
            "qwen2",
            {"_component_": "torchtune.models.llama3.llama3"},
            {},
            "has interleaved RoPE True",
        ),
        (
            "llama3",
            {"_component_": "torchtune.models.qwen2.qwen2"},
            {},
            "attn.q_proj.bias is missing",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    name, model, settings, fault, tmp_path, sources, dataset, world
):
    folder = tmp_path / "source"
    folder.mkdir()
    for file in sources[name].iterdir():
        (folder / file.name).symlink_to(file)
    hf_config = json.loads((folder / "config.json").read_text())
    if "rope_scaling" in settings:
        del hf_config["rope_parameters"]
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(hf_config | settings))
    path = config_of(name, tmp_path / "run", folder, dataset, model=builder(name) | model)
    with pytest.raises(ConfigError) as caught:
        models.build(load(path), world)
    assert any(fault in line for line in caught.value.faults), caught.value.faults
    assert len(caught.value.faults) < 15, "another model is told in a few lines"


def test_a_checkpointer_of_another_family_is_refused(tmp_path, sources, dataset, world):
    checkpointer = {"checkpoint_dir": str(sources["qwen2"]), "model_type": "LLAMA3"}
    path = write_config(
        tmp_path, sources["qwen2"], dataset, model=builder("qwen2"), checkpointer=checkpointer
    )
    with pytest.raises(ConfigError, match="LLAMA3 does not belong to the folder's qwen2 model; s"):
        models.build(load(path), world)


# Layouts meet a tied table and biases, norms with an offset, caps and windows, fused matrices.
TRAINED = [(name, lora) for name in ("qwen2-tied", "gemma2", "phi3") for lora in (None, LORA)]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one-tp": (2, {"tensor_parallel_dim": 2}),
    "one-fsdp": (2, {"batch_size": 4, "activation_checkpointing": "full"}),
}


@pytest.mark.long
@pytest.mark.parametrize(("name", "lora"), TRAINED)
def test_every_layout_trains_as_the_single_process(
    name, lora, tmp_path, sources, model_folder, dataset
):
    def config(folder: Path, **changes: Any) -> Path:
        path = config_of(name, folder, sources[name], dataset, **changes)
        content = yaml.safe_load(path.read_text())
        content["tokenizer"]["path"] = str(model_folder)
        path.write_text(yaml.safe_dump(content))
        return path

    sgd = {"_component_": "torch.optim.SGD", "lr": 0.1}
    base = {"model": builder(name, lora), "max_steps": 4, "optimizer": sgd}
    runs = Runs(tmp_path, config, {"one": base}, LAYOUTS)
    for layout in LAYOUTS:
        runs.assert_same(layout, norms=5e-5, weights=2e-5)
