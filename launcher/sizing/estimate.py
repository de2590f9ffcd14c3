"""What a recipe needs: memory per GPU, time, disk, and what to change if it does not fit.

All of it is computed from the recipe, none of it measured; `launcher.sizing.memory` has the
formulas.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from launcher import venv
from launcher.errors import PreflightFault, UsageFault
from launcher.recipes.recipe import Recipe
from launcher.sizing import gpus
from launcher.sizing.epoch import epoch_of
from launcher.sizing.memory import (
    ASLEEP,
    StepMemory,
    checkpoint_bytes,
    export_bytes,
    host_bytes,
    transfer_bytes,
)
from launcher.sizing.recipe_step import step_of
from launcher.sizing.replicas import (
    answers_of_vllm,
    generates,
    replica,
    replica_host_bytes,
    vllm_share,
)
from launcher.sizing.search import METHODS, Prediction, Predictor, remedies, settings
from launcher.sizing.step_config import GIB, StepConfig
from launcher.sizing.step_time import STORAGE_BYTES_PER_S, generation_s, scoring_s, transfer_s
from runspec.step import kept_bytes

COMPARED_NODES = (1, 2, 4, 8)
# What makes a term smaller.
_SMALLER = {
    "weights": "more GPUs to shard over, or QLoRA,",
    "gradients": "more GPUs to shard over, LoRA, or sync_each_micro_batch=true",
    "frozen models": "more GPUs to shard over, an adapter, which is turned off instead, or a "
    "teacher in NF4 or offline",
    "optimizer": "more GPUs to shard over, an 8-bit AdamW, or LoRA",
    "activations": "activation checkpointing, a smaller batch, or tensor parallelism",
    "logits and loss": "LinearCrossEntropy, a smaller batch, or tensor parallelism",
    "gathered weights": "tensor or expert parallelism, or QLoRA, not more nodes,",
    "gradient reduction": "tensor parallelism or LoRA",
    "reward models": "a smaller reward model",
    ASLEEP: "rollout nodes (resources.rollout=1) or rollout_engine=transformers",
    "generation": "a smaller batch or fewer new tokens",
    "working memory": "a smaller batch or tensor parallelism",
}


class Estimate:
    """All that is computed of one recipe.

    predictor: of settings near the recipe's own step. remedies: what to change if it does not
    fit. compared: full, LoRA and QLoRA on 1, 2, 4 and 8 nodes. traced: the same step on fake
    tensors.
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
        compares: bool = False,
        traces: bool = False,
    ) -> None:
        """Work everything out for a recipe whose models lie under root.

        gpu: a name of configs/gpus.yaml. mfu: see `launcher.sizing.search.Predictor`.
        network_gbits: per GPU between nodes; None for the usual. tokens: to be trained, for time
        and cost; None for an epoch. price: of a GPU-hour, in currency; None leaves the cost out.
        compares, traces: whether `compared` and `traced` are wanted; else they are empty.
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
        memory = self.gpu.memory_gib * GIB
        self.replica = replica(step, memory)
        # What vLLM in turns takes of a GPU.
        self.vllm_share = vllm_share(step, memory) if step.vllm_in_turns else 0.0
        # Of a teacher's pass, if every token is trained.
        self.kept_bytes = kept_bytes(step.top_k) if step.top_k else 0
        peak_gib = max(self.memory.peak, sum(self.replica.values())) / GIB
        self.fits = peak_gib <= self.gpu.usable_gib and generates(step, memory)
        self.tokens, self.tokens_are, samples = epoch_of(config, step)
        if recipe.entry.method.samples_answers:
            group = config.get("group_size") or recipe.entry.method.keys()["group_size"].default
            samples *= int(group)
            updates = round(1 / step.on_policy_share)
            often = f", each in {updates} updates" if updates > 1 else ""
            self.tokens_are = f"an epoch of {samples:,} answers, as long as can be{often}"
            samples *= updates
            self.tokens = samples * step.length
        if tokens is not None:
            samples = round(samples * tokens / self.tokens)
            self.tokens, self.tokens_are = tokens, f"{tokens:,} tokens, as given"
        # Answers that are generated count by samples, below.
        trained = replace(step, on_policy_share=0.0)
        self.prediction = Prediction(trained, peak_gib, self.fits, self.predictor)
        self.tokens_per_second_per_gpu = self.prediction.rate
        rate = self.tokens_per_second_per_gpu * step.gpus
        # Of the pass over the data before the first step, by its FLOPs.
        share = step.flops.once / step.flops.model / int(config.get("epochs") or 1)
        self.hours_before = self.tokens / rate / 3600 * share
        self.hours_generating = self.hours_transfer = 0.0
        # Seconds of each phase of a rollout, of methods that sample answers.
        self.rollout_s: dict[str, float] = {}
        if step.on_policy_share:
            generating = generation_s(step, self.gpu, self.predictor.links)
            scoring = scoring_s(step, self.gpu)
            each = generating + scoring
            steps = samples / (step.answers_per_step * step.layout.data_parallel)
            # What replicas generate while the ranks update takes no time of its own.
            beside = self.prediction.time.seconds if step.max_staleness else 0.0
            self.hours_generating = max(0.0, each - beside) * steps / 3600
            self.hours_transfer = transfer_s(step) * steps / 3600
            if step.keeps_sampled:
                phases = {"generate": generating}
                phases |= {"score": scoring} if scoring else {}
                phases |= {"transfer": transfer_s(step)} if step.replicas or step.vllm else {}
                phases |= {"update": self.prediction.time.seconds}
                self.rollout_s = {n: s / step.on_policy_share for n, s in phases.items()}
        self.hours = self.tokens / rate / 3600 + self.hours_before
        self.hours += self.hours_generating + self.hours_transfer
        self.cost = None if price is None else self.hours * step.gpus * price
        self.currency = currency
        self.remedies = [] if self.fits else [*remedies(self.predictor)]
        compares = compares and not step.top_k
        cells = settings(step, method=METHODS, nodes=COMPARED_NODES) if compares else ()
        self.compared = [self.predictor.of(cell) for cell in cells]
        self.traced: dict[str, Any] | None = None
        if traces:
            self.traced = trace(
                recipe.train_config(root, "run"), recipe.entry.method.objective, step.layout.ranks
            )

    def as_json(self) -> dict[str, Any]:
        """Return everything, sizes in GiB."""
        step, memory, gpu = self.step, self.memory, self.gpu
        return {
            "recipe": self.name,
            "basis": "computed, not measured",
            "gpu": {"name": gpu.name, "memory_gib": gpu.memory_gib},
            "usable_gib": round(gpu.usable_gib, 3),
            "fits": self.fits,
            "peak_gib": round(memory.peak / GIB, 3),
            "peak_phase": memory.peak_phase,
            "terms_gib": {k: round(v / GIB, 3) for k, v in memory.terms.items() if v},
            "replica_gib": {k: round(v / GIB, 3) for k, v in self.replica.items() if v},
            "vllm_share": self.vllm_share,
            "phases_gib": {k: round(sum(v.values()) / GIB, 3) for k, v in memory.phases.items()},
            "layout": vars(step.layout),
            "step": {
                k: v for k, v in asdict(step).items() if k not in ("shape", "layout", "teacher")
            },
            "parameters": step.total,
            "active_parameters": step.shape.active_parameters,
            "trainable": step.trainable,
            "host_memory_per_node_gib": round(host_bytes(step) / GIB, 3),
            "checkpoint_gib": round(checkpoint_bytes(step) / GIB, 3),
            "export_gib": round(export_bytes(step) / GIB, 3),
            "kept_gib": round(self.kept_bytes * self.tokens / GIB, 3),
            "mfu": self.prediction.time.mfu,
            "hfu": self.prediction.time.hfu,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
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
            "compare": [
                {"method": each.step.method, "nodes": each.step.nodes, **each.as_json()}
                for each in self.compared
            ],
            "traced": self.traced,
        }

    def lines(self) -> Iterator[str]:
        """Yield it as a person reads it."""
        step, name = self.step, self.name
        share = 100 * step.trainable / step.total
        yield f"{name}: {self.description}" if self.description else name
        yield (
            f"  model       {step.builder.rpartition('.')[2]}, {step.total / 1e9:.2f} B "
            f"parameters, {_active(step)}{_count(step.trainable)} trained ({share:.2f} %)\n"
            f"  layout      {step.nodes} x {step.gpus_per_node} GPUs: {_layout(step)}\n"
            f"  batch       {step.batch} x {step.length} tokens per rank and micro-step, "
            f"{step.accumulation} micro-step{'s' if step.accumulation > 1 else ''}, "
            f"{step.rows_per_step} rows per step\n"
            f"  settings    {_settings(step)}\n"
        )
        yield from _memory(self)
        if not self.fits:
            yield from _remedies(self)
        yield from _time_and_disk(self)
        if self.compared:
            yield from _compared(self)


def peak_gib(recipe: Recipe, root: Path) -> float:
    """Return the memory that a recipe's step needs of each GPU, computed."""
    resources = recipe.resources
    config = recipe.resolved(root, "run")
    return StepMemory(step_of(config, resources.nodes, resources.gpus_per_node)).peak / GIB


