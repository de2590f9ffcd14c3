"""Settings of a recipe's step: every way to change it, and what is predicted of each.

What to change if a recipe does not fit, and --tune, ask `settings` for candidates and a `Predictor`
for their memory and time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from launcher.gpus import Gpu
from plugins.estimate.launcher.compute import uncertainty
from plugins.estimate.launcher.links import Links
from plugins.estimate.launcher.memory import StepMemory
from plugins.estimate.launcher.step_config import GIB, StepConfig
from plugins.estimate.launcher.step_time import StepTime, step_time
from runspec.adapters import USUAL_RANK
from runspec.layout import Layout, LayoutError

TENSOR_PARALLEL = (1, 2, 4, 8)
# What predicted times rest on, in words.
BASIS = "published speeds of kernels and links (docs/measurements.md)"


def _to_layout(step: StepConfig, sizes: tuple[int, ...]) -> StepConfig | None:
    """A layout: ranks of tensor parallelism, number of replicas, ranks that share the experts.

    Without the third they stay as they are. None if the layout does not exist.
    """
    tensor, replicas = sizes[:2]
    spread = sizes[2] if len(sizes) > 2 else step.layout.expert_parallel
    keys = {
        "tensor_parallel_dim": tensor,
        "data_parallel_replicate_dim": replicas,
        "expert_parallel_dim": spread,
    }
    try:
        layout = Layout.of(keys, step.layout.ranks, step.gpus_per_node)
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


Choices = Iterable[Any] | Callable[[StepConfig], Iterable[Any]]


def settings(own: StepConfig, **choices: Choices) -> Iterator[StepConfig]:
    """Yield every combination of these choices that can be trained, in the order of the choices.

    A choice has values, or a function of the step that gives them: sizes of `layout`, else fields
    of the step. Changes are made from left to right.
    """
    if not choices:
        if not own.faults():
            yield own
        return
    (move, values), *rest = choices.items()
    for value in values(own) if callable(values) else values:
        moved = _to_layout(own, value) if move == "layout" else replace(own, **value)
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
    yield f"gradient_accumulation_steps={step.accumulation}"
    if not step.cpu_offload:
        yield f"sync_each_micro_batch={str(step.sync_each).lower()}"
    yield f"activation_checkpointing={step.checkpointing}"
    yield _method_keys(step)
    if step.cpu_offload:
        yield "fsdp_cpu_offload=true"
    if step.keeps_sampled and step.generation_batch:
        yield f"generation_batch_size={step.generation_batch}"


def _method_keys(step: StepConfig) -> str:
    base = f"model.quantize_base={str(step.is_quantised).lower()}"
    if not step.is_full and not step.lora_rank:
        return f"model.adapter={step.method.removeprefix('q')} {base}"
    if step.method == "full":
        return "model.lora_rank=null"
    return f"model.lora_rank={step.lora_rank} {base}"


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
        return step_time(self.step, predictor.gpu, predictor.links)

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
    """Predicts settings near a recipe's own."""

    own: StepConfig
    gpu: Gpu
    # Per GPU between nodes; None for what is usual with the GPU.
    network_gbits: float | None = None

    @cached_property
    def links(self) -> Links:
        """How the GPUs are connected."""
        return Links.of(self.gpu, self.own.gpus_per_node, self.network_gbits)

    def of(self, step: StepConfig) -> Prediction:
        """Return what is predicted of a setting."""
        peak_gib = StepMemory(step).peak / GIB
        return Prediction(step, peak_gib, peak_gib <= self.gpu.usable_gib, self)


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
    yield {"layout": [(step.layout.tensor_parallel, 1)]}
    yield {"fields": [{"checkpointing": "full"}]}
    if step.accumulation > 1 and step.fsdp:
        yield {"fields": [{"sync_each": True}]}
    if step.keeps_sampled and step.answers_at_once > 1 and not step.apart:
        yield {"fields": [{"generation_batch": step.answers_at_once // 2}]}
    if step.batch > 1:
        rows = step.batch * step.accumulation
        yield {"fields": [{"batch": 1, "accumulation": rows, "sync_each": step.fsdp}]}
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
            helps = tried.peak_gib < now.peak_gib * 0.99
            yield Remedy(overrides(step, now.step), tried.peak_gib, helps, tried.fits)
            if tried.fits:
                return
            now = tried if helps else now
