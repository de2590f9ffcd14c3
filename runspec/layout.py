"""How ranks share a model: nodes x GPUs = replicate x shard x tensor x expert; what cannot work.

The one set of rules. The launcher asks it before a job is queued, the sizing for the recipe's own
step and when it looks for other settings, and every rank when it builds the model.

Ranks of one tensor-parallel group are neighbours, then those that shard one replica, so that they
share a node: rank = (replica x shard + shard index) x tensor parallel + tensor-parallel index.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


class LayoutError(ValueError):
    """The ranks cannot be laid out as asked for; one line per fault, each with its remedy."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        super().__init__("\n".join(faults))


@dataclass(frozen=True)
class Layout:
    """A layout that fits its number of ranks.

    replicate: data-parallel replicas of the model. shard: ranks that FSDP shards each replica
    over. tensor_parallel: ranks that split each layer. expert_parallel: ranks that the experts of
    a layer are spread over; they are a part of the shard x tensor_parallel ranks of a replica.
    """

    replicate: int = 1
    shard: int = 1
    tensor_parallel: int = 1
    expert_parallel: int = 1

    @property
    def ranks(self) -> int:
        """GPUs in all, one rank on each."""
        return self.replicate * self.shard * self.tensor_parallel

    @property
    def data_parallel(self) -> int:
        """Groups of ranks that see different data."""
        return self.replicate * self.shard

    @classmethod
    def of(cls, config: Mapping[str, Any], ranks: int, gpus_per_node: int | None = None) -> Layout:
        """Return the layout that a recipe's keys name for this number of ranks.

        Args:
            config: the recipe; reads tensor_parallel_dim, expert_parallel_dim,
                data_parallel_replicate_dim and data_parallel_shard_dim (-1: what is left; if both
                are -1, every group is a replica).
            gpus_per_node: also refuse a tensor-parallel group that spans nodes; None does not.

        Raises:
            LayoutError: names every fault.
        """
        tensor = int(config.get("tensor_parallel_dim") or 1)
        expert = int(config.get("expert_parallel_dim") or 1)
        replicate = int(config.get("data_parallel_replicate_dim") or 1)
        shard = int(config.get("data_parallel_shard_dim") or -1)
        shape = f"{ranks} ranks"
        if gpus_per_node:
            shape = f"{ranks // gpus_per_node} x {gpus_per_node} = {ranks} ranks"
        change = "change it, or --nodes, or --gpus-per-node"
        if ranks % tensor:
            raise LayoutError([f"tensor_parallel_dim {tensor} does not divide {shape}: {change}"])
        faults = []
        if gpus_per_node and gpus_per_node % tensor:
            faults.append(
                f"tensor_parallel_dim {tensor} does not divide the {gpus_per_node} GPUs per node, "
                "so that layers would be split across nodes: change it, or --gpus-per-node"
            )
        groups = ranks // tensor
        if replicate == -1 and groups % shard == 0:
            replicate = groups // abs(shard)
        if shard == -1:
            shard = groups // replicate
        if replicate * shard != groups:
            faults.append(
                f"data_parallel_replicate_dim {replicate} x data_parallel_shard_dim {shard} x "
                f"tensor_parallel_dim {tensor} is not {shape}: set data_parallel_shard_dim=-1, or "
                "change one of them"
            )
        elif expert > 1 and ((shard * tensor) % expert or expert % tensor):
            faults.append(
                f"expert_parallel_dim {expert} must be a multiple of tensor_parallel_dim {tensor} "
                f"and divide the {shard * tensor} ranks of a replica: change it"
            )
        if faults:
            raise LayoutError(faults)
        return cls(replicate, shard, tensor, expert)


# Products in fp8 take rows and columns in multiples of this number; narrower layers stay in bf16.
FP8_MULTIPLE = 16
# Inputs that share a scale in NF4.
NF4_BLOCK = 64
# Optimizers of torch whose arithmetic DTensor, the type of a sharded parameter, does not have.
NEED_WHOLE_PARAMETERS = ("torch.optim.Adafactor", "torch.optim.Rprop")


