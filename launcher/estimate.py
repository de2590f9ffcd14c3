"""What a recipe would need: memory a GPU, time, checkpoints, and what to change if it does not fit.

All of it is computed from the recipe, none of it measured; `launcher.memory` has the formulas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from launcher import environment, paths, yamlfile
from launcher.errors import PreflightFault, RecipeFault, UsageFault, nearest
from launcher.memory import ATTENTION, GIB, MLP, Estimate, Plan, Shape
from launcher.recipe import Recipe, method_of

# Of a GPU's memory the CUDA context, NCCL's buffers, kernels' workspaces and the allocator's gaps
# take a part that no formula gives: this much is kept back. An assumption.
RESERVED_GIB, RESERVED_SHARE = 2.0, 0.05
DEFAULT_GPU = "h100-80"
DEFAULT_MFU = 0.4
# English text, Llama 3's and Qwen's tokenizers: roughly; for an epoch whose tokens nobody counted.
BYTES_A_TOKEN = 4
_FIGURES = ("memory_gib", "bf16_tflops", "memory_bandwidth_gbs", "link_gbs", "network_gbits")
METHODS = ("full", "lora", "qlora")
COMPARED_NODES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, as configs/gpus.yaml knows it; match finds it in what a site calls it."""

    name: str
    match: str
    memory_gib: float
    bf16_tflops: float
    memory_bandwidth_gbs: float
    link_gbs: float
    network_gbits: float

    @property
    def usable_gib(self) -> float:
        """Memory less what is kept back."""
        return self.memory_gib - RESERVED_GIB - RESERVED_SHARE * self.memory_gib


@cache
def gpus() -> dict[str, Gpu]:
    """Return the kinds of GPU that configs/gpus.yaml names."""
    return {
        name: Gpu(name, facts["match"], *(float(facts[key]) for key in _FIGURES))
        for name, facts in yamlfile.load(paths.GPUS).items()
    }


def gpu(name: str | None) -> Gpu:
    """Return the kind of GPU with this name; UsageFault lists those that are known."""
    known, name = gpus(), name or DEFAULT_GPU
    if name not in known:
        raise UsageFault(
            f"there is no GPU {name!r}{nearest(name, known)} in configs/gpus.yaml: choose one of "
            f"{', '.join(known)}"
        )
    return known[name]


def peak_gib(recipe: Recipe, root: Path) -> float:
    """Return the memory that a recipe's step needs of each GPU, computed."""
    resources = recipe.resources
    config = recipe.resolved(root, "run")
    return Estimate(plan_of(config, resources.nodes, resources.gpus_per_node)).peak / GIB


def smallest_gpu(gib: float) -> str | None:
    """Return the label of the smallest memory in which gib fits, such as 80 GB; None for none."""
    usable = sorted({each.usable_gib for each in gpus().values()})
    return next((f"{_label_gb(size)} GB" for size in usable if gib <= size), None)


def _label_gb(usable_gib: float) -> int:
    """The round number that a card of this size is sold by."""
    total = (usable_gib + RESERVED_GIB) / (1 - RESERVED_SHARE)
    return min((24, 40, 48, 80, 94, 96, 141, 180), key=lambda label: abs(label - total))


# The plan of a recipe --------------------------------------------------------------------------

# Arguments of torchtune's component builders, by what a shape calls them.
_ARGUMENTS = {
    "dim": "embed_dim",
    "layers": "num_layers",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "vocab": "vocab_size",
    "max_seq_len": "max_seq_len",
}
# Families whose rotary tables torchtune makes as wide as Hugging Face does.
_WHOLE_ROTARY = ("qwen2", "phi3", "phi4")
_HUGGING_FACE = {
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
    "max_seq_len": "max_position_embeddings",
}


@cache
def _known_shapes() -> dict[str, dict[str, Any]]:
    return yamlfile.load(paths.REPO_ROOT / "configs" / "models.yaml")


