"""The training step that a recipe describes: what decides its memory, messages and time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import prod
from pathlib import Path
from typing import Any

from launcher import paths, yamlfile
from launcher.errors import RecipeFault, nearest
from launcher.recipes import entries
from launcher.recipes.recipe import method_of
from runspec import adapters
from runspec import model_config as shapes
from runspec.adapters import KINDS, Adapter
from runspec.files import read_json
from runspec.flops import of_shape
from runspec.keys.fields import TRANSFORMERS
from runspec.keys.train import TrainConfig, recomputed, uncompiled_experts
from runspec.layout import Layout, LayoutError, StepFacts
from runspec.shape import ATTENTION, EXPERTS, MLP, SHARED, Matrix, Shape

GIB = 2**30
FP32 = 4
NF4_BYTES = 0.5 + 2 / 64  # four bits, and a bf16 scale for each block of 64


@dataclass(frozen=True)
class StepConfig:
    """One training step: a model, what is trained of it, a layout, rows and ways to save memory."""

    shape: Shape
    method: str  # full, lora, dora, qlora, qdora, or the class of an adapter of one's own
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
    own: Adapter | None = None  # of a kind of one's own
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()  # names of Shape.matrices
    lora_output: bool = False
    own_sizes: tuple[tuple[str, int], ...] = ()  # by key of the model block
    dropout: bool = False
    cpu_offload: bool = False
    activation_offload: bool = False
    reshard: bool = True
    apart: tuple[str, ...] = ()  # tok_embeddings, output: FSDP units of their own
    fp8: bool = False  # the products of the blocks' linear layers
    updated_by: str = ""  # the optimizer's component
    has_reference: bool = False  # the policy's own model runs forward a second time, frozen
    keeps_reference: bool = False  # as a second model even if there is an adapter to turn off
    teacher: Shape | None = None  # a frozen model that runs forward

    def faults(self) -> list[str]:
        """Return why the trainer would refuse the step, by the rules that it asks itself."""
        shape, layout = self.shape, self.layout
        adapted = not self.is_full and bool(self.lora_targets)
        return StepFacts(
            tensor_parallel=layout.tensor_parallel,
            expert_parallel=layout.expert_parallel,
            sizes=shape.split_sizes,
            splittable=not shape.whole,
            experts=() if shape.experts is None else (shape.experts.count,),
            linear=shape.linear_sizes,
            sharded=self.fsdp or layout.tensor_parallel > 1,
            vectors=self.adapter is None or self.adapter.vectors,
            dropout=adapted and self.dropout,
            quantised=self.is_quantised,
            fp8=self.fp8,
            fp32=self.element_bytes == FP32,
            length=self.length,
            longest=shape.max_seq_len,
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
            self, fp32_master=False, has_reference=False, keeps_reference=False, teacher=None
        )
        held = self.has_reference and (self.is_full or self.keeps_reference)
        reference = (own,) if held else ()
        if self.teacher is None:
            return reference
        teacher = replace(own, shape=self.teacher, method="full", lora_targets=())
        return (*reference, replace(teacher, lora_output=False))

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
    def adapter(self) -> Adapter | None:
        """What is trained instead of all weights."""
        return self.own or KINDS.get(self.method.removeprefix("q"))

    @property
    def is_dora(self) -> bool:
        """Whether the adapters have magnitudes."""
        return self.method.endswith("dora")

    @property
    def weight_bytes(self) -> int:
        """Bytes of one trained number as it is stored."""
        return FP32 if self.fp32_master else self.element_bytes

    @cached_property
    def blocks(self) -> tuple[tuple[StepConfig, int], ...]:
        """The same step of a model of each kind of block alone, and how many there are."""
        return tuple((self.of_block(shape), count) for shape, count in self.shape.blocks)

    def of_block(self, shape: Shape) -> StepConfig:
        """The same step of a model of such blocks alone."""
        if shape == self.shape:
            return self
        targets = tuple(name for name in self.lora_targets if name in shape.matrices)
        return replace(self, shape=shape, lora_targets=targets)

    @property
    def expert_shards(self) -> int:
        """Ranks that FSDP shards the same experts over."""
        layout = self.layout
        if layout.expert_parallel == 1:
            return layout.shard
        return layout.shard * layout.tensor_parallel // layout.expert_parallel

    def split_of(self, name: str) -> int:
        """Tensor-parallel ranks that split a matrix; what stands beside experts is whole."""
        found = self.shape.matrices.get(name)
        whole = found is not None and found.role in ("replicated", "expert")
        return 1 if whole or name.startswith(SHARED) else self.layout.tensor_parallel

    def partial_gradient(self, name: str) -> bool:
        """Whether each tensor-parallel rank has a share of a matrix's gradient."""
        if name in EXPERTS and self.layout.expert_parallel > 1:
            return False
        return self.layout.tensor_parallel > 1 and self.split_of(name) == 1

    def trains(self, *names: str) -> bool:
        """Whether any of these matrices needs its input in backward."""
        return self.is_full or any(name in self.lora_targets for name in names)

    def adapter_size(self, sizes: Iterable[str], **known: float) -> float:
        """Numbers of a parameter of the adapter, of these sizes.

        Args:
            known: the sizes of what it belongs to.
        """
        known |= {"lora_rank": self.lora_rank, "dim": self.shape.dim, "kv": self.shape.kv_width}
        return prod((known | dict(self.own_sizes))[size] for size in sizes)

    def _numbers(self, *owners: str, **known: float) -> int:
        parts = {} if self.adapter is None else self.adapter.parts_of(*owners)
        return int(sum(self.adapter_size(sizes, **known) for sizes in parts.values()))

    def _adapter(self, matrix: Matrix) -> int:
        sizes = {"in": matrix.adapter_inputs, "out": matrix.outputs}
        return matrix.count * self._numbers("linear", matrix.role, **sizes)

    @property
    def trainable(self) -> int:
        """Parameters of the whole model that the optimizer updates."""
        if self.is_full:
            return self.shape.parameters
        layers = sum(
            count * step._adapter(step.shape.matrices[name])
            for step, count in self.blocks
            for name in step.lora_targets
        )
        layers += sum(count * step._numbers("block") for step, count in self.blocks)
        output = self._adapter(self.shape.output) if self.lora_output else 0
        return layers + output + self._numbers("model")

    @property
    def total(self) -> int:
        """All parameters, adapters included."""
        return self.shape.parameters + (0 if self.is_full else self.trainable)

    @property
    def recomputed_share(self) -> float:
        """The part of the layers whose forward pass is computed again in backward."""
        known = {"none": 0.0, "op": 0.0, "full": 1.0}.get(self.checkpointing)
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
    """FLOPs per token, every position trained: of a layer on average, of the output, of all.

    A query sees half of the row on average, or of the window.
    """

    def __init__(self, step: StepConfig) -> None:
        length, layers = step.length, step.shape.layers
        ranks = dict.fromkeys(step.lora_targets, step.lora_rank)
        ranks["output"] = step.lora_rank if step.lora_output else 0
        both = of_shape(step.shape, step.is_full, ranks)
        forward = of_shape(step.shape, step.is_full, ranks, backward=False)
        attention = both.attention((length,)) / length
        self.forward = (forward.token + forward.attention((length,)) / length) / layers
        self.backward = (both.token + attention) / layers - self.forward
        self.recomputed = step.recomputed_share * self.forward
        self.output = both.target
        self.frozen = sum(_forward(shape, length) for shape in step.frozen_passes)
        self.model = both.of(1, 1) + attention + self.frozen
        self.hardware = self.model + layers * self.recomputed


