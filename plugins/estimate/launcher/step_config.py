"""A training step: what decides its memory, messages and time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod

from plugins.estimate.launcher.model_flops import of_shape
from runspec import adapters
from runspec.adapters import KINDS, Adapter
from runspec.layout import Layout, StepFacts
from runspec.shape import Block, Matrix, Part, Role, Shape

GIB = 2**30
FP32 = 4
# Four or eight bits, and a bf16 scale for each block of 64.
NF4_BYTES = 0.5 + 2 / 64


@dataclass(frozen=True)
class StepConfig:
    """One training step: a model, what is trained of it, a layout, rows and ways to save memory."""

    shape: Shape
    method: str  # full, lora, dora, qlora, another kind, or the class of an adapter of one's own
    layout: Layout = field(default_factory=Layout)
    gpus_per_node: int = 8
    model: str = ""  # its folder, or its component
    batch: int = 1
    length: int = 4096
    packed: bool = False  # rows hold several samples
    accumulation: int = 1
    element_bytes: int = 2
    reduce_bytes: int = 4  # of one number of a gradient while FSDP reduces it
    fp32_master: bool = False
    checkpointing: str = "none"  # none, full, op, or n: every n-th layer
    optimizer: str = "adamw"  # or adamw8bit, adamw4bit, momentum, none
    update: str = "fused"  # or foreach, single
    compiled: bool = False  # the layers, by torch.compile
    loss: str = "linear"  # score: a score head, and no logits; plain: another trainer's, all logits
    chunks: int = 0  # 0: the linear loss chooses itself
    sync_each: bool = False  # gradients are reduced after every micro-step
    own: Adapter | None = None  # of a kind of one's own
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()  # names of a block's matrices
    lora_output: bool = False
    saved: tuple[str, ...] = ()  # tok_embeddings, output: trained whole beside the adapter
    own_sizes: tuple[tuple[str, int], ...] = ()  # by key of the model block
    dropout: bool = False
    cpu_offload: bool = False
    activation_offload: bool = False
    reshard: bool = True
    fp8: bool = False  # the products of the blocks' linear layers
    updated_by: str = ""  # the optimizer's component
    frozen: tuple[str, ...] = ()  # patterns of names of parameters that are not trained
    has_reference: bool = False  # the policy's own model runs forward a second time, frozen
    adapter_only: bool = False  # the export is the adapter, although it could be merged
    keeps_reference: bool = False  # as a second model beside the policy
    teacher: Shape | None = None  # a frozen model that runs forward
    teacher_quantised: bool = False  # its layers are NF4
    on_policy_share: float = 0.0  # of the steps, in which the policy first generates the answers
    new_tokens: int = 0  # of such an answer at most
    keeps_sampled: bool = False  # log-probabilities of such answers, which no row has several of
    in_reward_models: int = 0  # numbers, all of them on each GPU
    apart: bool = False  # rollout nodes generate them, of which nothing is computed
    generation_batch: int | None = None  # of these, how many are generated at once; else batch
    teacher_logits: bool = False  # the loss compares all of its logits with the policy's

    def faults(self) -> list[str]:
        """Return why the trainer would refuse the step, by the rules that it asks itself."""
        shape, layout = self.shape, self.layout
        return StepFacts(
            tensor_parallel=layout.tensor_parallel,
            expert_parallel=layout.expert_parallel,
            sizes=shape.split_sizes,
            unsplit=shape.unsplit,
            experts=shape.experts,
            linear=shape.linear,
            sharded=self.fsdp or layout.tensor_parallel > 1,
            quantised=self.is_quantised,
            adapted=not self.is_full,
            fp8=self.fp8,
            fp32=self.element_bytes == FP32,
            length=self.length,
            longest=shape.longest,
            virtual=self.virtual_tokens,
            optimizer=self.updated_by,
        ).faults()

    @property
    def frozen_passes(self) -> tuple[Shape, ...]:
        """The models that run forward, without gradients, in each micro-step."""
        reference = (self.shape,) if self.has_reference else ()
        return reference if self.teacher is None else (*reference, self.teacher)

    @property
    def frozen_models(self) -> tuple[StepConfig, ...]:
        """The models that are held beside the policy, each as a step of its own."""
        own = replace(
            self,
            fp32_master=False,
            has_reference=False,
            keeps_reference=False,
            teacher=None,
            teacher_logits=False,
            # As the trainer lays out what is frozen.
            reshard=True,
        )
        reference = (own,) if self.keeps_reference else ()
        if self.teacher is None:
            return reference
        # Frozen, and in NF4, but without an adapter.
        method = "qfull" if self.teacher_quantised else "full"
        teacher = replace(own, shape=self.teacher, method=method, lora_targets=(), saved=())
        return (*reference, replace(teacher, lora_output=False))

    @property
    def nodes(self) -> int:
        """Nodes that the ranks take."""
        return max(1, self.layout.ranks // self.gpus_per_node)

    @property
    def fsdp(self) -> bool:
        """Whether FSDP2 shards the model; on one rank for features that only FSDP2 has.

        If only an adapter is trained, replicas that are not sharded need none.
        """
        replicas = self.layout.replicate > 1 and self.adapter is None
        return self.layout.shard > 1 or replicas or self.fp32_master or self.cpu_offload

    @property
    def tokens(self) -> int:
        """Positions in one micro-batch of one tensor-parallel group.

        Virtual tokens that are positions count once for each row.
        """
        lengthens = self.adapter is not None and self.adapter.lengthens
        length = self.length + self.virtual_tokens * lengthens
        return self.batch * (length + -length % self.layout.tensor_parallel)

    @property
    def virtual_tokens(self) -> int:
        """Tokens that the adapter puts before each document."""
        has = self.adapter is not None and adapters.NUM_VIRTUAL in self.adapter.keys
        return dict(self.own_sizes).get(adapters.NUM_VIRTUAL, 0) if has else 0

    @property
    def rows_per_step(self) -> int:
        """Rows that one optimizer step sees over all ranks."""
        return self.batch * self.accumulation * self.layout.data_parallel

    @property
    def answers_per_step(self) -> int:
        """Answers that a rank generates for a step; in packed rows as many as fill them."""
        return self.accumulation * (self._filling if self.packed else self.batch)

    @property
    def answers_at_once(self) -> int:
        """How many of them together: their keys and values fill no more than a micro-batch, unless
        the recipe says how many.
        """
        own = self._filling if self.packed else self.batch
        return min(self.generation_batch or own, self.answers_per_step)

    @property
    def answer_positions(self) -> int:
        """Positions of the keys and values of such an answer and its prompt."""
        if not self.packed:
            return self.length
        return self.batch * self.length // max(self.answers_at_once, 1)

    @property
    def _filling(self) -> int:
        return max(1, self.batch * self.length // self.new_tokens) if self.new_tokens else 0

    @property
    def is_full(self) -> bool:
        """Whether every weight is trained."""
        return self.method == "full"

    @property
    def is_quantised(self) -> bool:
        """Whether the layers' base weights are NF4."""
        return self.method.startswith("q")

    @property
    def adapter(self) -> Adapter | None:
        """What is trained instead of all weights."""
        return self.own or KINDS.get(self.method.removeprefix("q"))

    @property
    def exports_model(self) -> bool:
        """Whether the export contains the whole model."""
        adapter = self.adapter
        return adapter is None or (adapter.merges and not self.adapter_only)

    @property
    def weight_bytes(self) -> int:
        """Bytes of one trained number as it is stored."""
        return FP32 if self.fp32_master else self.element_bytes

    @property
    def expert_shards(self) -> int:
        """Ranks that FSDP shards the same experts over."""
        layout = self.layout
        if layout.expert_parallel == 1:
            return layout.shard
        return layout.shard * layout.tensor_parallel // layout.expert_parallel

    def split_of(self, matrix: Matrix) -> int:
        """Ranks that split a matrix: of its group of tensor or of expert parallelism."""
        if matrix.role == "expert":
            return self.layout.expert_parallel
        return self.layout.tensor_parallel if matrix.is_split else 1

    def trains(self, block: Block, part: Part, *roles: Role) -> bool:
        """Whether a matrix of a part, of these roles if given, needs its input in backward."""
        return self.is_full or any(map(self.needs_input, (n for n, _ in block.of(part, *roles))))

    def needs_input(self, name: str) -> bool:
        """Whether the backward pass needs the input of the matrix of this name."""
        reads = self.adapter is None or self.adapter.reads_input
        return self.is_full or (reads and name in self.lora_targets)

    def adapted(self, block: Block) -> list[tuple[str, Matrix]]:
        """The matrices of a block that have an adapter."""
        return [(n, m) for n, m in block.matrices.items() if n in self.lora_targets]

    def adapter_size(
        self, sizes: Iterable[str], known: Mapping[str, float], block: Block | None = None
    ) -> float:
        """Numbers of a parameter of the adapter, of these sizes.

        Args:
            known: the sizes of the matrix that it belongs to. block: that it belongs to.
        """
        keys = block.attention.kv_width if block and block.attention else 0
        own = {"lora_rank": self.lora_rank, "dim": self.shape.dim, "kv": keys}
        return prod({**own, **known, **dict(self.own_sizes)}[size] for size in sizes)

    def numbers_of(
        self, owners: Iterable[str], known: Mapping[str, float], block: Block | None = None
    ) -> float:
        """Numbers of all that the adapter adds to one of these owners."""
        parts = {} if self.adapter is None else self.adapter.parts_of(*owners)
        return sum(self.adapter_size(sizes, known, block) for sizes in parts.values())

    def adapter_numbers(self, matrix: Matrix, split: int = 1) -> float:
        """Numbers that the adapter adds to a matrix, or to its part on one of `split` ranks."""
        sizes = {"in": matrix.inputs, "out": matrix.outputs, "lora_rank": self.lora_rank}
        if matrix.role == "expert":
            return matrix.count / split * self.numbers_of(matrix.owners, sizes)
        sizes["in" if matrix.role == "row" else "out"] //= split
        return matrix.count * self.numbers_of(matrix.owners, sizes)

    def table_adapter(self, name: str) -> float:
        """Numbers that the adapter adds to tok_embeddings or to output."""
        return (
            self.adapter_numbers(self.shape.output) if self.lora_output and name == "output" else 0
        )

    @property
    def trainable(self) -> int:
        """Parameters of the whole model that the optimizer updates."""
        if self.is_full:
            return round(self.shape.parameters * self.trained_share) + self.score_head
        added = self.table_adapter("output")
        for block, count in self.shape.blocks:
            added += count * self.numbers_of(["block"], {}, block)
            added += count * sum(self.adapter_numbers(m) for _, m in self.adapted(block))
        added += len(self.saved) * self.shape.vocab * self.shape.dim
        return int(added + self.numbers_of(["model"], {})) + self.score_head

    def trains_table(self, name: str) -> bool:
        """Whether tok_embeddings or output is trained whole."""
        return self.is_full or name in self.saved

    @cached_property
    def trained_share(self) -> float:
        """The part of the weights that is trained in full fine-tuning: all but `frozen` ones."""
        shape = self.shape
        table = shape.vocab * shape.dim
        sizes = [("model.embed_tokens", table), ("lm_head", table * (not shape.tied))]
        for index, kind in enumerate(shape.order if self.frozen else ()):
            for name, matrix in shape.kinds[kind].matrices.items():
                sizes.append((f"model.layers.{index}.{name}", matrix.parameters))
        frozen = sum(size for name, size in sizes if self._freezes(f"{name}.weight"))
        return max(0.0, 1 - frozen / shape.parameters)

    def _freezes(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.frozen)

    @property
    def total(self) -> int:
        """All parameters, adapters included."""
        tables = len(self.saved) * self.shape.vocab * self.shape.dim
        added = self.score_head if self.is_full else self.trainable - tables
        return self.shape.parameters + added

    @property
    def score_head(self) -> int:
        """Parameters of a reward model's score head, which is always trained."""
        return self.shape.dim if self.loss == "score" else 0

    @property
    def recomputed_share(self) -> float:
        """The part of the layers whose forward pass is computed again in backward."""
        if self.checkpointing == "op":
            return sum(n for block, n in self.shape.blocks if block.delta) / self.shape.layers
        known = {"none": 0.0, "full": 1.0}.get(self.checkpointing)
        return 1 / int(self.checkpointing) if known is None else known

    def recomputes(self, layer: int) -> bool:
        """Whether backward computes something of a layer again; the first layer is 0."""
        if self.checkpointing in ("none", "full", "op"):
            return self.checkpointing != "none"
        return (layer + 1) % int(self.checkpointing) == 0

    @cached_property
    def flops(self) -> TokenFlops:
        """FLOPs per token."""
        return TokenFlops(self)


class TokenFlops:
    """FLOPs per token if every position is trained: of the model, of the frozen models among them,
    and with what is computed again; a query sees half of the row on average, or of the window.
    """

    def __init__(self, step: StepConfig) -> None:
        ranks = {name: step.lora_rank for name in step.lora_targets}
        ranks["output"] = step.lora_rank if step.lora_output else 0
        own = of_shape(step.shape, step.is_full, ranks)
        again = of_shape(step.shape, step.is_full, ranks, backward=False)
        self.frozen = sum(_forward(shape, step.length) for shape in step.frozen_passes)
        # A score head's products are few.
        output = 0.0 if step.loss == "score" else own.target
        self.model = own.token + output + own.attention((step.length,)) / step.length + self.frozen
        layers = again.token + again.attention((step.length,)) / step.length
        self.hardware = self.model + step.recomputed_share * layers


def _forward(shape: Shape, length: int) -> float:
    """FLOPs per token of a forward pass alone, without adapters."""
    flops = of_shape(shape, True, {}, backward=False)
    return flops.of(1, 1) + flops.attention((length,)) / length
