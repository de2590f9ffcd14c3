"""Memory of one training step on one GPU, in closed form: what is alive at each phase's peak.

A step has phases (loss, backward, optimizer). For each, the bytes that are alive at its peak are
listed term by term; the largest sum is the estimate. Nothing is fitted: a term is a number of
elements times bytes per element, from what the trainer's modules keep for backward, what FSDP2
gathers and what autograd holds meanwhile. Symbols: t tokens per rank and micro-step, d width,
f MLP width, V vocabulary, e bytes per element.

Sources: FSDP2's buffers as in torch's fully_shard (torch/distributed/fsdp/_fully_shard); NF4's
4.25 bits in Dettmers et al. 2023 (arXiv 2305.14314) without double quantisation; optimizer states
in torch.optim and torchao.optim. The truth is `python -m plugins.estimate.trace`, the same step on
fake tensors: over the catalogue the peaks are within 10 % of its, as a test checks.
"""

from collections.abc import Iterator
from dataclasses import replace

from plugins.estimate.launcher.activations import kept_by_layer, working
from plugins.estimate.launcher.step_config import FP32, StepConfig
from plugins.estimate.launcher.tensors import loss_memory, units_of
from runspec.layout import Layout

Terms = dict[str, float]


class StepMemory:
    """The phases of a step and the peak among them, term by term, in bytes."""

    def __init__(self, step: StepConfig) -> None:
        self.phases: dict[str, Terms] = dict(_Phases(step))
        sums = {name: sum(terms.values()) for name, terms in self.phases.items()}
        self.peak_phase = max(sums, key=sums.__getitem__)
        self.peak, self.terms = sums[self.peak_phase], self.phases[self.peak_phase]


def state_bytes(step: StepConfig) -> float:
    """Bytes of optimizer state per trained parameter.

    AdamW keeps two moments in the weights' dtype; torchao's 8 and 4 bit ones keep codes and an
    fp32 scale for each block of 256 or 128 (torchao.optim).
    """
    return {
        "adamw": 2.0 * step.weight_bytes,
        "adamw8bit": 2 * (1 + FP32 / 256),
        "adamw4bit": 2 * (0.5 + FP32 / 128),
        "momentum": 1.0 * step.weight_bytes,
        "none": 0.0,
    }[step.optimizer]


