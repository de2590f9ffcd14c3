"""Shapes of models from their config.json, with and without experts."""

import json
from dataclasses import replace

import pytest

from runspec.model_config import PUBLISHED as FOLDER
from runspec.model_config import ShapeError, config_file, of_builder_arguments, of_config_json
from runspec.shape import Experts, Shape
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
    "gemma-4-31B-it": 30_697_345_280,
    "Llama-4-Scout-17B-16E-Instruct": 107_769_861_120,
    "Ministral-3-8B-Instruct-2512-BF16": 8_489_553_920,
    # Of the hub's 27.8 and 36.0 billion the part for text, without that for images and the layer
    # that predicts further tokens.
    "Qwen3.5-27B": 26_895_998_464,
    "Qwen3.5-35B-A3B": 34_660_610_688,
    "Qwen3-30B-A3B": 30_532_122_624,
    # Without the layer that predicts further tokens.
    "GLM-4.5-Air": 106_852_245_504,
    "DeepSeek-V3-bf16": 671_026_404_352,
    "gpt-oss-20b-BF16": 20_914_757_184,
    "gpt-oss-120b-BF16": 116_829_156_672,
}
# As their cards have it, in billions, of those with experts: without the embedding for gpt-oss.
ACTIVE = {
    "Llama-4-Scout-17B-16E-Instruct": 17.2,
    "Qwen3.5-35B-A3B": 3.5,
    "Qwen3-30B-A3B": 3.3,
    "GLM-4.5-Air": 13.4,
    "DeepSeek-V3-bf16": 37.6,
    "gpt-oss-20b-BF16": 4.2,
    "gpt-oss-120b-BF16": 5.7,
}


def test_the_published_shapes_have_the_published_parameters(tmp_path):
    for name, parameters in PUBLISHED.items():
        file = config_file(tmp_path / name)
        shape = of_config_json(json.loads(file.read_text()))
        assert shape.parameters == parameters, name
        active = ACTIVE.get(name, parameters / 1e9)
        assert shape.active_parameters / 1e9 == pytest.approx(active, abs=0.06), name
    assert {file.stem for file in FOLDER.glob("*.json")} == PUBLISHED.keys()
    # A folder that is there counts, even if it lacks the file.
    (tmp_path / "Qwen3-8B").mkdir()
    assert config_file(tmp_path / "Qwen3-8B") is None


def test_experts_of_unknown_families_are_refused():
    for content, count in (
        (QWEN | {"num_local_experts": 8, "num_experts_per_tok": 2}, "num_local_experts 8"),
        (QWEN | {"ffn_config": {"moe_num_experts": 16}}, "moe_num_experts 16"),
    ):
        expected = rf"\({count}\), and those of a qwen2 model are not known"
        with pytest.raises(ShapeError, match=expected):
            of_config_json(content)
    # A dense model of a family that has experts, too, may say so.
    assert of_config_json(QWEN | {"num_experts": 0, "num_local_experts": 1}) == of_config_json(QWEN)
    with pytest.raises(ShapeError, match="does not say num_experts_per_tok"):
        of_config_json(MIXTRAL | {"num_experts_per_tok": None})


def test_a_shape_with_experts_has_their_parameters():
    """Mixtral 8x7B: 46.7 billion parameters, of which a token meets 12.9."""
    shape = of_config_json(MIXTRAL)
    assert shape.experts == Experts(8, 2, 14336)
    assert shape.parameters == 46_702_792_704
    assert shape.active_parameters == 12_879_925_248
    assert shape.matrices["experts.down_proj"].role == "expert"
    assert shape.matrices["router"].role == "replicated"
    shared = replace(shape, experts=Experts(8, 2, 14336, shared=512)).matrices
    assert shared["shared.gate_proj"].outputs == 512 and shared["shared.down_proj"].role == "row"


def test_blocks_that_differ_are_told_apart():
    def of(name):
        return of_config_json(json.loads((FOLDER / f"{name}.json").read_text()))

    deepseek = of("DeepSeek-V3-bf16")
    assert [(bool(block.experts), count) for block, count in deepseek.blocks] == [
        (False, 3),
        (True, 58),
    ]
    assert deepseek.order[:5] == (0, 0, 0, 1, 1) and len(deepseek.order) == 61
    qwen = of("Qwen3.5-27B")
    assert [(bool(block.linear), count) for block, count in qwen.blocks] == [
        (True, 48),
        (False, 16),
    ]
    assert qwen.order[:5] == (0, 0, 0, 1, 0)
    gemma = of("gemma-3-12b-it")
    assert [(block.window, count) for block, count in gemma.blocks] == [(1024, 40), (None, 8)]
    # Cut to fewer layers it keeps the order of their kinds.
    assert [count for _, count in replace(deepseek, layers=5).blocks] == [3, 2]


def test_a_component_builders_default_width():
    arguments = {key: value for key, value in DEMO.items() if key != "intermediate_dim"}
    assert of_builder_arguments(arguments, "llama3") == Shape(128, 3, 4, 2, 32, 512, 1024, 512)
    assert of_builder_arguments({"num_layers": 3}, "llama3") is None
