"""What a recipe needs: memory per GPU, time, disk, and what to change if it does not fit.

All of it is computed from the recipe, none of it measured; `plugins.estimate.launcher.memory` has the
formulas.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher import venv
from launcher.errors import PreflightFault, UsageFault
from launcher.recipe.model import Recipe
from plugins.estimate.launcher import gpus, replicas, step_time
from plugins.estimate.launcher.epoch import duration, epoch_of
from plugins.estimate.launcher.memory import (
    ASLEEP,
    StepMemory,
    checkpoint_bytes,
    export_bytes,
    host_bytes,
    transfer_bytes,
)
from plugins.estimate.launcher.recipe_step import step_of
from plugins.estimate.launcher.search import Predictor, Remedy, remedies
from plugins.estimate.launcher.step_config import GIB, StepConfig
from runspec.step import kept_bytes


class Estimate:
    """All that is computed of one recipe.

    predictor: of settings near the recipe's own step. peak_gib: of a step, or of a replica's GPU.
    traced: the same step on fake tensors.
    """

    def __init__(
        self,
        recipe: Recipe,
        root: Path,
        gpu: str | None = None,
        mfu: float | None = None,
        network_gbits: float | None = None,
        *,
        tokens: int | None = None,
        price: float | None = None,
        currency: str = "",
        traces: bool = False,
    ) -> None:
        """Work everything out for a recipe whose models lie under root.

        gpu: a name of configs/gpus.yaml. mfu: see `plugins.estimate.launcher.search.Predictor`.
        network_gbits: per GPU between nodes; None for the usual. tokens: to be trained, for time
        and cost; None for an epoch. price: of a GPU-hour, in currency; None leaves the cost out.
        traces: whether `traced` is wanted.
        """
        if recipe.entry.method is None or not recipe.entry.can_estimate:
            raise UsageFault(
                f"{recipe.name} cannot be estimated: it starts {recipe.entry_name}, and only the "
                "kit's own training methods can be computed"
            )
        self.name, self.description = recipe.name, recipe.description
        config = recipe.resolved(root, "run")
        step = step_of(config, recipe.resources.nodes, recipe.resources.gpus_per_node)
        self.step, self.gpu = step, gpus.by_name(gpu)
        self.predictor = Predictor(step, self.gpu, mfu, network_gbits)
        self.memory = StepMemory(step)
        # Of a GPU while a replica generates; {} without replicas.
        gpu_bytes = self.gpu.memory_gib * GIB
        self.replica = replicas.replica(step, gpu_bytes)
        # What vLLM in turns takes of a GPU.
        self.vllm_share = replicas.vllm_share(step, gpu_bytes) if step.vllm_in_turns else 0.0
        # Of a teacher's pass, if every token is trained.
        self.kept_bytes = kept_bytes(step.top_k) if step.top_k else 0
        # Where the policy samples answers: its steps and what comes between them.
        self.prediction = self.predictor.of(step)
        self.fits, self.peak_gib = self.prediction.fits, self.prediction.peak_gib
        self.tokens, self.tokens_are, samples = epoch_of(config, step)
        if recipe.entry.method.samples_answers:
            group = config.get("group_size") or recipe.entry.method.keys()["group_size"].default
            updates, samples = round(1 / step.on_policy_share), samples * int(group)
            often = f", each in {updates} updates" if updates > 1 else ""
            self.tokens_are = f"an epoch of {samples:,} answers, as long as can be{often}"
            self.tokens = samples * updates * step.length
        if tokens is not None:
            self.tokens, self.tokens_are = tokens, f"{tokens:,} tokens, as given"
        took = self.prediction.time
        steps_h = self.tokens / (self.prediction.rate * step.gpus) / 3600
        # Of the pass over the data before the first step, by its FLOPs.
        once = step.flops.once / step.flops.model / int(config.get("epochs") or 1)
        self.hours_before = steps_h * took.update_s / took.seconds * once
        self.hours_transfer = steps_h * took.transfer_s / took.seconds
        self.hours_generating = steps_h * (1 - took.update_s / took.seconds) - self.hours_transfer
        self.hours = steps_h + self.hours_before
        # Seconds of each phase of a rollout.
        self.rollout_s = {}
        if step.keeps_sampled:
            phases = {"generate": took.generating_s, "score": took.scoring_s}
            phases |= {"transfer": took.transfer_s, "update": took.update_s}
            self.rollout_s = {n: s / step.on_policy_share for n, s in phases.items() if s}
        self.cost = None if price is None else self.hours * step.gpus * price
        self.currency = currency
        self.traced: dict[str, Any] | None = None
        if traces:
            self.traced = trace(
                recipe.train_config(root, "run"), recipe.entry.method.objective, step.layout.ranks
            )

    @cached_property
    def remedies(self) -> list[Remedy]:
        """What to change if it does not fit."""
        return [] if self.fits else [*remedies(self.predictor)]

    def as_json(self) -> dict[str, Any]:
        """Return everything, sizes in GiB."""
        step, memory, gpu, time = self.step, self.memory, self.gpu, self.prediction.time
        fields = {k: v for k, v in asdict(step).items() if k not in ("shape", "layout", "teacher")}
        return {
            "recipe": self.name,
            "basis": "computed, not measured",
            "gpu": {"name": gpu.name, "memory_gib": gpu.memory_gib},
            "usable_gib": round(gpu.usable_gib, 3),
            "fits": self.fits,
            "peak_gib": round(memory.peak / GIB, 3),
            "peak_phase": memory.peak_phase,
            "terms_gib": _in_gib(memory.terms),
            "replica_gib": _in_gib(self.replica),
            "vllm_share": self.vllm_share,
            "phases_gib": _in_gib({k: sum(v.values()) for k, v in memory.phases.items()}),
            "layout": vars(step.layout),
            "step": fields,
            "parameters": step.total,
            "active_parameters": step.shape.active_parameters,
            "trainable": step.trainable,
            "host_memory_per_node_gib": round(host_bytes(step) / GIB, 3),
            "checkpoint_gib": round(checkpoint_bytes(step) / GIB, 3),
            "export_gib": round(export_bytes(step) / GIB, 3),
            "kept_gib": round(self.kept_bytes * self.tokens / GIB, 3),
            "mfu": time.mfu,
            "hfu": time.hfu,
            "tokens_per_second_per_gpu": self.prediction.rate,
            "tokens_per_second_per_gpu_range": self.prediction.range,
            "rests_on": self.predictor.basis,
            "tokens": self.tokens,
            "hours": self.hours,
            "hours_before": self.hours_before,
            "hours_generating": self.hours_generating,
            "hours_transfer": self.hours_transfer,
            "rollout_s": self.rollout_s,
            "gpu_hours": self.hours * step.gpus,
            "cost": self.cost,
            "remedies": [vars(each) for each in self.remedies],
            "traced": self.traced,
        }

    def lines(self) -> Iterator[str]:
        """Yield it as a person reads it."""
        yield f"{self.name}: {self.description}" if self.description else self.name
        yield from _model(self.step)
        yield from _memory(self)
        if not self.fits:
            yield from _remedies(self.remedies)
        yield from _time_and_disk(self)


def peak_gib(recipe: Recipe, root: Path) -> float:
    """Return the memory that a recipe's step needs of each GPU, computed."""
    resources = recipe.resources
    config = recipe.resolved(root, "run")
    return StepMemory(step_of(config, resources.nodes, resources.gpus_per_node)).peak / GIB


