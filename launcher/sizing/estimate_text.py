"""The estimate as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.sizing.estimate import COMPARED_NODES, Estimate
from launcher.sizing.memory import checkpoint_bytes, export_bytes, host_bytes
from launcher.sizing.search import METHODS
from launcher.sizing.step_config import GIB, StepConfig

# What makes a term smaller.
_SMALLER = {
    "weights": "more GPUs to shard over, or QLoRA,",
    "gradients": "more GPUs to shard over, LoRA, or sync_each_micro_batch=true",
    "optimizer": "more GPUs to shard over, an 8-bit AdamW, or LoRA",
    "activations": "activation checkpointing, a smaller batch, or tensor parallelism",
    "logits and loss": "LinearCrossEntropy, a smaller batch, or tensor parallelism",
    "gathered weights": "tensor parallelism or QLoRA, not more nodes,",
    "gradient reduction": "tensor parallelism or LoRA",
    "working memory": "a smaller batch or tensor parallelism",
}


def lines(estimate: Estimate) -> Iterator[str]:
    """Yield the estimate's lines."""
    step, name = estimate.step, estimate.name
    share = 100 * step.trainable / step.total
    yield f"{name}: {estimate.description}" if estimate.description else name
    yield (
        f"  model       {step.builder.rpartition('.')[2]}, {step.total / 1e9:.2f} B "
        f"parameters, {_count(step.trainable)} trained ({share:.2f} %)\n"
        f"  layout      {step.nodes} x {step.gpus_per_node} GPUs: {_layout(step)}\n"
        f"  batch       {step.batch} x {step.length} tokens per rank and micro-step, "
        f"{step.accumulation} micro-step{'s' if step.accumulation > 1 else ''}, "
        f"{step.rows_per_step} rows per step\n"
        f"  settings    {_settings(step)}\n"
    )
    yield from _memory(estimate)
    if not estimate.fits:
        yield from _remedies(estimate)
    yield from _time_and_disk(estimate)
    if estimate.compared:
        yield from _compared(estimate)


def _layout(step: StepConfig) -> str:
    layout = step.layout
    named = (("FSDP", layout.shard), ("tensor parallelism", layout.tensor_parallel))
    parts = [f"{word} over {size}" for word, size in named if size > 1]
    if layout.replicate > 1:
        parts.append(f"{layout.replicate} data-parallel replicas")
    if step.cpu_offload:
        parts.append("weights and optimizer on the CPU")
    return ", ".join(parts) or "the whole model on each"


def _settings(step: StepConfig) -> str:
    recomputed = {
        "none": "no activation checkpointing",
        "full": "activation checkpointing",
        "op": "selective activation checkpointing (op)",
    }.get(step.checkpointing, f"activation checkpointing of one layer in {step.checkpointing}")
    dtype = "bf16" if step.element_bytes == 2 else "fp32"
    dtype += ", fp32 master weights" if step.fp32_master else ""
    return f"{step.method}, {recomputed}, {step.loss} cross-entropy, {step.optimizer}, {dtype}"


def _memory(estimate: Estimate) -> Iterator[str]:
    found, gpu = estimate.memory, estimate.gpu
    yield f"Memory per GPU at its peak ({found.peak_phase}); computed, not measured"
    terms = sorted(found.terms.items(), key=lambda term: -term[1])
    for name, size in (*terms, ("peak", found.peak)):
        if size / GIB >= 0.005:
            yield f"  {name:<20} {size / GIB:8.2f} GiB"
    if estimate.traced:
        peak = estimate.traced["peak"]
        yield (
            f"  {'traced':<20} {peak / GIB:8.2f} GiB   the same step on fake tensors; the "
            f"formulas give {100 * (found.peak / peak - 1):+.1f} %"
        )
    largest, advice = terms[0][0], _SMALLER.get(terms[0][0])
    change = f"{advice} make it smaller" if advice else "the model's longest context decides it"
    yield (
        f"{'fits' if estimate.fits else 'DOES NOT FIT'}: {gpu.name} has {gpu.memory_gib:.1f} GiB, "
        f"{gpu.memory_gib - gpu.usable_gib:.1f} of them reserved for CUDA, NCCL and gaps: "
        f"{gpu.usable_gib:.1f} GiB usable\n"
        f"the largest part is {largest}: {change}"
    )
    if host := host_bytes(estimate.step):
        yield f"on the CPU of each node: {host / GIB:.0f} GiB of weights and optimizer state"


def _remedies(estimate: Estimate) -> Iterator[str]:
    yield "\nWhat to change, each on top of those before it that help"
    tried = estimate.remedies
    width = max((len(each.overrides) for each in tried), default=0)
    for each in tried:
        verdict = "fits" if each.fits else "does not fit" if each.helps else "no help: left out"
        yield f"  {each.overrides:<{width}}  {each.peak_gib:8.2f} GiB  {verdict}"
    if not any(each.fits for each in tried):
        yield (
            "nothing here fits: use more GPUs (--nodes), a larger --gpu, or a smaller "
            "tokenizer.max_seq_len"
        )


def _time_and_disk(estimate: Estimate) -> Iterator[str]:
    step, took, mfu = estimate.step, estimate.hours, estimate.predictor.mfu
    more = step.flops.hardware / step.flops.model
    hfu = f" ({100 * mfu * more:.0f} % HFU, with recomputation)" if more > 1 else ""
    what = "weights and optimizer" if step.is_full else "adapter and its optimizer"
    yield (
        f"\nTime at {100 * mfu:.0f} % MFU{hfu} on {estimate.gpu.name}; computed, not measured\n"
        f"  {'tokens/s/GPU':<20} {estimate.tokens_per_second_per_gpu:8,.0f}\n"
        f"  {'time':<14} {_duration(took):>14}, {took * step.layout.ranks:.3g} GPU-hours\n"
        f"  {'of':<20} {estimate.tokens_are}\n"
        "Disk\n"
        f"  {'checkpoint':<20} {_size(checkpoint_bytes(step))}, {what}\n"
        f"  {'export':<20} {_size(export_bytes(step))}, the merged model"
    )


def _compared(estimate: Estimate) -> Iterator[str]:
    yield (
        f"\nGiB per GPU, and hours per billion tokens, on {estimate.gpu.name} with "
        f"{estimate.step.gpus_per_node} GPUs per node; predicted, not measured; * does not fit"
    )
    heads = (f"{nodes} node{'s' if nodes > 1 else ''}" for nodes in COMPARED_NODES)
    yield f"{'METHOD':<8}" + "".join(f"{head:>18}" for head in heads)
    cells = {(each.step.method, each.step.nodes): each for each in estimate.compared}
    for method in METHODS:
        row = ""
        for nodes in COMPARED_NODES:
            if each := cells.get((method, nodes)):
                mark = " " if each.fits else "*"
                row += f"{each.peak_gib:8.1f}{mark}{each.billion_tokens_hours:7.1f} h"
            else:
                row += f"{'-':>18}"
        yield f"{method:<8}{row}"


def _count(number: int) -> str:
    for size, word in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.2f} {word}"
    return str(number)


def _size(size: float) -> str:
    return f"{size / GIB:8.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:8.2f} MiB"


def _duration(hours: float) -> str:
    minutes = round(hours * 60)
    if minutes < 1:
        return f"{hours * 3600:.0f} s"
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"