class _Phases:
    """Yields the phases of a step, each with its terms."""

    def __init__(self, step: StepConfig) -> None:
        if step.on_policy_share and step.packed and step.accumulation == 1:
            # Longer answers than the data's fill further micro-batches.
            step = replace(step, accumulation=2)
        shape, e, tp, t = step.shape, step.element_bytes, step.layout.tensor_parallel, step.tokens
        self.step, self.units = step, units_of(step)
        # Offloaded state is on the CPU. Without FSDP nothing is gathered or reduced.
        self.on_gpu, self.fsdp = not step.cpu_offload, int(step.fsdp)
        share = step.trained_share if step.is_full else 1.0
        self.trained, self.here = share * self.units.whole.trained, share * self.units.whole.here
        self.state: Terms = {
            "weights": self.on_gpu * self.units.whole.stored,
            "optimizer": self.on_gpu * self.here * state_bytes(step),
            "rotary tables": FP32 * shape.table,
        }
        # Without tables cosines and sines are computed of each batch's positions.
        self.positions = 0.0 if shape.table else 2 * e * t * shape.head_dim
        self.frozen = [_Phases(each) for each in step.frozen_models]
        if self.frozen:
            parts = ("weights", "rotary tables")
            self.state["frozen models"] = sum(f.state[p] for f in self.frozen for p in parts)
        if step.in_reward_models:
            self.state["reward models"] = e * step.in_reward_models
        # Of the teacher the loss needs the last hidden states, and FSDP's copy of its output layer.
        self.imitated = 0.0
        if step.teacher_logits and step.teacher is not None:
            self.imitated = e * step.teacher.dim * (t + self.fsdp * step.teacher.vocab / tp)
        self.gradients = self.on_gpu * self.here * step.weight_bytes
        # Between micro-steps nothing is reduced: each rank holds all gradients, in fp32.
        self.unreduced = step.accumulation > 1 and step.fsdp and not step.sync_each
        held = self.trained * step.reduce_bytes if self.unreduced else self.gradients
        self.accumulated = held if step.accumulation > 1 else 0.0
        # What each layer keeps, and what it computes again.
        sizes = [
            [kept_by_layer(step, block, again) for block in shape.kinds] for again in (False, True)
        ]
        layers = [sizes[step.recomputes(n)][kind] for n, kind in enumerate(shape.order)]
        self.kept = [kept for kept, _ in layers]
        self.again = max((again for _, again in layers), default=0.0)
        self.entry = e * t * shape.dim / tp
        self.ends = self.fsdp * self.units.ends.gathered
        self.layer = self.fsdp * max(kind.gathered for kind in self.units.kinds)
        # The output layer's gradient, before it is reduced.
        head = step.trains_table("output") and step.loss != "score"
        self.head_gradient = head * e * shape.output.parameters / tp

    def __iter__(self) -> Iterator[tuple[str, Terms]]:
        step = self.step
        if step.on_policy_share and not step.apart:
            yield "generating answers", self.state | {"generation": sum(generation(step).values())}
        for number, model in enumerate(self.frozen, 1):
            yield f"frozen model {number}, forward", self._frozen_forward(model)
        yield from self._loss()
        depth = step.shape.layers
        for index in sorted({0, max(depth - 2, 0), depth - 1}):
            yield f"backward, layer {index + 1}", self._backward(index)
        # A fused update needs nothing; foreach a copy of all second moments, single of a matrix.
        size = self.here if step.update == "foreach" else 0.0
        if step.update == "single":
            size = 2 * max(self.here / max(depth, 1), step.trains_table("output") * self._table)
        update = self.on_gpu * size * step.weight_bytes
        yield "optimizer step", self._terms(self.gradients, working=update)

    @property
    def _table(self) -> float:
        """Numbers of the embedding, of one rank's shard."""
        layout = self.step.layout
        return self.step.shape.vocab * self.step.shape.dim / layout.shard / layout.tensor_parallel

    def _terms(
        self,
        gradients: float,
        activations: float = 0.0,
        gathered: float = 0.0,
        logits: float = 0.0,
        reduction: float = 0.0,
        working: float = 0.0,
    ) -> Terms:
        return self.state | {
            "gradients": gradients,
            "activations": activations and activations + self.positions,
            "gathered weights": gathered and self.ends + gathered,
            "gradient reduction": self.fsdp * reduction,
            "logits and loss": logits,
            "working memory": working,
        }

    def working(self, backward: bool) -> float:
        """What the pass of a layer works with."""
        return max(working(self.step, block, backward) for block in self.step.shape.kinds)

    def _frozen_forward(self, other: "_Phases") -> Terms:
        """A pass that keeps nothing: two layers gathered, and the last hidden states."""
        gathered = other.ends + 2 * other.layer - self.ends
        logits = self.entry * other.step.layout.tensor_parallel + self.imitated
        terms = self._terms(self.accumulated, other.entry, gathered, logits)
        return terms | {"working memory": other.working(False)}

    def _loss(self) -> Iterator[tuple[str, Terms]]:
        """The output layer and the loss. The linear loss makes gradients in its forward pass, and
        sums a trained weight's in fp32.
        """
        step, depth = self.step, self.step.shape.layers
        forward, backward = loss_memory(step)
        linear, e = step.loss == "linear", step.element_bytes
        kept = sum(self.kept) + (FP32 / e + step.is_full * (FP32 / e + 1)) * self.entry
        # What is not resharded stays gathered from forward to backward.
        layers = depth * self.layer if not step.reshard else linear * self.layer
        forward += self.imitated
        early = linear * self.head_gradient
        summed = early * FP32 / e
        yield "loss, forward", self._terms(self.accumulated + summed, kept, layers or 1.0, forward)
        late = early if linear else self.head_gradient
        yield "loss, backward", self._terms(self.accumulated + late, kept, layers or 1.0, backward)

    def _backward(self, index: int) -> Terms:
        """A layer's backward: it and the next one gathered, its gradients, and the gradients of the
        layer before in a buffer of the reduction.
        """
        step, units = self.step, self.units
        kinds = [units.kinds[kind] for kind in step.shape.order]
        unit, above, e = kinds[index], kinds[index + 1 :], step.element_bytes
        reduced = sum(each.here for each in above) * self.on_gpu * step.weight_bytes
        done = self.accumulated or reduced
        if self.unreduced:
            done += reduced - step.reduce_bytes * sum(each.trained for each in above)
        # Without FSDP it is added at once to what the micro-steps before have left.
        if step.fsdp or step.accumulation == 1:
            done += self.head_gradient
        layers = sum(each.gathered for each in kinds[max(index - 1, 0) : index + 1])
        if not step.reshard:
            layers = sum(each.gathered for each in kinds[: index + 1])
        done += e * unit.trained
        kept = sum(self.kept[: index + 1]) + self.again
        reduction = step.reduce_bytes * above[0].trained if above else 0.0
        gathered = self.fsdp * layers
        return self._terms(done, kept, gathered, 0.0, reduction, self.working(True))


# Answers -----------------------------------------------------------------------------------------


def generation(step: StepConfig) -> Terms:
    """What the policy takes to answer, as transformers' class: its weights; the keys and values of
    rows that are as long as can be; what a layer works with over the prompts; the logits of one
    token of each row.
    """
    shape, e = step.shape, step.element_bytes
    batch = step.batch if step.packed else step.answers_at_once
    alone = replace(step, layout=Layout(), method="full", checkpointing="full", batch=batch)
    width = step.answer_positions
    each = sum(count * b.attention.kv_width for b, count in shape.blocks if b.attention)
    # In the dtype of the computation; in fp32 as scores, log-probabilities, noise and their sum.
    return {
        "weights": e * shape.parameters,
        "keys and values": 2 * e * step.answers_at_once * width * each,
        "logits": step.answers_at_once * shape.vocab * (e + 4 * FP32),
        "working memory": max(working(alone, block, False) for block, _ in shape.blocks),
    }


# Outside the GPUs ---------------------------------------------------------------------------------


def checkpoint_bytes(step: StepConfig) -> float:
    """Bytes of a checkpoint: what is trained and its optimizer state."""
    return step.trainable * (step.weight_bytes + state_bytes(step))


def export_bytes(step: StepConfig) -> float:
    """Bytes of the exported model, adapters merged; of an adapter that is not, its own."""
    if not step.exports_model:
        return step.trainable * step.element_bytes
    return step.shape.parameters * step.element_bytes


def host_bytes(step: StepConfig) -> float:
    """CPU memory of a node that offloading takes: weights, gradients and optimizer state."""
    if not step.cpu_offload:
        return 0.0
    there = StepMemory(replace(step, cpu_offload=False)).phases["optimizer step"]
    held = ("weights", "gradients", "optimizer", "frozen models")
    return step.gpus_per_node * sum(there.get(name, 0.0) for name in held)
