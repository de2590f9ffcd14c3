"""Sizes of models for tests: those of the demo recipe's model, and of one with experts."""

from dataclasses import replace

from runspec.description import PUBLISHED, SHIPPED, Subject
from runspec.shape import Attention, Block, Matrix, Shape, Vector

# Mixtral 8x7B's config.json as on the hub, without what no size comes from.
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}


def published(name: str) -> Shape:
    """The shipped shape of a model in configs/shapes."""
    found = Subject({}, PUBLISHED / name).find(SHIPPED)
    assert found is not None, f"no description of {name}: python -m trainer.describe"
    return found


def with_experts(block: Block, count: int, active: int, width: int, shared: int = 0) -> Block:
    """The block with experts, and an MLP beside them, in place of its MLP."""
    matrices = {name: m for name, m in block.matrices.items() if m.part != "mlp"}
    dim = block.matrices["q"].inputs
    matrices["router"] = Matrix("router", "replicated", dim, count)
    matrices["gate_up"] = Matrix("experts", "expert", dim, 2 * width, count, active)
    matrices["down"] = Matrix("experts", "expert", width, dim, count, active)
    if shared:
        matrices |= {n: Matrix("shared", "column", dim, shared) for n in ("shared_w1", "shared_w3")}
        matrices["shared_w2"] = Matrix("shared", "row", shared, dim)
    return replace(block, matrices=matrices)


def demo() -> Shape:
    """The shape of the demo recipe's model, by hand."""
    matrices = {
        "q": Matrix("attention", "column", 128, 128),
        "k": Matrix("attention", "column", 128, 64),
        "v": Matrix("attention", "column", 128, 64),
        "o": Matrix("attention", "row", 128, 128),
        "w1": Matrix("mlp", "column", 128, 512),
        "w3": Matrix("mlp", "column", 128, 512),
        "w2": Matrix("mlp", "row", 512, 128),
    }
    norm = Vector(128, features=128)
    block = Block(matrices, (norm, norm), Attention(4, 2, 32, 32, held=64))
    return Shape(128, 1024, 512, (block,), (0, 0, 0), table=512 * 32)
