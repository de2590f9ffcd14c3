"""The shape of a decoder: its different blocks, each with every matrix and its role.

`trainer.describe` makes it from the model itself; `runspec.description` keeps and finds it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

# Tokens that linear attention computes together; between chunks of them the state goes on.
DELTA_CHUNK = 64
# Where a matrix stands in its block, or behind all of them. shared: an MLP that every token meets
# beside the experts.
Part = Literal["attention", "mlp", "router", "experts", "shared", "output"]
# How tensor and expert parallelism split a matrix: column by its outputs, fused likewise, where it
# computes several things one after another, row by its inputs, replicated not at all, expert by
# whole experts.
Role = Literal["column", "fused", "row", "replicated", "expert"]


@dataclass(frozen=True)
class Matrix:
    """A weight [outputs, inputs], or `count` of them, of which a token meets `active`.

    bias: it has one, as long as its outputs.
    """

    part: Part
    role: Role
    inputs: int
    outputs: int
    count: int = 1
    active: int = 1
    bias: bool = False

    @property
    def parameters(self) -> int:
        """Numbers in all of them, without biases."""
        return self.count * self.inputs * self.outputs

    @property
    def active_parameters(self) -> int:
        """Numbers that one token is multiplied with."""
        return self.active * self.inputs * self.outputs

    @property
    def owners(self) -> tuple[str, ...]:
        """What a kind of adapter calls it: see `runspec.adapters.Adapter`."""
        return ("linear", "column" if self.role == "fused" else self.role)

    @property
    def is_split(self) -> bool:
        """Whether tensor parallelism splits it; what stands beside experts is whole."""
        return self.part in ("attention", "mlp", "output") and self.role != "replicated"


@dataclass(frozen=True)
class Vector:
    """A parameter [rows, width] that is no matrix: a norm's scale, sinks, a convolution.

    split: each tensor-parallel rank has a part. features: numbers per token that a norm takes.
    """

    rows: int
    width: int = 1
    split: bool = False
    features: int = 0


@dataclass(frozen=True)
class Attention:
    """Softmax attention, as its layer calls the kernel.

    head_dim: of queries and keys. value_dim: of values. held: numbers per token in the tensor that
    values are a part of. window: keys that a query sees; None: all before it. gate: width of a gate
    of its output.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    held: int
    window: int | None = None
    gate: int = 0

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together."""
        return self.kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Width of the output."""
        return self.heads * self.value_dim


@dataclass(frozen=True)
class GatedDelta:
    """Linear attention: a gated delta rule (arXiv 2412.06464).

    key_heads, value_heads: how many; key, value: features of one. kernel: positions that the
    convolution before it sees.
    """

    key_heads: int
    value_heads: int
    key: int
    value: int
    kernel: int

    @property
    def mixed(self) -> int:
        """Width of queries, keys and values together, which the convolution sees."""
        return 2 * self.key_heads * self.key + self.value_width

    @property
    def value_width(self) -> int:
        """Width of all values together."""
        return self.value_heads * self.value

    @property
    def state(self) -> int:
        """Numbers of all heads' states together."""
        return self.value_width * self.key


@dataclass(frozen=True)
class Block:
    """One kind of block.

    matrices: by name within the block, in the order in which they are used. delta: linear attention
    in place of `attention`. norms_behind: norms stand behind attention and MLP, alone or beside
    those before them.
    """

    matrices: Mapping[str, Matrix]
    vectors: tuple[Vector, ...] = ()
    attention: Attention | None = None
    delta: GatedDelta | None = None
    norms_behind: bool = False

    def of(self, part: Part, *roles: Role) -> Iterator[tuple[str, Matrix]]:
        """The matrices of a part, of these roles if some are given."""
        for name, matrix in self.matrices.items():
            if matrix.part == part and (not roles or matrix.role in roles):
                yield name, matrix

    def inside(self, part: Part) -> int:
        """Width inside the MLP, the experts or the MLP beside them; 0 without."""
        ends = [m.inputs for _, m in self.of(part, "row", "expert")]
        return ends[-1] if ends else 0

    @cached_property
    def experts(self) -> tuple[Matrix, ...]:
        """The experts' two matrices, of which the first makes gate and up; () without experts."""
        return tuple(matrix for _, matrix in self.of("experts"))

    @cached_property
    def parameters(self) -> int:
        """All parameters."""
        count = sum(v.rows * v.width for v in self.vectors)
        for matrix in self.matrices.values():
            count += matrix.parameters + matrix.bias * matrix.count * matrix.outputs
        return count

    @cached_property
    def active_parameters(self) -> int:
        """Those that one token meets."""
        idle = (m.parameters - m.active_parameters for m in self.matrices.values())
        return self.parameters - sum(idle)