@dataclass(frozen=True)
class StepFacts:
    """What the rules read of a training step. What is left out breaks none.

    Attributes:
        sizes: by name, what tensor parallelism divides: num_heads, num_kv_heads,
            linear_num_key_heads, intermediate_dim, vocab_size, max_seq_len.
        unsplit: why tensor parallelism cannot split the model, a line each with its remedy.
        experts: routed experts of each block that has some; None: it is not asked.
        linear: the linear layers of the blocks: (inputs, outputs, whether the inputs are split).
        sharded: FSDP or tensor parallelism gives each GPU a part of each trained parameter.
        quantised: the base is in NF4. adapted: an adapter is trained, and the base frozen.
        length: of a row, and longest: positions up to which the model computes as it was trained.
        virtual: tokens that an adapter puts before each document, of which one may fill a row.
        optimizer: its component.
    """

    tensor_parallel: int = 1
    expert_parallel: int = 1
    sizes: Mapping[str, int] = field(default_factory=dict)
    unsplit: Collection[str] = ()
    experts: Collection[int] | None = None
    linear: Collection[tuple[int, int, bool]] = ()
    sharded: bool = False
    quantised: bool = False
    adapted: bool = False
    fp8: bool = False
    fp32: bool = False
    length: int = 0
    longest: int | None = None
    virtual: int = 0
    optimizer: str = ""

    def faults(self) -> list[str]:
        """Return why the step cannot be trained, one line per fault, each with its remedy."""
        return [
            *(self._split_faults() if self.tensor_parallel > 1 else ()),
            *self._expert_faults(),
            *(self._fp8_faults() if self.fp8 else ()),
            *self._length_faults(),
            *self._optimizer_faults(),
        ]

    def _split_faults(self) -> Iterator[str]:
        ranks = self.tensor_parallel
        if self.unsplit:
            yield from self.unsplit
            return
        for name, size in self.sizes.items():
            if size % ranks:
                yield (
                    f"tensor_parallel_dim {ranks} does not divide the model's {name} {size}: "
                    "choose a number that does"
                )
        blocks = {inputs // NF4_BLOCK for inputs, _, split in self.linear if split}
        for count in sorted(blocks if self.quantised else ()):
            if count % ranks:
                yield (
                    f"tensor_parallel_dim {ranks} does not divide {count} blocks of "
                    f"{NF4_BLOCK} inputs: choose a number that does, or set "
                    "model.quantize_base=False"
                )

    def _expert_faults(self) -> Iterator[str]:
        ranks = self.expert_parallel
        if ranks > 1 and self.experts is not None and not self.experts:
            yield "expert_parallel_dim: this model has no experts; set expert_parallel_dim=1"
        for count in sorted(self.experts or ()):
            if count % ranks:
                yield (
                    f"expert_parallel_dim {ranks} does not divide the model's {count} experts: "
                    "choose a number that does"
                )

    def _fp8_faults(self) -> Iterator[str]:
        if self.fp32:
            yield "enable_fp8_training: needs bf16 weights; set dtype=bf16"
        if self.adapted:
            yield (
                "enable_fp8_training: is for full fine-tuning, and an adapter's base is frozen; "
                "set enable_fp8_training=False"
            )
        ranks = self.tensor_parallel
        sizes = {
            (size, ranks if splits else 1)
            for inputs, outputs, inputs_split in self.linear
            if min(inputs, outputs) >= FP8_MULTIPLE
            for size, splits in ((inputs, inputs_split), (outputs, not inputs_split))
        }
        for size, parts in sorted(sizes):
            if size % (FP8_MULTIPLE * parts):
                yield (
                    f"enable_fp8_training: needs sizes in multiples of {FP8_MULTIPLE}, and this "
                    f"model has layers of {size}"
                    f"{f' split over {parts} ranks' if parts > 1 else ''}; "
                    "set enable_fp8_training=False"
                )

    def _length_faults(self) -> Iterator[str]:
        if self.longest is None or self.length + self.virtual <= self.longest:
            return
        room, before = self.longest - self.virtual, ""
        if self.virtual:
            before = f" behind {self.virtual} virtual tokens (model.num_virtual_tokens)"
        yield (
            f"tokenizer.max_seq_len: {self.length}{before} is more than the model's "
            f"{self.longest}; set tokenizer.max_seq_len={max(room, 1)}. Extending a context (rope "
            "scaling) is not supported: axolotl does it"
        )

    def _optimizer_faults(self) -> Iterator[str]:
        name, others = self.optimizer, "use torch.optim.AdamW or torchao.optim.AdamW8bit"
        # The kernels of bitsandbytes read the memory of whole tensors, whatever they are given.
        if self.sharded and (name in NEED_WHOLE_PARAMETERS or name.startswith("bitsandbytes.")):
            yield f"optimizer: {name} cannot update parameters that are sharded; {others}"
