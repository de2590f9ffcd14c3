"""An estimate as a person reads it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.look.text import duration
from plugins.estimate.launcher.estimate import Estimate
from plugins.estimate.launcher.memory import checkpoint_bytes, export_bytes, host_bytes
from plugins.estimate.launcher.search import BASIS, Remedy
from plugins.estimate.launcher.step_config import GIB, StepConfig


def lines(
    estimate: Estimate, traced: Mapping[str, Any] | None = None, cost: str = ""
) -> Iterator[str]:
    """Yield it.

    Args:
        traced: the same step on fake tensors, from `plugins.estimate.launcher.estimate.trace`.
        cost: of its GPU-hours, with its currency.
    """
    yield from _model(estimate.step)
    yield from _memory(estimate, traced)
    if not estimate.fits:
        yield from _remedies(estimate.remedies)
    yield from _time(estimate, cost)
    yield from _disk(estimate)


def time_text(hours: float) -> str:
    """Return a computed time, a second at least."""
    return duration(max(round(3600 * hours), 1))


def _model(step: StepConfig) -> Iterator[str]:
    """The model, its layout, a step's rows and the settings that decide the memory."""
    shape, layout = step.shape, step.layout
    active = f", {shape.active_parameters / 1e9:.2f} B of them active" if shape.experts else ""
    share = 100 * step.trainable / step.total
    yield (
        f"  model       {step.model}, {step.total / 1e9:.2f} B parameters"
        f"{active}, {_count(step.trainable)} trained ({share:.2f} %)"
    )
    sizes = {
        "FSDP": layout.shard,
        "tensor parallelism": layout.tensor_parallel,
        "expert parallelism": layout.expert_parallel,
        "replicas": layout.replicate,
    }
    split = ", ".join(f"{word} over {size}" for word, size in sizes.items() if size > 1)
    split += ", weights and optimizer on the CPU" * step.cpu_offload
    yield (
        f"  layout      {step.nodes} x {step.gpus_per_node} GPUs: "
        f"{split or 'the whole model on each'}"
    )
    yield (
        f"  batch       {step.batch} x {step.length} tokens per rank and micro-step, "
        f"{step.accumulation} micro-step{'s' if step.accumulation > 1 else ''}, "
        f"{step.rows_per_step} rows per step"
    )
    dtype = "bf16" if step.element_bytes == 2 else "fp32"
    dtype += ", fp32 master weights" * step.fp32_master
    base = " over a base in NF4" * step.is_quantised
    what = f"{step.method.removeprefix('q')}{base}, activation_checkpointing={step.checkpointing}, "
    what += "score head" if step.loss == "score" else f"{step.loss} cross-entropy"
    yield f"  settings    {what}, {step.optimizer}, {dtype}\n"


def _terms(terms: Mapping[str, float], last: str) -> Iterator[str]:
    """The largest first, and their sum."""
    ordered = sorted(terms.items(), key=lambda term: -term[1])
    for name, size in (*ordered, (last, sum(terms.values()))):
        if size / GIB >= 0.005:
            yield f"  {name:<20} {size / GIB:8.2f} GiB"


def _memory(estimate: Estimate, traced: Mapping[str, Any] | None) -> Iterator[str]:
    memory, gpu, step = estimate.memory, estimate.gpu, estimate.step
    yield f"Memory per GPU at its peak ({memory.peak_phase}); computed, not measured"
    yield from _terms(memory.terms, "peak")
    if traced:
        peak = traced["peak"]
        off = 100 * (memory.peak / peak - 1)
        yield (
            f"  {'traced':<20} {peak / GIB:8.2f} GiB   the same step on fake tensors; the "
            f"formulas give {off:+.1f} %"
        )
    yield (
        f"{'fits' if estimate.fits else 'DOES NOT FIT'}: {gpu.name} has {gpu.memory_gib:.1f} GiB, "
        f"{gpu.memory_gib - gpu.usable_gib:.1f} of them reserved for CUDA, NCCL and gaps: "
        f"{gpu.usable_gib:.1f} GiB usable"
    )
    if step.apart:
        yield "not computed: the rollout nodes, and the time until they have answered"
    if host := host_bytes(step):
        yield f"on the CPU of each node: {host / GIB:.0f} GiB of weights and optimizer state"


def _remedies(tried: Sequence[Remedy]) -> Iterator[str]:
    yield "\nWhat to change, each on top of those before it that help"
    width = max((len(each.overrides) for each in tried), default=0)
    for each in tried:
        verdict = "fits" if each.fits else "does not fit" if each.helps else "no help: left out"
        yield f"  {each.overrides:<{width}}  {each.peak_gib:8.2f} GiB  {verdict}"
    if not any(each.fits for each in tried):
        yield (
            "nothing here fits: use more GPUs (--nodes), a larger --gpu, or a smaller "
            "tokenizer.max_seq_len"
        )


def _time(estimate: Estimate, cost: str) -> Iterator[str]:
    step, hours, prediction = estimate.step, estimate.hours, estimate.prediction
    mfu, hfu, (low, high) = prediction.time.mfu, prediction.time.hfu, prediction.range
    again = f", HFU {100 * hfu:.0f} %" if hfu > 1.005 * mfu else ""
    yield f"\nTime on {estimate.gpu.name}; computed, not measured"
    yield (
        f"  {'tokens/s/GPU':<20} {prediction.rate:8,.0f}, between {low:,.0f} and {high:,.0f}; MFU "
        f"{100 * mfu:.0f} %{again}"
    )
    yield f"  {'from':<20} {BASIS}"
    cost = cost and f", {cost}"
    yield f"  {'time':<14} {time_text(hours):>14}, {hours * step.layout.ranks:.3g} GPU-hours{cost}"
    yield f"  {'for':<20} {estimate.epoch[1]}"
    if (share := estimate.hours_generating / hours) > 1e-9:
        what = f"answers of {step.new_tokens} tokens, generated"
        yield f"  {'':<20} {100 * share:.0f} % of it: {what}"


def _disk(estimate: Estimate) -> Iterator[str]:
    step = estimate.step
    yield "Disk"
    exported = "adapter"
    if step.exports_model:
        exported = "model" if step.adapter is None else "merged model"
    yield f"  {'checkpoint':<20} {_size(checkpoint_bytes(step))}"
    yield f"  {'export':<20} {_size(export_bytes(step))}, the {exported}"


def _count(number: int) -> str:
    for size, word in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.2f} {word}"
    return str(number)


def _size(size: float) -> str:
    return f"{size / GIB:8.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:8.2f} MiB"
