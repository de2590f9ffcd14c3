"""Settings of a recipe's step: every way to change it, and what is predicted of each.

What to change if a recipe does not fit, and --tune, ask `settings` for candidates and a `Predictor`
for their memory and time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from launcher.gpus import Gpu
from plugins.estimate.launcher.compute import uncertainty
from plugins.estimate.launcher.links import Links
from plugins.estimate.launcher.memory import StepMemory
from plugins.estimate.launcher.samplers import generates, sampler
from plugins.estimate.launcher.step_config import GIB, StepConfig
from plugins.estimate.launcher.step_time import StepTime, pace_of, step_time
from runspec.adapters import USUAL_RANK
from runspec.keys.model import TRANSFORMERS
from runspec.layout import Layout, LayoutError

TENSOR_PARALLEL = (1, 2, 4, 8)


# Moves: one change of a step; None if it cannot be made ------------------------------------------


def _to_layout(step: StepConfig, sizes: tuple[int, ...], nodes: int = 0) -> StepConfig | None:
    """A layout: ranks of tensor parallelism, number of replicas, ranks that share the experts.

    Without the third they stay as they are.
    """
    tensor, replicas = sizes[:2]
    spread = sizes[2] if len(sizes) > 2 else step.layout.expert_parallel
    keys = {
        "tensor_parallel_dim": tensor,
        "data_parallel_replicate_dim": replicas,
        "expert_parallel_dim": spread,
    }
    ranks = nodes * step.gpus_per_node or step.layout.ranks
    try:
        layout = Layout.of(keys, ranks, step.gpus_per_node)
    except LayoutError:
        return None
    return replace(step, layout=layout)


def spreads(step: StepConfig) -> list[int]:
    """Over how many ranks its experts may be spread: none, those of a node, all of a replica."""
    if not step.shape.experts:
        return [1]
    replica = step.layout.ranks // step.layout.replicate
    sizes = {1, min(step.gpus_per_node, replica), replica}
    return sorted(size for size in sizes if not any(n % size for n in step.shape.experts))


def _to_split(step: StepConfig, nodes: int) -> StepConfig | None:
    """So many of the job's nodes train, and the others generate; all of them take turns.

    One replica per node, or per GPU, stays so; else there is one replica.
    """
    layout, replicas = step.layout, 1
    if layout.replicate > 1 and layout.shard == 1:
        replicas = nodes * step.gpus_per_node // layout.tensor_parallel
    elif layout.replicate == step.nodes > 1:
        replicas = nodes
    moved = _to_layout(step, (layout.tensor_parallel, replicas), nodes)
    others = step.nodes + step.rollout_nodes - nodes
    staleness = step.max_staleness if others else 0
    return moved and replace(
        moved, sampling_gpus=others * step.gpus_per_node, max_staleness=staleness
    )


# Any other move takes fields of the step.
_MOVES: dict[str, Callable[[StepConfig, Any], StepConfig | None]] = {
    "split": _to_split,
    "layout": _to_layout,
}
Choices = Iterable[Any] | Callable[[StepConfig], Iterable[Any]]


def settings(own: StepConfig, **choices: Choices) -> Iterator[StepConfig]:
    """Yield every combination of these choices that can be trained, in the order of the choices.

    A choice is a move with its values, or with a function of the step that gives them. Moves are
    made from left to right.
    """
    if not choices:
        if not own.faults():
            yield own
        return
    (move, values), *rest = choices.items()
    for value in values(own) if callable(values) else values:
        moved = _MOVES[move](own, value) if move in _MOVES else replace(own, **value)
        if moved is not None:
            yield from settings(moved, **dict(rest))


# The keys of a recipe ----------------------------------------------------------------------------


def overrides(step: StepConfig, before: StepConfig) -> str:
    """Return the keys of a recipe that make this step, of those that differ from `before`."""
    known = set(_keys(before))
    return " ".join(key for key in _keys(step) if key not in known)


def _keys(step: StepConfig) -> Iterator[str]:
    yield f"tensor_parallel_dim={step.layout.tensor_parallel}"
    yield f"data_parallel_replicate_dim={step.layout.replicate}"
    if step.shape.experts:
        yield f"expert_parallel_dim={step.layout.expert_parallel}"
    yield f"batch_size={step.batch}"
    if step.teacher_quantised:
        yield "teacher_quantize_base=true"
    if step.top_k:
        return
    yield f"gradient_accumulation_steps={step.accumulation}"
    if not step.cpu_offload:
        yield f"sync_each_micro_batch={str(step.sync_each).lower()}"
    yield f"activation_checkpointing={step.checkpointing}"
    yield _method_keys(step)
    if step.cpu_offload:
        yield "fsdp_cpu_offload=true"
    if step.keeps_sampled:
        if step.vllm:
            yield f"rollout_gpus={step.rollout_gpus}"
            yield f"rollout_gpu_memory_utilization={step.vllm_share or 'null'}"
        if step.generation_batch:
            yield f"generation_batch_size={step.generation_batch}"
        yield f"resources.nodes={step.nodes}"
        yield f"resources.rollout={step.rollout_nodes or 'same'}"
        yield f"max_staleness={step.max_staleness}"


def _base(step: StepConfig) -> str:
    return "fp8" if step.is_quantised and step.fp8_base else str(step.is_quantised).lower()


def _method_keys(step: StepConfig) -> str:
    if not step.is_full and not step.lora_rank:
        return f"model.adapter={step.method.removeprefix('q')} model.quantize_base={_base(step)}"
    if step.builder == TRANSFORMERS:
        if step.method == "full":
            return "model.lora_rank=null"
        return f"model.lora_rank={step.lora_rank} model.quantize_base={_base(step)}"
    module, _, name = step.builder.rpartition(".")
    prefix = {"full": "", "lora": "lora_", "dora": "lora_"}.get(step.method, "qlora_")
    text = f"model._component_={module}.{prefix}{re.sub('^q?lora_', '', name)}"
    if step.method == "full" or "lora_" in name:
        return text
    # The recipe has no adapter yet.
    names = (n for n in step.lora_targets if step.shape.names[n] == "attention")
    attention = ",".join(name.rpartition(".")[2] for name in names)
    return (
        f"{text} +model.lora_attn_modules=[{attention}] +model.apply_lora_to_mlp=true "
        f"+model.lora_rank={step.lora_rank} +model.lora_alpha={2 * step.lora_rank}"
    )


# What is predicted -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """One setting, its memory, and its time, which is worked out when it is asked for."""

    step: StepConfig
    peak_gib: float
    fits: bool
    predictor: Predictor

    @cached_property
    def time(self) -> StepTime:
        """Seconds of a step, and what follows from them."""
        predictor = self.predictor
        return step_time(self.step, predictor.gpu, predictor.links, predictor.pace)

    @property
    def rate(self) -> float:
        """Tokens per second and GPU."""
        return self.time.tokens_per_second_per_gpu

    @property
    def range(self) -> tuple[float, float]:
        """The rates between which a run is expected."""
        spread = uncertainty(self.step)
        return (1 - spread) * self.rate, (1 + spread) * self.rate

    def as_json(self) -> dict[str, Any]:
        """Return the figures; sizes in GiB, times in seconds."""
        return {
            "peak_gib": round(self.peak_gib, 3),
            "fits": self.fits,
            "computing_share": self.time.computing_share,
            **vars(self.time),
        }


@dataclass(frozen=True)
class Predictor:
    """Predicts settings near a recipe's own.

    Every setting is predicted to be as much slower or faster than its terms say as that one is.
    """

    own: StepConfig
    gpu: Gpu
    # Of the recipe's own step while no GPU waits for another, as a run has shown it; None: as
    # `plugins.estimate.launcher.compute` computes it.
    mfu: float | None = None
    # Per GPU between nodes; None for what is usual with the GPU.
    network_gbits: float | None = None

    @cached_property
    def links(self) -> Links:
        """How the GPUs are connected."""
        return Links.of(self.gpu, self.own.gpus_per_node, self.network_gbits)

    @cached_property
    def pace(self) -> float:
        """Time over that of the terms; UsageFault if products were faster than the data sheet."""
        return 1.0 if self.mfu is None else pace_of(self.own, self.gpu, self.mfu)

    @property
    def basis(self) -> str:
        """The basis of the times, in words."""
        if self.mfu is None:
            return "published speeds of kernels and links (docs/measurements.md)"
        return (
            f"{100 * self.mfu:.0f} % MFU in the recipe's own step without waiting: "
            f"{self.pace:.2f} times the time by kernels' published speeds"
        )

    def of(self, step: StepConfig) -> Prediction:
        """Return what is predicted of a setting."""
        memory = self.gpu.memory_gib * GIB
        peak_gib = max(StepMemory(step).peak, sum(sampler(step, memory).values())) / GIB
        fits = peak_gib <= self.gpu.usable_gib and generates(step, memory)
        return Prediction(step, peak_gib, fits, self)


# What to change if a recipe does not fit ---------------------------------------------------------


@dataclass(frozen=True)
class Remedy:
    """A change of the recipe, on top of those before it that helped, and what comes of it."""

    # The recipe's keys.
    overrides: str
    # Of a GPU, with it.
    peak_gib: float
    # It takes less memory.
    helps: bool
    fits: bool


def _remedies(step: StepConfig) -> Iterator[dict[str, Choices]]:
    """What may help, in the order in which it is tried: what costs the least time first."""
    if step.top_k:
        yield {"layout": [(step.layout.tensor_parallel, 1)]}
        yield {"fields": [{"batch": 1}]}
        yield {"layout": [(n, 1) for n in TENSOR_PARALLEL if n > step.layout.tensor_parallel]}
        yield {"fields": [{"method": "qfull", "teacher_quantised": True}]}
        return
    if step.vllm_in_turns and step.vllm_share:
        yield {"fields": [{"vllm_share": None}]}
    yield {"layout": [(step.layout.tensor_parallel, 1)]}
    yield {"fields": [{"checkpointing": "full"}]}
    if step.accumulation > 1 and step.fsdp:
        yield {"fields": [{"sync_each": True}]}
    if step.keeps_sampled and step.answers_at_once > 1 and not step.vllm:
        yield {"fields": [{"generation_batch": step.answers_at_once // 2}]}
    if step.batch > 1:
        rows = step.batch * step.accumulation
        yield {"fields": [{"batch": 1, "accumulation": rows, "sync_each": step.fsdp}]}
    if step.vllm_in_turns and step.rollout_gpus < step.gpus_per_node:
        yield {"fields": [{"rollout_gpus": step.gpus_per_node}]}
    if step.shape.experts:
        yield {"layout": [(step.layout.tensor_parallel, 1, n) for n in spreads(step)[1:]]}
    yield {"layout": [(n, 1) for n in TENSOR_PARALLEL if n > step.layout.tensor_parallel]}
    if step.is_full:
        lora = {"lora_rank": USUAL_RANK, "lora_targets": (*step.shape.names,)}
        yield {"fields": [{"method": "qlora", **lora}]}
    elif not step.is_quantised and step.own is None:
        yield {"fields": [{"method": f"q{step.method}"}]}
    if step.teacher and not step.teacher_quantised:
        yield {"fields": [{"teacher_quantised": True}]}
    # Offloading reduces after every micro-step, as no GPU could hold all gradients.
    yield {"fields": [{"cpu_offload": True, "sync_each": True}]}


def remedies(predictor: Predictor) -> Iterator[Remedy]:
    """Try what may help, each on top of what helped before, until the recipe fits."""
    now = predictor.of(predictor.own)
    for choices in _remedies(predictor.own):
        for step in settings(now.step, **choices):
            if step == now.step:
                continue
            tried = predictor.of(step)
            # A share of vLLM's that is too small makes nothing larger.
            fits = tried.fits and not now.fits
            helps = fits or tried.peak_gib < now.peak_gib * 0.99
            yield Remedy(overrides(step, now.step), tried.peak_gib, helps, fits)
            if fits:
                return
            now = tried if helps else now