@dataclass(frozen=True)
class Shape:
    """A decoder.

    dim: width of the hidden states. vocab: tokens. longest: the longest row. kinds: its different
    blocks. order: which of them each block is. tied: the output layer is the embedding. wide_norms:
    norms multiply their scale in fp32. table: numbers of the rotary tables that stay in memory; 0:
    those of a batch are computed. sizes: what tensor parallelism divides. unsplit: why it cannot
    split the model. packs: packed rows keep their documents apart. model_type: that of its
    config.json.
    """

    dim: int
    vocab: int
    longest: int
    kinds: tuple[Block, ...]
    order: tuple[int, ...]
    tied: bool = False
    wide_norms: bool = True
    table: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)
    unsplit: tuple[str, ...] = ()
    packs: bool = True
    model_type: str = ""

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return len(self.order)

    def cut(self, layers: int) -> "Shape":
        """The same with its first blocks only."""
        return replace(self, order=self.order[:layers])

    @cached_property
    def blocks(self) -> tuple[tuple[Block, int], ...]:
        """The different blocks and how many there are of each."""
        return tuple((self.kinds[kind], count) for kind, count in Counter(self.order).items())

    @cached_property
    def parameters(self) -> int:
        """All parameters."""
        return self._ends + sum(count * block.parameters for block, count in self.blocks)

    @cached_property
    def active_parameters(self) -> int:
        """Those that one token meets; both tables count."""
        return self._ends + sum(count * block.active_parameters for block, count in self.blocks)

    @property
    def _ends(self) -> int:
        return (1 if self.tied else 2) * self.vocab * self.dim + self.dim

    @property
    def head_dim(self) -> int:
        """Features of a head of softmax attention, of the first block that has it."""
        return next((b.attention.head_dim for b, _ in self.blocks if b.attention), 0)

    @property
    def output(self) -> Matrix:
        """The output layer; where it is tied, it has no parameters of its own."""
        return Matrix("output", "column", self.dim, self.vocab)

    @property
    def split_sizes(self) -> dict[str, int]:
        """What tensor parallelism divides, as `runspec.layout.StepFacts` takes it."""
        return {**self.sizes, "vocab_size": self.vocab, "max_seq_len": self.longest}

    @cached_property
    def experts(self) -> tuple[int, ...]:
        """How many routed experts its kinds of blocks have, of those that have some."""
        return tuple(block.experts[0].count for block, _ in self.blocks if block.experts)

    @cached_property
    def names(self) -> dict[str, Part]:
        """The linear layers of all blocks, which adapters can have, with their parts."""
        every = {n: m.part for block, _ in self.blocks for n, m in block.matrices.items()}
        return {name: part for name, part in every.items() if part != "router"}

    @cached_property
    def linear(self) -> frozenset[tuple[int, int, bool]]:
        """The linear layers of the blocks, as `runspec.layout.StepFacts` takes them."""
        return frozenset(
            (matrix.inputs, matrix.outputs, matrix.role == "row" and matrix.is_split)
            for block, _ in self.blocks
            for matrix in block.matrices.values()
            if matrix.part not in ("router", "experts")
        )

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Shape":
        """Return the shape of a description's content, as `as_json` gives it."""
        kinds = tuple(_block(each) for each in content["kinds"])
        lists = {"order": tuple(content["order"]), "unsplit": tuple(content.get("unsplit", ()))}
        return cls(**{**content, "kinds": kinds, **lists})

    def as_json(self) -> dict[str, Any]:
        """Return its content; what is as usual is left out."""
        content: dict[str, Any] = _plain(self)
        return content


def _block(content: Mapping[str, Any]) -> Block:
    attention, delta = content.get("attention"), content.get("delta")
    parts = {
        "matrices": {name: Matrix(**each) for name, each in content["matrices"].items()},
        "vectors": tuple(Vector(**each) for each in content.get("vectors", ())),
        "attention": Attention(**attention) if attention else None,
        "delta": GatedDelta(**delta) if delta else None,
    }
    return Block(**{**content, **parts})


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if not hasattr(value, "__dataclass_fields__"):
        return value
    usual = {name: each.default for name, each in value.__dataclass_fields__.items()}
    values = {name: getattr(value, name) for name in usual}
    # Of numbers and truth values alike: False equals 0.
    kept = {name: each for name, each in values.items() if each not in ((), {}, usual[name])}
    return {name: _plain(each) for name, each in kept.items()}