def _forward(shape: Shape, length: int) -> float:
    """FLOPs per token of a forward pass alone, without adapters."""
    found = of_shape(shape, True, {}, backward=False)
    return found.of(1, 1) + found.attention((length,)) / length


# By transformers' names of linear layers, and ours of an embedding and an output layer, those here.
_FUSED = {
    "qkv_proj": ATTENTION[:3],
    "gate_up_proj": MLP[:2],
    "o_proj": ATTENTION[3:],
    "experts": EXPERTS,
    **{name: (name, SHARED + name) for name in MLP},
}
_APART = {"embedding": "tok_embeddings", "output_head": "output"}


# Of a recipe -------------------------------------------------------------------------------------


@cache
def _known_shapes() -> dict[str, dict[str, Any]]:
    return yamlfile.load(paths.REPO_ROOT / "configs" / "models.yaml")


def shape_of(model: Mapping[str, Any], folder: Path | None) -> Shape:
    """Return the shape of the model that a `model` block builds; RecipeFault if it is not known.

    A named builder has its sizes in code, copied to configs/models.yaml; a component builder takes
    them as arguments; of any other the config.json in the model's folder says them, or the one in
    configs/shapes while the model is not downloaded.
    """
    builder = str(model.get("_component_") or TRANSFORMERS)
    module, _, name = builder.rpartition(".")
    plain = f"{module}.{re.sub('^q?lora_', '', name)}"
    family = module.rpartition(".")[2]
    if sizes := _known_shapes().get(plain):
        return Shape(**sizes, whole_rotary=shapes.family_traits(family)["whole_rotary"])
    if shape := shapes.of_builder_arguments(model, family):
        return shape
    from_folder, file = builder == TRANSFORMERS, shapes.config_file(folder) if folder else None
    if file is None:
        hint = "" if from_folder else nearest(plain, _known_shapes())
        raise RecipeFault(
            f"model._component_ {builder!r}{hint}: its sizes are not known here: download the "
            "model to checkpointer.checkpoint_dir, whose config.json says them"
        )
    try:
        shape = shapes.of_config_json(read_json(file) or {})
    except (OSError, ValueError) as error:
        raise RecipeFault(f"{file}: {error}") from error
    if from_folder:
        return replace(shape, rotary_tables=False)
    # What transformers' code does, and not other code for the same config.json.
    return replace(shape, whole=False, fused=False, fused_mlp=False, wide_norms=True)


