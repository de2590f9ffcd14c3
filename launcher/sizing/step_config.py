"""What of a recipe decides a training step: its memory, its messages and its time."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from runspec.flops import ModelFlops, of_shape
from runspec.layout import Layout
from runspec.shape import Matrix, Shape

GIB = 2**30
FP32 = 4
NF4_BYTES = 0.5 + 2 / 64  # four bits, and a bf16 scale for each block of 64


@dataclass(frozen=True)
class StepConfig:
    """One training step: a model, what is trained of it, a layout, rows and ways to save memory."""

    shape: Shape
    method: str  # full, lora, dora, qlora or qdora
    layout: Layout = field(default_factory=Layout)
    gpus_per_node: int = 8
    builder: str = ""  # of the model, as the recipe names it
    batch: int = 1
    length: int = 4096
    accumulation: int = 1
    element_bytes: int = 2
    reduce_bytes: int = 4  # of one number of a gradient while FSDP reduces it
    fp32_master: bool = False
    checkpointing: str = "none"  # none, full, op, or a number: every so many-th layer
    optimizer: str = "adamw"  # or adamw8bit, adamw4bit, momentum, none
    update: str = "fused"  # or foreach, single
    compiled: bool = False  # the layers, by torch.compile
    loss: str = "chunked"  # plain, chunked or linear
    chunks: int = 8  # 0: the linear loss chooses itself
    sync_each: bool = False  # gradients are reduced after every micro-step
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()  # names of Shape.matrices
    lora_output: bool = False
    dropout: bool = False
    cpu_offload: bool = False
    activation_offload: bool = False
    reshard: bool = True
    apart: tuple[str, ...] = ()  # tok_embeddings, output: FSDP units of their own

    @property
    def nodes(self) -> int:
        """Nodes that the ranks take."""
        return max(1, self.layout.ranks // self.gpus_per_node)

    @property
    def fsdp(self) -> bool:
        """Whether FSDP2 holds the model; on one rank for what it alone can do."""
        return self.layout.data_parallel > 1 or self.fp32_master or self.cpu_offload

    @property
    def tokens(self) -> int:
        """Positions in one micro-batch of one tensor-parallel group."""
        return self.batch * (self.length + -self.length % self.layout.tensor_parallel)

    @property
    def rows_per_step(self) -> int:
        """Rows that one optimizer step sees over all ranks."""
        return self.batch * self.accumulation * self.layout.data_parallel

    @property
    def is_full(self) -> bool:
        """Whether every weight is trained."""
        return self.method == "full"

    @property
    def is_quantised(self) -> bool:
        """Whether the layers' base weights are NF4."""
        return self.method.startswith("q")

    @property
    def is_dora(self) -> bool:
        """Whether the adapters have magnitudes."""
        return self.method.endswith("dora")

    @property
    def weight_bytes(self) -> int:
        """Bytes of one trained number as it is stored."""
        return FP32 if self.fp32_master else self.element_bytes

    def trains(self, *names: str) -> bool:
        """Whether any of these matrices needs its input in backward."""
        return self.is_full or any(name in self.lora_targets for name in names)

    def _adapter(self, matrix: Matrix) -> int:
        magnitudes = matrix.outputs if self.is_dora else 0
        return self.lora_rank * (matrix.inputs + matrix.outputs) + magnitudes

    @property
    def trainable(self) -> int:
        """Parameters of the whole model that the optimizer updates."""
        if self.is_full:
            return self.shape.parameters
        layer = sum(self._adapter(self.shape.matrices[name]) for name in self.lora_targets)
        output = self._adapter(self.shape.output) if self.lora_output else 0
        return self.shape.layers * layer + output

    @property
    def total(self) -> int:
        """All parameters, adapters included."""
        return self.shape.parameters + (0 if self.is_full else self.trainable)

    @property
    def recomputed_share(self) -> float:
        """The part of the layers whose forward pass is computed again in backward."""
        known = {"none": 0.0, "op": 0.0, "full": 1.0}.get(self.checkpointing)
        return 1 / int(self.checkpointing) if known is None else known

    @cached_property
    def flops(self) -> TokenFlops:
        """FLOPs per token."""
        ranks = dict.fromkeys(self.lora_targets, self.lora_rank)
        if self.lora_output:
            ranks["output"] = self.lora_rank
        forward = of_shape(self.shape, self.is_full, ranks, backward=False)
        return TokenFlops(self, forward, of_shape(self.shape, self.is_full, ranks))


class TokenFlops:
    """FLOPs per token, every position trained: of a layer on average, of the output, of all.

    A query sees half of the row on average.
    """

    def __init__(self, step: StepConfig, forward: ModelFlops, both: ModelFlops) -> None:
        pairs, layers = (step.length + 1) / 2, step.shape.layers
        self.forward = forward.of(1, 0, pairs) / layers
        self.backward = both.of(1, 0, pairs) / layers - self.forward
        self.recomputed = step.recomputed_share * self.forward
        self.output = both.target
        self.model = both.of(1, 1, pairs)
        self.hardware = self.model + layers * self.recomputed