def shape_of(model: dict[str, Any], folder: Path | None) -> Shape:
    """Return the sizes of the model that a `model` block builds.

    A named builder has them in code, copied to configs/models.yaml; a component builder takes
    them as arguments; for any other the model folder's config.json says them.
    """
    builder = str(model.get("_component_") or "")
    module, _, name = builder.rpartition(".")
    plain = f"{module}.{re.sub('^q?lora_', '', name)}"
    family = module.rpartition(".")[2]
    if plain in _known_shapes():
        whole = family.startswith(_WHOLE_ROTARY)
        return Shape(**_known_shapes()[plain], whole_rotary=whole)
    if all(argument in model for argument in _ARGUMENTS.values()):
        return _built_shape(model, family)
    file = folder / "config.json" if folder else None
    if file is not None and file.is_file():
        return _hugging_face_shape(file)
    raise RecipeFault(
        f"model._component_ {builder!r}{nearest(plain, _known_shapes())}: its sizes are not known "
        "here: download the model to checkpointer.checkpoint_dir, whose config.json says them"
    )


def _built_shape(model: dict[str, Any], family: str) -> Shape:
    sizes = {key: int(model[argument]) for key, argument in _ARGUMENTS.items()}
    intermediate = model.get("intermediate_dim")
    if intermediate is None:
        # torchtune's rule where it is not given: 8/3 of the width, in steps of 256.
        intermediate = -(-(8 * sizes["dim"] // 3) // 256) * 256
    return Shape(
        **sizes,
        intermediate=int(intermediate),
        head_dim=int(model.get("head_dim") or sizes["dim"] // sizes["heads"]),
        tied=bool(model.get("tie_word_embeddings", family in ("llama3_2", "gemma", "gemma2"))),
        qkv_bias=family.startswith("qwen2"),
        norms=4 if family == "gemma2" else 2,
        softcap=family == "gemma2",
        whole_rotary=family.startswith(_WHOLE_ROTARY),
    )


def _hugging_face_shape(file: Path) -> Shape:
    content = paths.read_json(file) or {}
    missing = [key for key in _HUGGING_FACE.values() if key not in content]
    missing = [key for key in missing if key != "num_key_value_heads"]
    if missing:
        raise RecipeFault(
            f"{file} does not say {', '.join(missing)}: give the folder of a text decoder"
        )
    content.setdefault("num_key_value_heads", content["num_attention_heads"])
    kind = str(content.get("model_type", ""))
    sizes = {key: int(content[name]) for key, name in _HUGGING_FACE.items()}
    return Shape(
        **sizes,
        head_dim=int(content.get("head_dim") or sizes["dim"] // sizes["heads"]),
        tied=bool(content.get("tie_word_embeddings", kind.startswith("gemma"))),
        qkv_bias=kind.startswith("qwen2"),
        norms=4 if kind == "gemma2" else 2,
        softcap=kind == "gemma2",
        whole_rotary=kind.startswith(_WHOLE_ROTARY),
    )


def plan_of(config: dict[str, Any], nodes: int, gpus_per_node: int) -> Plan:
    """Return what of a resolved recipe decides the memory; RecipeFault names all that is wrong."""
    faults: list[str] = []
    model = _block(config, "model")
    folder = _block(config, "checkpointer").get("checkpoint_dir")
    try:
        shape = shape_of(model, Path(folder) if folder else None)
    except RecipeFault as fault:
        raise RecipeFault([*fault.faults]) from None
    ranks = nodes * gpus_per_node
    split = int(config.get("tensor_parallel_dim") or 1)
    copies = int(config.get("data_parallel_replicate_dim") or 1)
    faults += layout_faults(shape, ranks, split, copies)
    length = _block(config, "tokenizer").get("max_seq_len") or 0
    if not length:
        faults.append(
            "tokenizer.max_seq_len is not set, and the longest sample decides the memory: set "
            "tokenizer.max_seq_len=4096, or what your data need"
        )
    if faults:
        raise RecipeFault(faults)
    method = method_of(model)
    offload = bool(config.get("fsdp_cpu_offload") or _block(config, "fsdp").get("cpu_offload"))
    return Plan(
        shape=shape,
        method=method,
        shard=ranks // split // copies,
        replicate=copies,
        tensor_parallel=split,
        batch=int(config.get("batch_size") or 1),
        length=int(length),
        accumulation=int(config.get("gradient_accumulation_steps") or 1),
        element_bytes=4 if config.get("dtype") == "fp32" else 2,
        reduce_bytes=2 if config.get("fsdp_reduce_dtype") == "bf16" else 4,
        fp32_master=config.get("master_weights") == "fp32" and config.get("dtype") != "fp32",
        checkpointing=_checkpointing(config),
        # Offloading reduces after every micro-step, as no GPU could keep all gradients.
        sync_each=offload or bool(config.get("sync_each_micro_batch")),
        cpu_offload=offload,
        activation_offload=bool(config.get("enable_activation_offloading")),
        compiled=config.get("compile") is True,
        reshard=config.get("fsdp_reshard_after_forward") is not False,
        apart=tuple(config.get("custom_sharded_layers") or ()),
        **_lora(model, method),
        **_optimizer(_block(config, "optimizer")),
        **_loss(_block(config, "loss")),
    )


def _block(config: dict[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def layout_faults(shape: Shape, ranks: int, split: int, copies: int) -> list[str]:
    """Return why a model cannot be laid out over so many ranks, one line a reason."""
    if ranks % (split * copies):
        return [
            f"tensor_parallel_dim {split} x data_parallel_replicate_dim {copies} does not divide "
            f"{ranks} GPUs: change one of them, or --nodes, or --gpus-per-node"
        ]
    sizes = {
        "num_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
        "intermediate_dim": shape.intermediate,
        "vocab_size": shape.vocab,
    }
    return [
        f"tensor_parallel_dim {split} does not divide the model's {name} {size}: choose another"
        for name, size in sizes.items()
        if size % split
    ]


def _lora(model: dict[str, Any], method: str) -> dict[str, Any]:
    if method == "full":
        return {}
    attention = [name for name in model.get("lora_attn_modules") or [] if name in ATTENTION]
    return {
        "lora_rank": int(model.get("lora_rank") or 8),
        "lora_targets": (*attention, *(MLP if model.get("apply_lora_to_mlp") else ())),
        "lora_output": bool(model.get("apply_lora_to_output")),
        "dropout": bool(model.get("lora_dropout")),
    }


def _checkpointing(config: dict[str, Any]) -> str:
    if config.get("ac_mode") == "selective":
        return str(config.get("ac_option") or 2)
    if config.get("ac_mode") == "full" or config.get("enable_activation_checkpointing"):
        return "full"
    return "none"


def _optimizer(block: dict[str, Any]) -> dict[str, Any]:
    name = str(block.get("_component_") or "").rpartition(".")[2].lower()
    if "8bit" in name:
        kind = "adamw8bit"
    elif "4bit" in name:
        kind = "adamw4bit"
    elif name == "sgd":
        kind = "momentum" if block.get("momentum") else "none"
    else:
        kind = "adamw"
    # As trainer.optimizers: torch's Adam and AdamW are fused where neither form is asked for.
    fused = name in ("adam", "adamw") and "foreach" not in block
    if block.get("fused", fused) or "bit" in name:
        return {"optimizer": kind, "update": "fused"}
    return {"optimizer": kind, "update": "single" if block.get("foreach") is False else "foreach"}


def _loss(block: dict[str, Any]) -> dict[str, Any]:
    name = str(block.get("_component_") or "").rpartition(".")[2]
    if "Linear" in name:
        return {"loss": "linear", "chunks": int(block.get("num_output_chunks") or 0)}
    if "Chunked" in name:
        return {"loss": "chunked", "chunks": int(block.get("num_output_chunks") or 8)}
    return {"loss": "plain"}


# Time and disk ---------------------------------------------------------------------------------


def flops_a_token(plan: Plan) -> float:
    """Model FLOPs of forward and backward a token, all positions trained.

    As in PaLM (arXiv 2204.02311, appendix B), 2 a weight forward, 2 for the input's gradient and
    2 for the weight's own, where it is trained: 6 a trained weight, 4 a frozen one. Attention: 12
    a head's width for each key that a query may see, half of the length on average.
    Recomputation does not count.
    """
    shape = plan.shape
    matrices = shape.layers * sum(a * b for a, b in shape.matrices.values()) + shape.embedding
    each = 6 if plan.is_full else 4
    adapter = 0 if plan.is_full else 6 * plan.trainable
    return each * matrices + adapter + 12 * shape.layers * shape.query * (plan.length + 1) / 2


@dataclass(frozen=True)
class Epoch:
    """How much one epoch is; `what` says how it is known."""

    tokens: int
    what: str


def epoch_of(config: dict[str, Any], plan: Plan) -> Epoch:
    """Return the tokens of an epoch, guessed from a local file's size, else a million."""
    dataset = _block(config, "dataset")
    files = dataset.get("data_files")
    file = Path(files) if isinstance(files, str) else None
    if file is None or file.suffix != ".jsonl" or not file.is_file():
        return Epoch(10**6, "a million tokens; the dataset is not a local file")
    samples = size = 0
    with file.open("rb") as lines:
        for line in lines:
            samples += bool(line.strip())
            size += min(len(line), plan.length * BYTES_A_TOKEN)
    tokens = max(size // BYTES_A_TOKEN, 1)
    return Epoch(tokens, f"an epoch of {samples:,} samples, about {tokens:,} tokens by their size")


def hours(plan: Plan, device: Gpu, tokens: int, mfu: float) -> float:
    """Wall-clock hours for so many tokens at a model FLOP utilisation."""
    return flops_a_token(plan) * tokens / (plan.ranks * device.bf16_tflops * 1e12 * mfu) / 3600


def checkpoint_bytes(plan: Plan) -> float:
    """Bytes of a checkpoint: what is trained and the optimizer's state of it."""
    states = {"adamw": 2.0, "adamw8bit": 2.03, "adamw4bit": 1.06, "momentum": 1.0, "none": 0.0}
    weight = 4 if plan.fp32_master else plan.element_bytes
    state = states[plan.optimizer] * (1 if "bit" in plan.optimizer else weight)
    return plan.trainable * (weight + state)


def export_bytes(plan: Plan) -> float:
    """Bytes of the exported model, adapters merged."""
    return plan.shape.parameters * plan.element_bytes


def host_bytes(plan: Plan, gpus_per_node: int) -> float:
    """CPU memory of a node that offloading takes: weights, gradients and optimizer's state."""
    if not plan.cpu_offload:
        return 0.0
    there = Estimate(replace(plan, cpu_offload=False)).phases["optimizer step"]
    return gpus_per_node * (there["weights"] + there["gradients"] + there["optimizer"])


# What to change --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Remedy:
    """A change to the recipe, on top of those before it that helped, and what comes of it."""

    overrides: str
    peak_gib: float
    helps: bool
    fits: bool


def remedies(plan: Plan, device: Gpu, gpus_per_node: int, builder: str) -> list[Remedy]:
    """Try what may help in order, each on top of what helped before, until the recipe fits."""
    tried: list[Remedy] = []
    now = Estimate(plan).peak
    for overrides, changed in _changes(plan, gpus_per_node, builder):
        candidate = replace(plan, **changed)
        peak = Estimate(candidate).peak
        helps = peak < now * 0.99
        if helps:
            plan, now = candidate, peak
        fits = helps and peak / GIB <= device.usable_gib
        tried.append(Remedy(overrides, peak / GIB, helps, fits))
        if fits:
            break
    return tried


def _changes(plan: Plan, gpus_per_node: int, builder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    one_copy = " data_parallel_replicate_dim=1" if plan.replicate > 1 else ""
    if one_copy:
        shard = plan.shard * plan.replicate
        yield one_copy.strip(), {"shard": shard, "replicate": 1}
    if plan.checkpointing != "full":
        yield "ac_mode=full", {"checkpointing": "full"}
    if plan.loss != "linear":
        yield (
            "loss._component_=trainer.loss.LinearCrossEntropy",
            {"loss": "linear", "chunks": 0},
        )
    if plan.accumulation > 1 and plan.fsdp and not plan.sync_each:
        yield "sync_each_micro_batch=true", {"sync_each": True}
    if plan.batch > 1:
        steps = plan.batch * plan.accumulation
        yield (
            f"batch_size=1 gradient_accumulation_steps={steps}"
            + (" sync_each_micro_batch=true" if plan.fsdp else ""),
            {"batch": 1, "accumulation": steps, "sync_each": plan.fsdp},
        )
    split = plan.tensor_parallel * 2
    while split <= gpus_per_node:
        if not layout_faults(plan.shape, plan.ranks, split, 1):
            yield (
                f"tensor_parallel_dim={split}{one_copy}",
                {"tensor_parallel": split, "shard": plan.ranks // split, "replicate": 1},
            )
        split *= 2
    if not plan.is_quantised:
        module, _, name = builder.rpartition(".")
        name = re.sub("^lora_", "", name)
        yield (
            f"model._component_={module}.qlora_{name}",
            {"method": "qdora" if plan.is_dora else "qlora", **_adapter_of(plan)},
        )
    if not plan.cpu_offload:
        yield "fsdp_cpu_offload=true", {"cpu_offload": True, "sync_each": True}


def _adapter_of(plan: Plan) -> dict[str, Any]:
    """The plan's own adapter, or a usual one where it has none."""
    if plan.lora_targets:
        return {}
    return {"lora_rank": 16, "lora_targets": (*ATTENTION, *MLP)}


@dataclass(frozen=True)
class Compared:
    """One cell of the comparison: a method on a number of nodes."""

    method: str
    nodes: int
    peak_gib: float
    fits: bool
    billion_tokens_hours: float


def compare(plan: Plan, device: Gpu, gpus_per_node: int, mfu: float) -> list[Compared]:
    """Full, LoRA and QLoRA on 1, 2, 4 and 8 nodes, all else as in the plan."""
    cells = []
    copy_a_node = plan.replicate == plan.ranks // gpus_per_node > 1
    for method in METHODS:
        for nodes in COMPARED_NODES:
            copies = nodes if copy_a_node else 1
            shard = max(nodes * gpus_per_node // plan.tensor_parallel // copies, 1)
            other = {} if method == "full" else _adapter_of(plan)
            cell = replace(plan, method=method, replicate=copies, shard=shard, **other)
            peak = Estimate(cell).peak / GIB
            cells.append(
                Compared(
                    method,
                    nodes,
                    peak,
                    peak <= device.usable_gib,
                    hours(cell, device, 10**9, mfu),
                )
            )
    return cells


# The trace ---------------------------------------------------------------------------------------


def trace(train_config: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return what `python -m trainer.trace` finds: the same step run on fake tensors."""
    try:
        done = environment.ask_trainer("trace", train_config, "--ranks", str(ranks))
    except OSError as error:
        raise PreflightFault(
            f"cannot trace: {error}: set up the environment with: bash setup.sh"
        ) from error
    if done.returncode != 0:
        words = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise PreflightFault([line.removeprefix("error: ") for line in words] or last)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# The report --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """All that is said about one recipe; `traced` and `compared` where they were asked for."""

    name: str
    description: str
    nodes: int
    gpus_per_node: int
    builder: str
    plan: Plan
    device: Gpu
    mfu: float
    epoch: Epoch
    compared: list[Compared]
    traced: dict[str, Any] | None

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        root: Path,
        kind: str | None = None,
        mfu: float = DEFAULT_MFU,
        wants_comparison: bool = False,
        wants_trace: bool = False,
    ) -> Report:
        """Work everything out for a recipe whose models lie under root."""
        if recipe.entry != "sft":
            raise UsageFault(
                f"{recipe.name} starts {recipe.entry}, and only the kit's own trainer (entry: sft) "
                "is known well enough to be estimated"
            )
        nodes, gpus_per_node = recipe.resources.nodes, recipe.resources.gpus_per_node
        config = recipe.resolved(root, "run")
        plan, device = plan_of(config, nodes, gpus_per_node), gpu(kind)
        train_config = recipe.train_config(root, "run")
        return cls(
            name=recipe.name,
            description=recipe.description,
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            builder=str(config["model"]["_component_"]),
            plan=plan,
            device=device,
            mfu=mfu,
            epoch=epoch_of(config, plan),
            compared=compare(plan, device, gpus_per_node, mfu) if wants_comparison else [],
            traced=trace(train_config, plan.ranks) if wants_trace else None,
        )

    @property
    def estimate(self) -> Estimate:
        """The plan's memory."""
        return Estimate(self.plan)

    @property
    def fits(self) -> bool:
        """Whether the peak is within what the GPU has to give."""
        return self.estimate.peak / GIB <= self.device.usable_gib

    @property
    def epoch_hours(self) -> float:
        """Wall-clock hours of an epoch, or of a million tokens."""
        return hours(self.plan, self.device, self.epoch.tokens, self.mfu)

    def as_json(self) -> dict[str, Any]:
        """Return everything, sizes in GiB."""
        plan, found = self.plan, self.estimate
        return {
            "recipe": self.name,
            "basis": "computed, not measured",
            "gpu": {"name": self.device.name, "memory_gib": self.device.memory_gib},
            "usable_gib": round(self.device.usable_gib, 3),
            "fits": self.fits,
            "peak_gib": round(found.peak / GIB, 3),
            "peak_phase": found.peak_phase,
            "terms_gib": {k: round(v / GIB, 3) for k, v in found.terms.items() if v},
            "phases_gib": {k: round(sum(v.values()) / GIB, 3) for k, v in found.phases.items()},
            "plan": {
                each.name: getattr(plan, each.name) for each in fields(plan) if each.name != "shape"
            },
            "parameters": plan.total,
            "trainable": plan.trainable,
            "host_memory_a_node_gib": round(host_bytes(plan, self.gpus_per_node) / GIB, 3),
            "checkpoint_gib": round(checkpoint_bytes(plan) / GIB, 3),
            "export_gib": round(export_bytes(plan) / GIB, 3),
            "mfu": self.mfu,
            "tokens": self.epoch.tokens,
            "hours": self.epoch_hours,
            "gpu_hours": self.epoch_hours * plan.ranks,
            "remedies": [vars(each) for each in self._remedies()],
            "compare": [vars(each) for each in self.compared],
            "traced": self.traced,
        }

    def _remedies(self) -> list[Remedy]:
        if self.fits:
            return []
        return remedies(self.plan, self.device, self.gpus_per_node, self.builder)

    def lines(self) -> Iterator[str]:
        """Yield the report as a person reads it."""
        plan = self.plan
        share = 100 * plan.trainable / plan.total
        yield f"{self.name}: {self.description}" if self.description else self.name
        yield (
            f"  model       {self.builder.rpartition('.')[2]}, {plan.total / 1e9:.2f} B "
            f"parameters, {_count(plan.trainable)} trained ({share:.2f} %)"
        )
        yield f"  layout      {self.nodes} x {self.gpus_per_node} GPUs: {self._layout()}"
        yield (
            f"  batch       {plan.batch} x {plan.length} tokens a rank and micro-step, "
            f"{plan.accumulation} micro-step{'s' if plan.accumulation > 1 else ''}, "
            f"{plan.samples_a_step} rows a step"
        )
        yield f"  saves       {self._savings()}"
        yield ""
        yield from self._memory_lines()
        if not self.fits:
            yield ""
            yield from self._remedy_lines()
        yield ""
        yield from self._cost_lines()
        if self.compared:
            yield ""
            yield from self._compare_lines()

    def _layout(self) -> str:
        plan = self.plan
        parts = [
            f"{word} over {size}"
            for word, size in (("FSDP", plan.shard), ("tensor parallel", plan.tensor_parallel))
            if size > 1
        ]
        if plan.replicate > 1:
            parts.append(f"{plan.replicate} copies")
        if plan.cpu_offload:
            parts.append("weights and optimizer on the CPU")
        return ", ".join(parts) or "one copy of the model on each"

    def _savings(self) -> str:
        plan = self.plan
        recomputed = {
            "none": "no activation checkpointing",
            "full": "activation checkpointing",
            "op": "selective activation checkpointing (op)",
        }.get(plan.checkpointing, f"activation checkpointing of every {plan.checkpointing}. layer")
        words = [plan.method, recomputed, f"{plan.loss} cross-entropy", plan.optimizer]
        words.append("bf16" if plan.element_bytes == 2 else "fp32")
        if plan.fp32_master:
            words.append("fp32 master weights")
        return ", ".join(words)

    def _memory_lines(self) -> Iterator[str]:
        found, device = self.estimate, self.device
        yield f"Memory a GPU at its peak ({found.peak_phase}); computed, not measured"
        terms = sorted(found.terms.items(), key=lambda term: -term[1])
        for name, size in terms:
            if size / GIB >= 0.005:
                yield f"  {name:<20} {size / GIB:8.2f} GiB"
        yield f"  {'peak':<20} {found.peak / GIB:8.2f} GiB"
        if self.traced:
            peak = self.traced["peak"]
            difference = 100 * (found.peak / peak - 1)
            yield (
                f"  {'traced':<20} {peak / GIB:8.2f} GiB   "
                f"the same step on fake tensors; the formulas give {difference:+.1f} %"
            )
        kept = device.memory_gib - device.usable_gib
        verdict = "fits" if self.fits else "DOES NOT FIT"
        yield (
            f"{verdict}: {device.name} has {device.memory_gib:.1f} GiB, less {kept:.1f} kept back "
            f"for CUDA, NCCL and gaps: {device.usable_gib:.1f} GiB"
        )
        yield f"the largest part is {terms[0][0]}: {_ADVICE[terms[0][0]]}"
        host = host_bytes(self.plan, self.gpus_per_node)
        if host:
            yield f"on the CPU of each node: {host / GIB:.0f} GiB of weights and optimizer state"

    def _remedy_lines(self) -> Iterator[str]:
        yield "What to change, each on top of those before it that help"
        tried = self._remedies()
        width = max(len(each.overrides) for each in tried)
        for each in tried:
            verdict = "fits" if each.fits else "does not fit" if each.helps else "no help: left out"
            yield f"  {each.overrides:<{width}}  {each.peak_gib:8.2f} GiB  {verdict}"
        if not any(each.fits for each in tried):
            yield (
                "nothing here fits: use more GPUs (--nodes), a larger --gpu, or a smaller "
                "tokenizer.max_seq_len"
            )

    def _cost_lines(self) -> Iterator[str]:
        plan, took = self.plan, self.epoch_hours
        rate = self.device.bf16_tflops * 1e12 * self.mfu / flops_a_token(plan)
        yield (f"Time at {100 * self.mfu:.0f} % MFU on {self.device.name}; computed, not measured")
        yield f"  {'tokens/s/GPU':<20} {rate:8,.0f}"
        yield f"  {'time':<14} {_time(took):>14}, {took * plan.ranks:.3g} GPU-hours"
        yield f"  {'of':<20} {self.epoch.what}"
        yield "Disk"
        what = "weights and optimizer" if plan.is_full else "adapter and its optimizer"
        yield f"  {'checkpoint':<20} {_size(checkpoint_bytes(plan))}, {what}"
        yield f"  {'export':<20} {_size(export_bytes(plan))}, the merged model"

    def _compare_lines(self) -> Iterator[str]:
        yield (
            f"GiB a GPU, and hours a billion tokens, on {self.device.name} with "
            f"{self.gpus_per_node} GPUs a node; * does not fit"
        )
        heads = (f"{nodes} node{'s' if nodes > 1 else ''}" for nodes in COMPARED_NODES)
        yield f"{'METHOD':<8}" + "".join(f"{head:>18}" for head in heads)
        for method in METHODS:
            cells = (each for each in self.compared if each.method == method)
            yield f"{method:<8}" + "".join(
                f"{each.peak_gib:8.1f}{' ' if each.fits else '*'}{each.billion_tokens_hours:7.1f} h"
                for each in cells
            )


_ADVICE = {
    "weights": "more GPUs to shard over, or QLoRA, make it smaller",
    "gradients": "more GPUs to shard over, LoRA, or sync_each_micro_batch=true make it smaller",
    "optimizer": "more GPUs to shard over, an 8-bit AdamW, or LoRA make it smaller",
    "activations": "activation checkpointing, a smaller batch, or tensor parallelism make it "
    "smaller",
    "logits and loss": "trainer.loss.LinearCrossEntropy, a smaller batch, or tensor parallelism "
    "make it smaller",
    "gathered weights": "tensor parallelism makes it smaller; more nodes do not",
    "gradient reduction": "tensor parallelism or LoRA make it smaller",
    "working memory": "a smaller batch or tensor parallelism make it smaller",
    "rotary tables": "the model's longest context decides it",
}


def _count(number: int) -> str:
    for size, word in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.2f} {word}"
    return str(number)


def _size(size: float) -> str:
    return f"{size / GIB:8.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:8.2f} MiB"


def _time(in_hours: float) -> str:
    minutes = round(in_hours * 60)
    if minutes < 1:
        return f"{in_hours * 3600:.0f} s"
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"