def trace(train_config: dict[str, Any], objective: str, ranks: int) -> dict[str, Any]:
    """Return what the trainer finds of the same step on fake tensors, to check the formulas.

    PreflightFault if it cannot be traced. See `python -m plugins.estimate.trace`.
    """
    try:
        done = venv.ask_trainer(
            "plugins.estimate.trace",
            [train_config],
            "--ranks",
            str(ranks),
            "--objective",
            objective,
        )
    except OSError as error:
        raise PreflightFault(
            f"cannot trace: {error}: set up the environment with: bash setup.sh"
        ) from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["no message"]
        faults = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
        raise PreflightFault(faults or said[-1:])
    return dict(json.loads(done.stdout.splitlines()[-1]))


# As text -----------------------------------------------------------------------------------------


def _in_gib(sizes: Mapping[str, float]) -> dict[str, float]:
    return {name: round(size / GIB, 3) for name, size in sizes.items() if size}


def _model(step: StepConfig) -> Iterator[str]:
    """The model, its layout, a step's rows and the settings that decide the memory."""
    shape, layout = step.shape, step.layout
    active = f", {shape.active_parameters / 1e9:.2f} B of them active" if shape.experts else ""
    share = 100 * step.trainable / step.total
    yield (
        f"  model       {step.builder.rpartition('.')[2]}, {step.total / 1e9:.2f} B parameters"
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
    rollout = f"; {step.rollout_nodes} x {step.gpus_per_node} more generate" * bool(step.replicas)
    yield (
        f"  layout      {step.nodes} x {step.gpus_per_node} GPUs: "
        f"{split or 'the whole model on each'}{rollout}"
    )
    yield (
        f"  batch       {step.batch} x {step.length} tokens per rank and micro-step, "
        f"{step.accumulation} micro-step{'s' if step.accumulation > 1 else ''}, "
        f"{step.rows_per_step} rows per step"
    )
    dtype = "bf16" if step.element_bytes == 2 else "fp32"
    dtype += ", fp32 master weights" * step.fp32_master
    base = f" over a base in {'fp8' if step.fp8_base else 'NF4'}" * step.is_quantised
    what = f"{step.method.removeprefix('q')}{base}, activation_checkpointing={step.checkpointing}, "
    what += "score head" if step.loss == "score" else f"{step.loss} cross-entropy"
    if step.top_k:
        what = f"the teacher's forward pass{base}, top {step.top_k} and tail"
    yield f"  settings    {what}, {step.optimizer}, {dtype}\n"


def _terms(terms: Mapping[str, float], last: str) -> Iterator[str]:
    """The largest first, and their sum."""
    ordered = sorted(terms.items(), key=lambda term: -term[1])
    for name, size in (*ordered, (last, sum(terms.values()))):
        if size / GIB >= 0.005:
            yield f"  {name:<20} {size / GIB:8.2f} GiB"


def _memory(estimate: Estimate) -> Iterator[str]:
    memory, gpu, step = estimate.memory, estimate.gpu, estimate.step
    yield f"Memory per GPU at its peak ({memory.peak_phase}); computed, not measured"
    yield from _terms(memory.terms, "peak")
    if estimate.traced:
        peak = estimate.traced["peak"]
        off = 100 * ((memory.peak - memory.terms.get(ASLEEP, 0)) / peak - 1)
        yield (
            f"  {'traced':<20} {peak / GIB:8.2f} GiB   the same step on fake tensors; the "
            f"formulas give {off:+.1f} %"
        )
    yield (
        f"{'fits' if estimate.fits else 'DOES NOT FIT'}: {gpu.name} has {gpu.memory_gib:.1f} GiB, "
        f"{gpu.memory_gib - gpu.usable_gib:.1f} of them reserved for CUDA, NCCL and gaps: "
        f"{gpu.usable_gib:.1f} GiB usable"
    )
    if estimate.replica:
        when = "while vLLM generates" if step.vllm_in_turns else "of the rollout nodes"
        yield f"Memory per GPU {when}; computed, not measured"
        yield from _terms(estimate.replica, "sum")
    if step.vllm_in_turns:
        share = estimate.vllm_share
        answers = replicas.answers_of_vllm(step, gpu.memory_gib * GIB)
        yield (
            f"vLLM gets {share:.2f} of each GPU, {share * gpu.memory_gib:.1f} GiB: room for "
            f"{min(answers, step.answers_at_once)} of its {step.answers_at_once} answers, each as "
            "long as can be; no time below counts its sleep and wake"
        )
    if host := replicas.replica_host_bytes(step, gpu.memory_gib * GIB):
        yield f"on the CPU of each node that generates: {host / GIB:.0f} GiB of weights"
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


def _time_and_disk(estimate: Estimate) -> Iterator[str]:
    step, hours, prediction = estimate.step, estimate.hours, estimate.prediction
    mfu, hfu, (low, high) = prediction.time.mfu, prediction.time.hfu, prediction.range
    again = f", HFU {100 * hfu:.0f} %" if hfu > 1.005 * mfu else ""
    cost = "" if estimate.cost is None else f", {estimate.cost:,.2f} {estimate.currency}".rstrip()
    yield f"\nTime on {estimate.gpu.name}; computed, not measured"
    yield (
        f"  {'tokens/s/GPU':<20} {prediction.rate:8,.0f}, between {low:,.0f} and {high:,.0f}; MFU "
        f"{100 * mfu:.0f} %{again}"
    )
    yield f"  {'by':<20} {estimate.predictor.basis}"
    yield f"  {'time':<14} {duration(3600 * hours):>14}, {hours * step.gpus:.3g} GPU-hours{cost}"
    yield f"  {'of':<20} {estimate.tokens_are}"
    parts = {
        "the reference's log-probabilities, once": estimate.hours_before,
        f"answers of {step.new_tokens} tokens, generated and scored": estimate.hours_generating,
        f"a transfer of {_size(transfer_bytes(step)).strip()} per rollout, by storage of an "
        f"assumed {step_time.STORAGE_BYTES_PER_S / 1e9:g} GB/s": estimate.hours_transfer,
    }
    for what, part in parts.items():
        if part / hours > 1e-9:
            yield f"  {'':<20} {100 * part / hours:.0f} % of it: {what}"
    if estimate.rollout_s:
        phases = ", ".join(f"{n} {s:.3g} s" for n, s in estimate.rollout_s.items())
        yield f"  {'each rollout':<20} {phases}"
    yield "Disk"
    if estimate.kept_bytes:
        yield f"  {'kept at most':<20} {_size(estimate.kept_bytes * estimate.tokens)}"
        return
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
