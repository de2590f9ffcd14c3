"""The shape of a decoder: every matrix with its role, and the sizes that follow from it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

# How tensor and expert parallelism split a matrix: column by its outputs, row by its inputs,
# replicated not at all, expert by whole experts; embedding and output by the vocabulary.
Role = Literal["column", "row", "replicated", "expert", "embedding", "output"]

# Configurations of models of the hub as published, by the folder's name.
PUBLISHED = Path(__file__).parents[1] / "configs" / "shapes"

ATTENTION = ("q_proj", "k_proj", "v_proj", "output_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


class ShapeError(ValueError):
    """The sizes of a model cannot be told; the text says why, without the file's name."""


@dataclass(frozen=True)
class Matrix:
    """A weight [outputs, inputs], or `count` of them, of which a token meets `active`."""

    inputs: int
    outputs: int
    role: Role
    count: int = 1
    active: int = 1

    @property
    def parameters(self) -> int:
        """Numbers in all of them."""
        return self.count * self.inputs * self.outputs

    @property
    def active_parameters(self) -> int:
        """Numbers that one token is multiplied with."""
        return self.active * self.inputs * self.outputs


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of each block's MLP.

    count: routed experts. active: how many of them a token meets. intermediate: width inside one.
    shared: experts of the same width that every token meets.
    """

    count: int
    active: int
    intermediate: int
    shared: int = 0


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder whose blocks are all alike.

    dim: width of the hidden states. layers: blocks. heads, kv_heads: of queries, and of keys and
    values, each head_dim wide. intermediate: width inside the MLP. max_seq_len: longest context.
    tied: the output layer is the embedding. qkv_bias: q, k and v have biases. norms: in each
    block, each as wide as dim. head_norms: numbers in a block's norms of queries and keys. softcap:
    logits are capped by a tanh. rotary_tables: RoPE has tables of all positions; else it computes
    those of a batch. whole_rotary: they have a cosine and a sine for each feature, not for each
    pair of them. whole: tensor parallelism cannot split it, whatever its sizes are. fused: q, k and
    v come out of one product.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_seq_len: int
    tied: bool = False
    qkv_bias: bool = False
    norms: int = 2
    head_norms: int = 0
    softcap: bool = False
    rotary_tables: bool = True
    whole_rotary: bool = False
    whole: bool = False
    fused: bool = False
    experts: Experts | None = None

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together; values have the same."""
        return self.kv_heads * self.head_dim

    @cached_property
    def matrices(self) -> dict[str, Matrix]:
        """The matrices of one block, by name, in the order in which they are used."""
        experts = self.experts
        found = {
            "q_proj": Matrix(self.dim, self.query_width, "column"),
            "k_proj": Matrix(self.dim, self.kv_width, "column"),
            "v_proj": Matrix(self.dim, self.kv_width, "column"),
            "output_proj": Matrix(self.query_width, self.dim, "row"),
        }
        if experts is None:
            return found | self._mlp(self.intermediate)
        found["router"] = Matrix(self.dim, experts.count, "replicated")
        routed = self._mlp(experts.intermediate, experts.count, experts.active, "experts.")
        found |= {name: replace(matrix, role="expert") for name, matrix in routed.items()}
        if not experts.shared:
            return found
        return found | self._mlp(experts.intermediate, experts.shared, experts.shared, "shared.")

    def _mlp(
        self, width: int, count: int = 1, active: int = 1, prefix: str = ""
    ) -> dict[str, Matrix]:
        into = Matrix(self.dim, width, "column", count, active)
        back = Matrix(width, self.dim, "row", count, active)
        return {prefix + name: back if name == "down_proj" else into for name in MLP}

    @property
    def embedding(self) -> Matrix:
        """The token embedding; a tied output layer uses it too."""
        return Matrix(self.vocab, self.dim, "embedding")

    @property
    def output(self) -> Matrix:
        """The output layer; where it is tied, it has no parameters of its own."""
        return Matrix(self.dim, self.vocab, "output")

    @property
    def bias(self) -> dict[str, int]:
        """Width of each bias of a block, by the matrix that it belongs to."""
        if not self.qkv_bias:
            return {}
        return {name: self.matrices[name].outputs for name in ATTENTION[:3]}

    @property
    def layer_parameters(self) -> int:
        """Parameters of one block."""
        matrices = sum(matrix.parameters for matrix in self.matrices.values())
        return matrices + self.norms * self.dim + self.head_norms + sum(self.bias.values())

    @property
    def parameters(self) -> int:
        """All parameters."""
        tables = self.embedding.parameters * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + tables + self.dim

    @property
    def split_sizes(self) -> dict[str, int]:
        """What tensor parallelism divides, as `runspec.layout.model_faults` takes it."""
        return {
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "intermediate_dim": self.intermediate,
            "vocab_size": self.vocab,
        }


