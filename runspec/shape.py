"""The shape of a decoder: every matrix with its role, and the sizes that follow from it.

`runspec.model_config` makes it from a config.json.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import Literal, NamedTuple

# How tensor and expert parallelism split a matrix: column by its outputs, row by its inputs,
# replicated not at all, expert by whole experts; embedding and output by the vocabulary.
Role = Literal["column", "row", "replicated", "expert", "embedding", "output"]

ATTENTION = ("q_proj", "k_proj", "v_proj", "output_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
# The experts' two matrices, the gate and the up projection in one.
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
# Of linear attention: queries, keys and values out of one product.
MIXED = "in_proj_qkv"
# What stands before the names of an MLP that every token meets beside its experts.
SHARED = "shared."


@dataclass(frozen=True)
class Matrix:
    """A weight [outputs, inputs], or `count` of them, of which a token meets `active`.

    behind: it is a part of a fused product that is not the first, whose adapter's A it shares.
    """

    inputs: int
    outputs: int
    role: Role
    count: int = 1
    active: int = 1
    behind: bool = False

    @property
    def adapter_inputs(self) -> int:
        """Inputs of the A that its adapter has of its own."""
        return 0 if self.behind else self.inputs

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
    """A mixture of experts in place of a block's MLP.

    count: routed experts. active: how many of them a token meets. intermediate: width inside one.
    shared: width of the MLP that every token meets beside them; 0: there is none. shared_gate:
    a gate weighs its output. bias: the router and the experts' matrices have biases.
    wide_router: it computes in fp32. watched: the trainer tells how even its choices are.
    """

    count: int
    active: int
    intermediate: int
    shared: int = 0
    shared_gate: bool = False
    bias: bool = False
    wide_router: bool = False
    watched: bool = True


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Queries come out of `queries` numbers per token (0: out of the hidden state), keys and values
    out of `keys` numbers; `rotary` features of a key are all heads' and come from the hidden state.
    plain: a key's other features. value: features of a value.
    """

    queries: int
    keys: int
    rotary: int
    plain: int
    value: int


@dataclass(frozen=True)
class Linear:
    """Linear attention in place of softmax attention: a gated delta rule (arXiv 2412.06464).

    key_heads, value_heads: how many; key, value: features of one. kernel: positions that the
    convolution before it sees. parts: outputs of each matrix that makes its inputs, by name.
    """

    key_heads: int
    value_heads: int
    key: int
    value: int
    kernel: int
    parts: tuple[tuple[str, int], ...]

    @property
    def mixed(self) -> int:
        """Width of queries, keys and values together, which the convolution sees."""
        return 2 * self.key_heads * self.key + self.value_width

    @property
    def value_width(self) -> int:
        """Width of all values together."""
        return self.value_heads * self.value


class Heads(NamedTuple):
    """The heads of blocks without a window, where they differ: width, key heads, and their norms.

    keys_are_values: a value is its key before the norm; there is no matrix for it.
    """

    head_dim: int
    kv_heads: int
    head_norms: int
    keys_are_values: bool


