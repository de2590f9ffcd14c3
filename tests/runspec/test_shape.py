"""Shapes of models from their config.json, with and without experts."""

import json
from dataclasses import replace

import pytest

from runspec import shape as shapes
from runspec.shape import (
    Experts,
    Shape,
    ShapeError,
    config_file,
    of_builder_arguments,
    of_config_json,
)
from tests.model_sizes import DEMO, MIXTRAL

# As on the hub, without what no size comes from.
QWEN = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "experts_per_token": 4,
    "num_experts_per_tok": 4,
    "num_local_experts": 32,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
}
QWEN_MOE = QWEN | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
DEEPSEEK = QWEN | {"model_type": "deepseek_v3", "n_routed_experts": 256, "n_shared_experts": 1}


def test_a_dense_models_sizes_and_parameters():
    shape = of_config_json(QWEN)
    assert shape.tied and shape.qkv_bias and shape.whole_rotary and shape.head_dim == 64
    # The hub's own count of Qwen2.5-0.5B.
    assert shape.parameters == 494_032_768
    assert {name: matrix.role for name, matrix in shape.matrices.items()} == {
        "q_proj": "column",
        "k_proj": "column",
        "v_proj": "column",
        "output_proj": "row",
        "gate_proj": "column",
        "up_proj": "column",
        "down_proj": "row",
    }
    # Older files do not say how many heads keys have: as many as queries.
    old = {key: value for key, value in QWEN.items() if key != "num_key_value_heads"}
    assert of_config_json(old).kv_heads == 14
    with pytest.raises(ShapeError, match="does not say num_hidden_layers, vocab_size: give the"):
        of_config_json(QWEN | {"num_hidden_layers": None, "vocab_size": None})


# The hub's own counts of the published models.
PUBLISHED = {
    "TinyLlama-1.1B-intermediate-step-1431k-3T": 1_100_048_384,
    "open_llama_3b": 3_426_473_600,
    "open_llama_7b": 6_738_415_616,
    "open_llama_13b": 13_015_864_320,
    "Mistral-Small-24B-Instruct-2501": 23_572_403_200,
    "Phi-4-mini-instruct": 3_836_021_760,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-8B": 8_190_735_360,
    "SmolLM3-3B": 3_075_098_624,
    "gemma-3-1b-it": 999_885_952,
    # Without the part for images.
    "gemma-3-12b-it": 11_766_034_176,
    "gemma-3-27b-it": 27_009_346_304,
}


def test_the_published_shapes_have_the_published_parameters(tmp_path):
    for name, parameters in PUBLISHED.items():
        file = config_file(tmp_path / name)
        assert of_config_json(json.loads(file.read_text())).parameters == parameters, name
    assert {file.stem for file in shapes.PUBLISHED.glob("*.json")} == PUBLISHED.keys()
    # A folder that is there counts, even if it lacks the file.
    (tmp_path / "Qwen3-8B").mkdir()
    assert config_file(tmp_path / "Qwen3-8B") is None


@pytest.mark.parametrize(
    ("content", "count"),
    [
        (MIXTRAL, "num_local_experts 8"),
        (GPT_OSS, "num_local_experts 32"),
        (QWEN_MOE, "num_experts 128"),
        (DEEPSEEK, "n_routed_experts 256"),
        (QWEN | {"text_config": {"num_local_experts": 16}}, "num_local_experts 16"),
        (QWEN | {"ffn_config": {"moe_num_experts": 16}}, "moe_num_experts 16"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_experts_are_refused(content, count):
    with pytest.raises(ShapeError, match=rf"\({count}\), and its experts are not known"):
        of_config_json(content)
    # A dense model of a family that has experts, too, may say so.
    assert of_config_json(QWEN | {"num_experts": 0, "num_local_experts": 1}) == of_config_json(QWEN)


def test_a_shape_with_experts_has_their_parameters():
    """Mixtral 8x7B: 46.7 billion parameters, of which a token meets 12.9."""
    dense = {key: value for key, value in MIXTRAL.items() if key != "num_local_experts"}
    shape = replace(of_config_json(dense), experts=Experts(8, 2, 14336))
    assert shape.parameters == 46_702_792_704
    idle = sum(each.parameters - each.active_parameters for each in shape.matrices.values())
    assert shape.parameters - shape.layers * idle == 12_879_925_248
    assert shape.matrices["experts.down_proj"].role == "expert"
    assert shape.matrices["router"].role == "replicated"
    shared = replace(shape, experts=Experts(8, 2, 14336, shared=1)).matrices
    assert shared["shared.gate_proj"].role == "column" and shared["shared.down_proj"].role == "row"


def test_a_component_builders_default_width():
    arguments = {key: value for key, value in DEMO.items() if key != "intermediate_dim"}
    assert of_builder_arguments(arguments, "llama3") == Shape(128, 3, 4, 2, 32, 512, 1024, 512)
    assert of_builder_arguments({"num_layers": 3}, "llama3") is None