# By Shape's names: the key of a config.json, the argument of torchtune's component builders.
_NAMES = {
    "dim": ("hidden_size", "embed_dim"),
    "layers": ("num_hidden_layers", "num_layers"),
    "heads": ("num_attention_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "intermediate": ("intermediate_size", "intermediate_dim"),
    "vocab": ("vocab_size", "vocab_size"),
    "max_seq_len": ("max_position_embeddings", "max_seq_len"),
}


def config_file(folder: Path) -> Path | None:
    """Return the config.json of a model folder; the published one if it is not downloaded yet."""
    files = (folder / "config.json", PUBLISHED / f"{folder.name}.json")
    return next((file for file in files[: 1 + (not folder.is_dir())] if file.is_file()), None)


# What transformers' configuration classes assume for a key that a config.json leaves out, where the
# families' folders on the hub do leave it out.
_ASSUMED: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 256},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
    },
    "mistral": {"num_key_value_heads": 8},
    "ministral3": {"head_dim": 128},
    "qwen3": {"head_dim": 128},
    "glm4": {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
    "smollm3": {"num_key_value_heads": 4},
}
# Families of transformers' that our tensor parallelism cannot split: fused matrices, norms over all
# heads, or no norm in front of the matrices that it splits by outputs.
_WHOLE = ("apertus", "cohere2", "exaone4", "glm", "glm4", "olmo2", "olmo3", "phi3")
# Their MLP has two matrices, which no shape can say.
_WITHOUT_GATE = ("apertus", "arcee", "nemotron", "starcoder2")


def family_traits(family: str) -> dict[str, Any]:
    """What a family's models have that no size shows, by Shape's names.

    family: a model_type of Hugging Face's, or a module of torchtune's.
    """
    tied = ("gemma", "llama3_2", "smollm3", "cohere2")
    norms = {"cohere2": 1} | dict.fromkeys(("gemma2", "gemma3", "gemma3_text", "glm4"), 4)
    return {
        "tied": family.startswith(tied),
        "qkv_bias": family.startswith("qwen2"),
        "norms": norms.get(family, 2),
        "softcap": family == "gemma2",
        # The families whose tables torchtune makes as wide as Hugging Face does.
        "whole_rotary": family.startswith(("qwen2", "phi3", "phi4")),
    }


def of_config_json(content: Mapping[str, Any]) -> Shape:
    """Return the shape that a Hugging Face config.json says; of its text model, if it has others.

    Raises:
        ShapeError: the model has experts, or a size is missing.
    """
    if found := [name for name, count in _expert_counts(content) if count > 1]:
        raise ShapeError(
            f"it has a mixture of experts ({', '.join(found)}), and its experts are not known to "
            "the estimate yet"
        )
    text = content.get("text_config")
    given = dict(text) if isinstance(text, Mapping) else dict(content)
    family = str(given.get("model_type") or content.get("model_type") or "")
    # Whether a part's output is tied is the whole model's to say.
    given |= {key: content[key] for key in ("tie_word_embeddings",) if key in content}
    given = _ASSUMED.get(family, {}) | {k: v for k, v in given.items() if v is not None}
    if family in _WITHOUT_GATE:
        raise ShapeError(f"the MLP of a {family} model is not known to the estimate yet")
    sizes = {name: given.get(key) for name, (key, _) in _NAMES.items()}
    sizes["kv_heads"] = sizes["kv_heads"] or sizes["heads"]
    if missing := [_NAMES[name][0] for name, size in sizes.items() if not size]:
        raise ShapeError(f"it does not say {', '.join(missing)}: give the folder of a text decoder")
    shape = _shape(sizes, given, family)
    head_norms = 0
    if family in ("qwen3", "qwen3_moe", "gemma3_text", "exaone4"):
        head_norms = 2 * shape.head_dim
    elif family in ("olmo2", "olmo3"):
        head_norms = shape.query_width + shape.kv_width
    return replace(
        shape,
        qkv_bias=bool(given.get("attention_bias", shape.qkv_bias)),
        head_norms=head_norms,
        whole=family in _WHOLE,
        fused=family == "phi3",
        softcap=bool(given.get("final_logit_softcapping", shape.softcap)),
    )


def _expert_counts(content: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Every key that counts experts: num_experts, num_local_experts, n_routed_experts, ..."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _expert_counts(value)
        elif "experts" in key and "per_tok" not in key and isinstance(value, int):
            yield f"{key} {value}", value


def of_builder_arguments(arguments: Mapping[str, Any], family: str) -> Shape | None:
    """Return the shape that a torchtune component builder makes of its arguments.

    None if they do not say all sizes. family: llama3, qwen2, gemma2 ..., the builder's module.
    """
    sizes = {name: arguments.get(argument) for name, (_, argument) in _NAMES.items()}
    if sizes["intermediate"] is None and sizes["dim"]:
        # torchtune's rule for its default: 8/3 of the width, in steps of 256.
        sizes["intermediate"] = -(-(8 * sizes["dim"] // 3) // 256) * 256
    return _shape(sizes, arguments, family) if all(sizes.values()) else None


def _shape(sizes: Mapping[str, Any], given: Mapping[str, Any], family: str) -> Shape:
    known: dict[str, Any] = {name: int(size) for name, size in sizes.items()}
    head_dim = int(given.get("head_dim") or known["dim"] // known["heads"])
    traits = family_traits(family)
    traits["tied"] = bool(given.get("tie_word_embeddings", traits["tied"]))
    return Shape(**known, head_dim=head_dim, **traits)