class Kind(NamedTuple):
    """What one block has where the blocks of a model differ."""

    linear: bool = False
    experts: bool = True
    window: bool = False


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder.

    dim: width of the hidden states. layers: blocks. heads, kv_heads: of queries, and of keys and
    values, each head_dim wide. intermediate: width inside the MLP. max_seq_len: longest context.
    tied: the output layer is the embedding. qkv_bias: q, k and v have biases. output_bias: so has
    what attention's output goes through. norms: in each block, each as wide as dim. head_norms:
    numbers in a block's norms of queries and keys. softcap: logits are capped by a tanh.
    rotary_tables: RoPE has tables of all positions; else it computes those of a batch.
    whole_rotary: they have a cosine and a sine for each feature, not for each pair of them.
    whole: tensor parallelism cannot split it, whatever its sizes are. fused: q, k and v come out
    of one product. fused_mlp: so do gate and up. post_norms: norms stand behind attention and MLP
    only. gated: attention's output has a gate, as wide, beside the queries. sinks: each
    head has one. window: keys that a query sees in the blocks that have one. wide_norms: a norm
    multiplies its scale in fp32. far: the heads of blocks without a window, if
    they are others. keys_are_values: no matrix makes values.

    kinds: of each block, where they differ; then `experts`, `linear` and `window` are those of the
    blocks that have them. `blocks` gives each kind a shape of its own.
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
    fused_mlp: bool = False
    post_norms: bool = False
    experts: Experts | None = None
    output_bias: bool = False
    gated: bool = False
    sinks: bool = False
    latent: Latent | None = None
    linear: Linear | None = None
    window: int | None = None
    wide_norms: bool = True
    far: Heads | None = None
    keys_are_values: bool = False
    kinds: tuple[Kind, ...] = ()

    @cached_property
    def blocks(self) -> tuple[tuple["Shape", int], ...]:
        """The different blocks, each as a decoder of such blocks alone, and their number."""
        if not self.kinds:
            return ((self, self.layers),)
        found = Counter(self.kinds[: self.layers])
        return tuple((self._block(kind), count) for kind, count in found.items())

    @cached_property
    def order(self) -> tuple[int, ...]:
        """For each block of the model which of `blocks` it is."""
        kinds = self.kinds[: self.layers] or (Kind(),) * self.layers
        known = list(dict.fromkeys(kinds))
        return tuple(known.index(kind) for kind in kinds)

    def _block(self, kind: Kind) -> "Shape":
        return replace(
            self,
            kinds=(),
            linear=self.linear if kind.linear else None,
            experts=self.experts if kind.experts else None,
            window=self.window if kind.window else None,
            far=None,
            **({} if kind.window or self.far is None else self.far._asdict()),
        )

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together; values have the same but in latent attention."""
        return self.kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Width of attention's output."""
        if self.linear:
            return self.linear.value_width
        return self.heads * self.latent.value if self.latent else self.query_width

    @cached_property
    def matrices(self) -> dict[str, Matrix]:
        """The matrices of one block, by name, in the order in which they are used."""
        found = self._attention()
        experts = self.experts
        if experts is None:
            return found | self._mlp(self.intermediate)
        found["router"] = Matrix(self.dim, experts.count, "replicated")
        count, active, width = experts.count, experts.active, experts.intermediate
        found[EXPERTS[0]] = Matrix(self.dim, 2 * width, "expert", count, active)
        found[EXPERTS[1]] = Matrix(width, self.dim, "expert", count, active)
        if experts.shared:
            found |= self._mlp(experts.shared, SHARED)
        if experts.shared_gate:
            found["shared_expert_gate"] = Matrix(self.dim, 1, "replicated")
        return found

    def _attention(self) -> dict[str, Matrix]:
        output = {"output_proj": Matrix(self.value_width, self.dim, "row")}
        if linear := self.linear:
            parts = {name: Matrix(self.dim, width, "column") for name, width in linear.parts}
            return parts | {"out_proj": output["output_proj"]}
        if latent := self.latent:
            queries = {"q_proj": Matrix(self.dim, self.query_width, "column")}
            if latent.queries:
                queries = {
                    "q_a_proj": Matrix(self.dim, latent.queries, "replicated"),
                    "q_b_proj": Matrix(latent.queries, self.query_width, "column"),
                }
            both = self.heads * (latent.plain + latent.value)
            return {
                **queries,
                "kv_a_proj_with_mqa": Matrix(self.dim, latent.keys + latent.rotary, "replicated"),
                "kv_b_proj": Matrix(latent.keys, both, "column"),
                **output,
            }
        keys = Matrix(self.dim, self.kv_width, "column", behind=self.fused)
        return {
            "q_proj": Matrix(self.dim, self.query_width * (1 + self.gated), "column"),
            "k_proj": keys,
            **({} if self.keys_are_values else {"v_proj": keys}),
            **output,
        }

    def _mlp(self, width: int, prefix: str = "") -> dict[str, Matrix]:
        gate, back = Matrix(self.dim, width, "column"), Matrix(width, self.dim, "row")
        found = (gate, replace(gate, behind=self.fused_mlp), back)
        return {prefix + name: matrix for name, matrix in zip(MLP, found, strict=True)}

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
        """Numbers in each bias of a block, by the matrix that it belongs to."""
        names = ["router", *EXPERTS] if self.experts and self.experts.bias else []
        if not self.linear:
            names += [*ATTENTION[:3]] * self.qkv_bias + [*ATTENTION[3:]] * self.output_bias
        found = self.matrices
        return {name: found[name].count * found[name].outputs for name in names if name in found}

    @property
    def small(self) -> int:
        """Numbers of one block in norms within attention, sinks, and what else is no matrix."""
        if linear := self.linear:
            # The convolution, the norm of the output, and two numbers of each head's decay.
            return linear.mixed * linear.kernel + linear.value + 2 * linear.value_heads
        if self.latent:
            return self.latent.queries + self.latent.keys
        return self.head_norms + self.sinks * self.heads

    @property
    def layer_parameters(self) -> int:
        """Parameters of one block; of the mean block, where they differ."""
        if self.kinds:
            return sum(n * shape.layer_parameters for shape, n in self.blocks) // self.layers
        matrices = sum(matrix.parameters for matrix in self.matrices.values())
        return matrices + self.norms * self.dim + self.small + sum(self.bias.values())

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self._parameters(idle=True)

    @property
    def active_parameters(self) -> int:
        """Those that one token meets; both tables count."""
        return self._parameters(idle=False)

    def _parameters(self, idle: bool) -> int:
        tables = self.embedding.parameters * (1 if self.tied else 2)
        found = tables + self.dim
        for shape, count in self.blocks:
            found += count * shape.layer_parameters
            if not idle:
                each = shape.matrices.values()
                found -= count * sum(m.parameters - m.active_parameters for m in each)
        return found

    @property
    def balanced(self) -> bool:
        """Whether the trainer watches how evenly its routers spread tokens."""
        return self.experts is not None and self.experts.watched

    @property
    def split_norms(self) -> bool:
        """Whether the norms of queries and keys are over all heads."""
        return self.head_norms > 2 * self.head_dim

    @property
    def fused_widths(self) -> tuple[int, ...]:
        """Of one block the widths of the products that compute several things one after another."""
        attention = (self.query_width + 2 * self.kv_width,) if self.fused else ()
        if self.linear:
            attention = (self.linear.mixed,) if MIXED in dict(self.linear.parts) else ()
        return attention + ((2 * self.intermediate,) if self.fused_mlp else ())

    @property
    def norms_behind(self) -> bool:
        """Whether norms stand behind attention and MLP, alone or beside those before them."""
        return self.norms == 4 or self.post_norms

    @property
    def fused_names(self) -> tuple[str, ...]:
        """The matrices that those products are made of."""
        attention: tuple[str, ...] = ATTENTION[:3] if self.fused else ()
        if self.linear:
            attention = (MIXED,) if MIXED in dict(self.linear.parts) else ()
        return attention + (MLP[:2] if self.fused_mlp else ())

    @property
    def split_sizes(self) -> dict[str, int]:
        """What tensor parallelism divides, as `runspec.layout.StepFacts` takes it."""
        linear = {"linear_num_key_heads": self.linear.key_heads} if self.linear else {}
        return {
            "num_heads": self.heads,
            "num_kv_heads": gcd(self.kv_heads, self.far.kv_heads if self.far else 0),
            **linear,
            "intermediate_dim": self.intermediate,
            "vocab_size": self.vocab,
            "max_seq_len": self.max_seq_len,
        }

    @cached_property
    def linear_sizes(self) -> frozenset[tuple[int, int, bool]]:
        """The linear layers of the blocks, as `runspec.layout.StepFacts` takes them.

        Parts of a fused product are left out: they are no layers.
        """
        return frozenset(
            (matrix.inputs, matrix.outputs, matrix.role == "row")
            for block, _ in self.blocks
            for name, matrix in block.matrices.items()
            if matrix.role in ("column", "row", "replicated")
            and name != "router"
            and name not in block.fused_names
        )