def step_of(config: Mapping[str, Any], nodes: int, gpus_per_node: int) -> StepConfig:
    """Return the step of a resolved recipe; RecipeFault names all that is wrong."""
    model = _block(config, "model")
    folder = _block(config, "checkpointer").get("checkpoint_dir")
    shape = shape_of(model, Path(folder) if folder else None)
    faults: list[str] = []
    try:
        layout = Layout.of(config, nodes * gpus_per_node, gpus_per_node)
    except LayoutError as error:
        faults += error.faults
        # The rules that do not depend on it.
        layout = Layout()
    length = _block(config, "tokenizer").get("max_seq_len") or 0
    if not length:
        faults.append(
            "tokenizer.max_seq_len is not set, and the longest sample decides the memory: set "
            "tokenizer.max_seq_len=4096, or what your data need"
        )
    layers, method = recomputed(config), entries.of(config).method or TrainConfig
    # In a packed row the documents of a sample share it; else each is a row.
    rows = 1 if _block(config, "dataset").get("packed") else method.documents_per_sample
    folder = config.get(method.teacher_key) if method.teacher_key else None
    offload = bool(config.get("fsdp_cpu_offload") or _block(config, "fsdp").get("cpu_offload"))
    step = StepConfig(
        shape=shape,
        method=method_of(model),
        layout=layout,
        gpus_per_node=gpus_per_node,
        builder=str(model.get("_component_") or TRANSFORMERS),
        batch=rows * int(config.get("batch_size") or 1),
        length=int(length),
        accumulation=int(config.get("gradient_accumulation_steps") or 1),
        element_bytes=4 if config.get("dtype") == "fp32" else 2,
        reduce_bytes=2 if config.get("fsdp_reduce_dtype") == "bf16" else 4,
        fp32_master=config.get("master_weights") == "fp32" and config.get("dtype") != "fp32",
        checkpointing="full" if layers == 1 else str(layers or "none"),
        # Offloading reduces after every micro-step, as no GPU could hold all gradients.
        sync_each=offload or bool(config.get("sync_each_micro_batch")),
        cpu_offload=offload,
        activation_offload=bool(config.get("enable_activation_offloading")),
        compiled=config.get("compile") is True and not uncompiled_experts(config),
        reshard=config.get("fsdp_reshard_after_forward") is not False,
        fp8=bool(config.get("enable_fp8_training")),
        updated_by=str(_block(config, "optimizer").get("_component_") or ""),
        apart=tuple(_APART.get(name, name) for name in config.get("custom_sharded_layers") or ()),
        **_adapter(model, shape, faults),
        **_optimizer(_block(config, "optimizer")),
        **({"loss": "linear", "chunks": 0} if method.fused_loss else _loss(_block(config, "loss"))),
        has_reference=method.has_reference,
        keeps_reference=bool(_block(config, "checkpointer").get("adapter_checkpoint")),
        teacher=shape_of({}, Path(str(folder))) if folder else None,
    )
    if faults := faults + step.faults():
        raise RecipeFault(faults)
    return step


def _block(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def _adapter(model: Mapping[str, Any], shape: Shape, faults: list[str]) -> dict[str, Any]:
    name, own = adapters.name_of(model), None
    if name is None:
        return {}
    if name not in KINDS:
        try:
            own = adapters.declared(name)
        except ValueError as error:
            faults.append(str(error))
            return {}
    attention = [name for name in model.get("lora_attn_modules") or [] if name in ATTENTION]
    targets = (*attention, *(MLP if model.get("apply_lora_to_mlp") else ()))
    if adapters.own_adapters(model):
        kind = own or KINDS[name]
        every = {
            name: matrix
            for block, _ in shape.blocks
            for name, matrix in block.matrices.items()
            # A router is no linear layer of transformers' classes.
            if name != "router" and kind.parts_of("linear", matrix.role)
        }
        named = model.get("lora_modules") or every
        meant = {each for name in named for each in _FUSED.get(name, (name,))} | set(named)
        targets = tuple(name for name in every if name in meant)
    return {
        "own": own,
        "own_sizes": () if own is None else own.numbers(model),
        "lora_rank": int(model.get("lora_rank") or 8),
        "lora_targets": targets,
        "lora_output": bool(model.get("apply_lora_to_output")),
        "dropout": bool(model.get("lora_dropout")),
    }


def _optimizer(block: Mapping[str, Any]) -> dict[str, Any]:
    name = str(block.get("_component_") or "").rpartition(".")[2].lower()
    kind = "adamw" + next((bits for bits in ("8bit", "4bit") if bits in name), "")
    if name == "sgd":
        kind = "momentum" if block.get("momentum") else "none"
    # As trainer.optimizers: torch's Adam and AdamW are fused unless a form is asked for.
    fused = name in ("adam", "adamw") and "foreach" not in block
    update = "single" if block.get("foreach") is False else "foreach"
    if block.get("fused", fused) or "bit" in name:
        update = "fused"
    return {"optimizer": kind, "update": update}


def _loss(block: Mapping[str, Any]) -> dict[str, Any]:
    name = str(block.get("_component_") or "").rpartition(".")[2]
    for loss, chunks in (("linear", 0), ("chunked", 8)):
        if loss.capitalize() in name:
            return {"loss": loss, "chunks": int(block.get("num_output_chunks") or chunks)}
    return {"loss": "plain"}
