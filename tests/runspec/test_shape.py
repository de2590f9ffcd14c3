"""Shapes of models as they are shipped, and how a description is found."""

import json
from dataclasses import replace

import pytest

from runspec.description import PUBLISHED, SHIPPED, Subject, base_of, config_file
from runspec.shape import Shape
from tests.model_sizes import demo, published, with_experts

# The hub's own counts of the published models.
PARAMETERS = {
    "Llama-3.1-8B-Instruct": 8_030_261_248,
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
    "Llama-2-13b-hf": 13_015_864_320,
    "Llama-2-70b-hf": 68_976_648_192,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B-Instruct": 70_553_706_496,
    "Llama-3.2-1B-Instruct": 1_235_814_400,
    "Llama-3.2-3B-Instruct": 3_212_749_824,
    "Llama-3.3-70B-Instruct": 70_553_706_496,
    "Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen2.5-72B-Instruct": 72_706_203_648,
    "gemma-2-9b-it": 9_241_705_984,
    "phi-4": 14_659_507_200,
    # Not published: what trainer/demo.py and plugins/rl/demo_sums.py make.
    "demo-llama": 1_000_320,
    "demo-sums": 75_840,
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


def test_the_published_shapes_have_the_published_parameters():
    for name, parameters in PARAMETERS.items():
        shape = published(name)
        assert shape.parameters == parameters, name
        active = ACTIVE.get(name, parameters / 1e9)
        assert shape.active_parameters / 1e9 == pytest.approx(active, abs=0.06), name
    files = {file.stem: json.loads(file.read_text()) for file in PUBLISHED.glob("*.json")}
    # The others are the classes' own defaults, by their model_type.
    defaults = {name for name, content in files.items() if content == {"model_type": name}}
    assert files.keys() == PARAMETERS.keys() | defaults


def test_a_folder_that_is_there_counts_even_without_the_file(tmp_path):
    assert config_file(tmp_path / "Qwen3-8B").parent == PUBLISHED
    (tmp_path / "Qwen3-8B").mkdir()
    assert config_file(tmp_path / "Qwen3-8B") is None


def test_the_matrices_of_a_dense_model_and_their_roles():
    qwen = published("qwen2")
    found = {name: (m.part, m.role, m.bias) for name, m in qwen.kinds[0].matrices.items()}
    assert found == {
        "self_attn.q_proj": ("attention", "column", True),
        "self_attn.k_proj": ("attention", "column", True),
        "self_attn.v_proj": ("attention", "column", True),
        "self_attn.o_proj": ("attention", "row", False),
        "mlp.gate_proj": ("mlp", "column", False),
        "mlp.up_proj": ("mlp", "column", False),
        "mlp.down_proj": ("mlp", "row", False),
    }


def test_a_shape_with_experts_has_their_parameters():
    """Mixtral 8x7B: 46.7 billion parameters, of which a token meets 12.9."""
    shape = published("mixtral")
    assert shape.experts == (8,)
    assert shape.parameters == 46_702_792_704
    assert shape.active_parameters == 12_879_925_248
    sparse = with_experts(demo().kinds[0], 8, 2, 256, shared=64)
    assert sparse.inside("shared") == 64 and sparse.inside("experts") == 256
    assert not sparse.matrices["shared_w2"].is_split


def test_blocks_that_differ_are_told_apart():
    deepseek = published("DeepSeek-V3-bf16")
    assert [(len(block.experts), n) for block, n in deepseek.blocks] == [(0, 3), (2, 58)]
    assert deepseek.order[:5] == (0, 0, 0, 1, 1) and len(deepseek.order) == 61
    qwen = published("Qwen3.5-27B")
    assert [(bool(block.delta), n) for block, n in qwen.blocks] == [(True, 48), (False, 16)]
    assert qwen.order[:5] == (0, 0, 0, 1, 0)
    gemma = published("gemma-3-12b-it")
    assert [(block.attention.window, n) for block, n in gemma.blocks] == [(1024, 40), (None, 8)]
    # Cut to fewer layers it keeps the order of their kinds.
    assert [count for _, count in deepseek.cut(5).blocks] == [3, 2]


def test_a_description_is_kept_and_found_by_what_it_is_of(tmp_path):
    shape, versions = (
        replace(demo(), unsplit=("a reason",), wide_norms=False),
        {"transformers": "1"},
    )
    subject = Subject({"lora_rank": 8}, PUBLISHED / "demo-llama")
    subject.keep(tmp_path, shape.as_json(), versions)
    assert subject.find(tmp_path) == shape
    fits = {("transformers", "1")}
    assert subject.find(tmp_path, lambda *made_with: made_with in fits) == shape
    assert subject.find(tmp_path, lambda *made_with: made_with not in fits) is None
    other = Subject({}, PUBLISHED / "demo-sums")
    assert other.find(tmp_path) is None
    assert Shape.of(json.loads(json.dumps(shape.as_json()))) == shape


def test_adapters_and_quantisation_change_no_base_model():
    adapter = {"lora_rank": 8, "lora_modules": ["q_proj"], "adapter": "dora", "quantize_base": True}
    assert base_of({"_component_": "mine.model", "layers": 2, **adapter}) == {
        "_component_": "mine.model",
        "layers": 2,
    }
    found = Subject(adapter, PUBLISHED / "Llama-3.1-8B").find(SHIPPED)
    assert found.parameters == 8_030_261_248