def trace(train_config: dict[str, Any], objective: str, ranks: int) -> dict[str, Any]:
    """Return what the trainer finds of the same step on fake tensors, to check the formulas.

    PreflightFault if it cannot be traced. See `python -m trainer.trace`.
    """
    try:
        done = venv.ask_trainer(
            "trace", [train_config], "--ranks", str(ranks), "--objective", objective
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


def _active(step: StepConfig) -> str:
    """How many a token meets, if it does not meet all."""
    if not step.shape.experts:
        return ""
    return f"{step.shape.active_parameters / 1e9:.2f} B of them active, "


def _layout(step: StepConfig) -> str:
    layout = step.layout
    named = (
        ("FSDP", layout.shard),
        ("tensor parallelism", layout.tensor_parallel),
        ("expert parallelism", layout.expert_parallel),
    )
    parts = [f"{word} over {size}" for word, size in named if size > 1]
    if layout.replicate > 1:
        parts.append(f"{layout.replicate} data-parallel replicas")
    if step.cpu_offload:
        parts.append("weights and optimizer on the CPU")
    text = ", ".join(parts) or "the whole model on each"
    if step.replicas:
        text += f"; {step.rollout_nodes} x {step.gpus_per_node} more generate"
    return text


def _settings(step: StepConfig) -> str:
    recomputed = {
        "none": "no activation checkpointing",
        "full": "activation checkpointing",
        "op": "selective activation checkpointing (op)",
    }.get(step.checkpointing, f"activation checkpointing of one layer in {step.checkpointing}")
    dtype = "bf16" if step.element_bytes == 2 else "fp32"
    dtype += ", fp32 master weights" if step.fp32_master else ""
    if step.top_k:
        nf4 = " over NF4" if step.is_quantised else ""
        return f"the teacher's forward pass, top {step.top_k} and tail, {dtype}{nf4}"
    method = step.method
    if step.is_quantised and step.fp8_base:
        method = f"{method.removeprefix('q')} over a base in fp8"
    loss = "score head" if step.loss == "score" else f"{step.loss} cross-entropy"
    return f"{method}, {recomputed}, {loss}, {step.optimizer}, {dtype}"


def _memory(estimate: Estimate) -> Iterator[str]:
    memory, gpu, step = estimate.memory, estimate.gpu, estimate.step
    yield f"Memory per GPU at its peak ({memory.peak_phase}); computed, not measured"
    terms = sorted(memory.terms.items(), key=lambda term: -term[1])
    for name, size in (*terms, ("peak", memory.peak)):
        if size / GIB >= 0.005:
            yield f"  {name:<20} {size / GIB:8.2f} GiB"
    if estimate.traced:
        peak = estimate.traced["peak"]
        yield (
            f"  {'traced':<20} {peak / GIB:8.2f} GiB   the same step on fake tensors; the "
            f"formulas give {100 * ((memory.peak - memory.terms.get(ASLEEP, 0)) / peak - 1):+.1f} %"
        )
    largest, advice = terms[0][0], _SMALLER.get(terms[0][0])
    if advice and step.top_k:
        advice = advice.replace("QLoRA", "teacher_quantize_base=true")
    change = f"{advice} make it smaller" if advice else "the model's longest context decides it"
    yield (
        f"{'fits' if estimate.fits else 'DOES NOT FIT'}: {gpu.name} has {gpu.memory_gib:.1f} GiB, "
        f"{gpu.memory_gib - gpu.usable_gib:.1f} of them reserved for CUDA, NCCL and gaps: "
        f"{gpu.usable_gib:.1f} GiB usable\n"
        f"the largest part is {largest}: {change}"
    )
    if estimate.replica:
        when = "while vLLM generates" if step.vllm_in_turns else "of the rollout nodes"
        yield f"Memory per GPU {when}; computed, not measured"
        terms = sorted(estimate.replica.items(), key=lambda term: -term[1])
        for name, size in (*terms, ("sum", sum(estimate.replica.values()))):
            if size / GIB >= 0.005:
                yield f"  {name:<20} {size / GIB:8.2f} GiB"
    if step.vllm_in_turns:
        share, answers = estimate.vllm_share, answers_of_vllm(step, gpu.memory_gib * GIB)
        yield (
            f"vLLM gets {share:.2f} of each GPU, {share * gpu.memory_gib:.1f} GiB: room for "
            f"{min(answers, step.answers_at_once)} of its {step.answers_at_once} answers, each as "
            "long as can be; no time below counts its sleep and wake"
        )
    if host := replica_host_bytes(step, gpu.memory_gib * GIB):
        where, what = "rollout node", "its replicas' base models"
        if step.vllm_in_turns:
            where, what = "node", "the weights of vLLM, while it sleeps"
        yield f"on the CPU of each {where}: {host / GIB:.0f} GiB of {what}"
    if host := host_bytes(step):
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
    step, took, prediction = estimate.step, estimate.hours, estimate.prediction
    mfu, hfu, (low, high) = prediction.time.mfu, prediction.time.hfu, prediction.range
    again = f", HFU {100 * hfu:.0f} %" if hfu > 1.005 * mfu else ""
    cost = "" if estimate.cost is None else f", {estimate.cost:,.2f} {estimate.currency}".rstrip()
    before = f"{100 * estimate.hours_before / took:.0f} % of it: the reference's log-probabilities"
    before = f"  {'':<20} {before}, once\n" if estimate.hours_before else ""
    if estimate.hours_generating:
        part = 100 * estimate.hours_generating / took
        scored = " and reward models' scores" * ("score" in estimate.rollout_s)
        before += (
            f"  {'':<20} {part:.0f} % of it: the generated answers, each as long as can be "
            f"({step.new_tokens} tokens){scored}\n"
        )
    if estimate.rollout_s:
        phases = ", ".join(f"{n} {s:.3g} s" for n, s in estimate.rollout_s.items())
        before += f"  {'each rollout':<20} {phases}\n"
    if step.replicas or step.vllm:
        before += (
            f"  {'':<20} a transfer of {_size(transfer_bytes(step)).strip()}, by storage of an "
            f"assumed {STORAGE_BYTES_PER_S / 1e9:g} GB/s\n"
        )
    what = "weights and optimizer" if step.is_full else "adapter and its optimizer"
    exported = "adapter"
    if step.exports_model:
        exported = "model" if step.adapter is None else "merged model"
    yield (
        f"\nTime on {estimate.gpu.name}; computed, not measured\n"
        f"  {'tokens/s/GPU':<20} {prediction.rate:8,.0f}, between {low:,.0f} and {high:,.0f}; MFU "
        f"{100 * mfu:.0f} %{again}\n"
        f"  {'by':<20} {estimate.predictor.basis}\n"
        f"  {'time':<14} {duration(took):>14}, {took * step.gpus:.3g} GPU-hours{cost}\n"
        f"  {'of':<20} {estimate.tokens_are}\n"
        f"{before}"
        "Disk"
    )
    if estimate.kept_bytes:
        yield (
            f"  {'kept at most':<20} {_size(estimate.kept_bytes * estimate.tokens)}, "
            f"{estimate.kept_bytes} bytes for each trained token"
        )
        return
    yield (
        f"  {'checkpoint':<20} {_size(checkpoint_bytes(step))}, {what}\n"
        f"  {'export':<20} {_size(export_bytes(step))}, the {exported}"
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


def duration(hours: float) -> str:
    """Return a time as a person writes it: 12 s, 5 min, 3 h 05 min."""
    minutes = round(hours * 60)
    if minutes < 1:
        return f"{max(hours * 3600, 1):.0f} s"
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"
