"""Memory of one training step on one GPU, in closed form: what is alive at each phase's peak.

A step has phases (forward, loss, backward, optimizer). For each, the bytes that are alive at its
peak are listed term by term; the largest sum is the estimate. Nothing is fitted: a term is a
number of elements times bytes per element, from what the trainer's modules keep for backward,
what FSDP2 gathers and what autograd holds meanwhile. Symbols: t tokens per rank and micro-step,
d width, f MLP width, q query width, V vocabulary, e bytes per element.

Sources: FSDP2's buffers as in torch's fully_shard (torch/distributed/fsdp/_fully_shard); NF4's
4.25 bits in Dettmers et al. 2023 (arXiv 2305.14314) without double quantisation; optimizer states
in torch.optim and torchao.optim. `python -m trainer.trace` runs the same step on fake tensors, and
a test compares the two.
"""

from collections.abc import Iterator
from dataclasses import replace

from launcher.sizing import activations
from launcher.sizing.step_config import FP32, GIB, StepConfig
from launcher.sizing.tensors import loss_memory, top_k_memory, units_of
from runspec.layout import Layout

Terms = dict[str, float]
ASLEEP = "vLLM asleep"


class StepMemory:
    """The phases of a step and the peak among them, term by term, in bytes."""

    def __init__(self, step: StepConfig) -> None:
        self.phases: dict[str, Terms] = dict(_Phases(step))
        sums = {name: sum(terms.values()) for name, terms in self.phases.items()}
        self.peak_phase = max(sums, key=sums.__getitem__)
        self.peak, self.terms = sums[self.peak_phase], self.phases[self.peak_phase]


def state_of(step: StepConfig) -> Terms:
    """What a GPU holds between steps."""
    return _Phases(step).state


def state_bytes(step: StepConfig) -> float:
    """Bytes of optimizer state per trained parameter.

    AdamW keeps two moments in the weights' dtype; torchao's 8 and 4 bit ones keep codes and an
    fp32 scale for each block of 256 or 128 (torchao.optim).
    """
    if step.optimizer == "muon":
        # One momentum for the blocks' matrices; AdamW for the rest.
        tables = step.shape.parameters - sum(
            count * matrix.count * matrix.inputs * matrix.outputs
            for block, count in step.shape.blocks
            for matrix in block.matrices.values()
            if matrix.role != "expert"
        )
        return (1 + (tables / step.trainable if step.is_full else 0)) * step.weight_bytes
    return {
        "adamw": 2.0 * step.weight_bytes,
        "adamw8bit": 2 * (1 + FP32 / 256),
        "adamw4bit": 2 * (0.5 + FP32 / 128),
        "momentum": 1.0 * step.weight_bytes,
        "none": 0.0,
    }[step.optimizer]


def asleep_bytes(step: StepConfig) -> float:
    """What vLLM keeps of a GPU while it sleeps: CUDA's context, graphs, NCCL's buffers.

    An assumption; not measured here. Others report 0.8 GiB of a model of 1 B on one GPU and up to
    7.2 on two (NVIDIA-NeMo/RL#223), 7 on eight and 1.4 of them graphs (vllm-project/vllm#47654).
    """
    return GIB * (2.0 if step.rollout_gpus == 1 else 7.0)


class _Phases:
    """Yields the phases of a step, each with its terms."""

    def __init__(self, step: StepConfig) -> None:
        if step.on_policy_share and step.packed and step.accumulation == 1:
            # Longer answers than the data's fill further micro-batches.
            step = replace(step, accumulation=2)
        shape, e, tp, t = step.shape, step.element_bytes, step.layout.tensor_parallel, step.tokens
        self.step, self.units = step, units_of(step)
        units = self.units
        # Which kind each block is, in their order.
        self.order = shape.order
        self.kinds = [units.blocks[which].whole for which in self.order]
        # Numbers of one rank that are trained: all of them, and those of its shards.
        share = step.trained_share if step.is_full else 1.0
        self.trained = share * units.sum(lambda unit: unit.trained)
        self.trained_here = share * units.sum(lambda unit: unit.trained_here)
        stored = units.sum(lambda unit: unit.stored(step.weight_bytes))
        trained = (p for unit, _ in units.each for p in unit.parameters if p.trained)
        self.largest = max((p.rows * p.width for p in trained), default=0.0)
        # Offloaded state lies on the CPU.
        self.on_gpu = 0 if step.cpu_offload else 1
        # Else cosines and sines of a row's positions, in the dtype of the computation.
        tables = FP32 * shape.table or 2 * e * t * shape.head_dim
        self.state: Terms = {
            "weights": self.on_gpu * stored,
            "optimizer": self.on_gpu * self.trained_here * state_bytes(step),
            "rotary tables": tables,
        }
        self.frozen = [_Phases(each) for each in step.frozen_models]
        if self.frozen:
            parts = ("weights", "rotary tables")
            self.state["frozen models"] = sum(f.state[p] for f in self.frozen for p in parts)
        if step.in_reward_models:
            self.state["reward models"] = step.element_bytes * step.in_reward_models
        if step.vllm_in_turns:
            self.state[ASLEEP] = asleep_bytes(step)
        # Of the teacher the loss needs the last hidden states, and its output head: FSDP's copy.
        self.imitated = 0.0
        if step.teacher_logits and step.teacher is not None:
            head = step.teacher.vocab / tp if step.fsdp else 0
            self.imitated = e * step.teacher.dim * (t + head)
        self.gradients = self._reduced(self.trained_here)
        # Between micro-steps nothing is reduced: each rank holds all gradients, in fp32.
        self.unreduced = step.accumulation > 1 and step.fsdp and not step.sync_each
        held = self.trained * step.reduce_bytes if self.unreduced else self.gradients
        self.accumulated = held if step.accumulation > 1 else 0.0
        # What each layer keeps, and what it computes again.
        layers = [(which, step.recomputes(index)) for index, which in enumerate(self.order)]
        sizes = {
            (which, again): activations.kept_by_layer(step, units.blocks[which].block, again)
            for which, again in set(layers)
        }
        self.kept = [sizes[layer][0] for layer in layers]
        self.again = [sizes[layer][1] for layer in layers]
        self.all_kept = sum(self.kept)
        self.entry = e * t * shape.dim / tp
        # Without FSDP nothing is gathered and nothing lies in a buffer of a reduction.
        self.gather = 1 if step.fsdp else 0
        self.root = self.gather * self.units.root.gathered
        # The output layer, from the last block on.
        self.head = self.gather * self.units.output.gathered
        self.layer = self.gather * units.largest
        # With experts over ranks the trainer gathers a block ahead of the one that computes.
        self.ahead = self.layer if step.layout.expert_parallel > 1 else 0.0
        # What is not resharded stays gathered from forward to backward.
        self.stays = step.fsdp and not step.reshard
        # Whether the output layer's gradient is reduced at the end, and not before the layers'.
        self.late = not units.output.parameters or step.loss != "plain"
        # In full fine-tuning the output layer has a gradient, tied or not.
        head = step.trains_table("output") * shape.output.parameters
        self.output_gradient = e * head / tp if step.loss != "score" else 0.0

    def __iter__(self) -> Iterator[tuple[str, Terms]]:
        depth = self.step.shape.layers
        if self.step.top_k:
            yield "teacher's pass, layers", self._frozen_forward(self) | {"logits and loss": 0.0}
            made = top_k_memory(self.step)
            gathered = self.root + self.head + self.layer
            terms = self._terms(0.0, self.entry, gathered, logits=made)
            yield "teacher's pass, top k", terms
            return
        if self.step.on_policy_share and not (self.step.replicas or self.step.vllm):
            yield "generating answers", self._terms(0.0) | {"generation": self._generation()}
        for number, model in enumerate(self.frozen, 1):
            yield f"frozen model {number}, forward", self._frozen_forward(model)
        yield from self._forward()
        yield from self._loss()
        # The last two, the first, and the last one of each kind and of those computed again.
        indices = {depth - 1, max(depth - 2, 0), 0}
        indices |= {max((i for i, again in enumerate(self.again) if again), default=0)}
        indices |= {depth - 1 - self.order[::-1].index(which) for which in set(self.order)}
        for index in sorted(indices):
            yield from self._layer_backward(index)
        if self.step.fsdp:
            yield "backward, root", self._root_backward()
        elif self.step.layout.replicate > 1:
            sent = self.step.reduce_bytes * self.trained
            yield "gradients of replicas", self._terms(self.gradients, working=sent)
        # A fused update needs nothing; foreach a copy of all second moments, single two of the
        # largest parameter.
        shard = self.step.layout.shard
        numbers = {"fused": 0, "foreach": self.trained_here, "single": 2 * self.largest / shard}
        working = self._reduced(numbers[self.step.update])
        yield "optimizer step", self._terms(self.gradients, working=working)
        yield "export", self._export()

    def _export(self) -> Terms:
        """The weights, and the largest matrix: each rank merges its part in fp32, and gathers it.

        Experts are matrices of their own. Matrices that FSDP and tensor parallelism both have cut
        are gathered in two steps. The optimizer and frozen models are given up before.
        """
        step, layout = self.step, self.step.layout
        e, ranks = step.element_bytes, layout.shard * layout.tensor_parallel
        both = layout.shard > 1 and layout.tensor_parallel > 1
        steps = (ranks > 1) + both / layout.tensor_parallel
        tables = [step.shape.vocab * step.shape.dim] if ranks > 1 or step.fsdp else []
        inner = {
            (matrix.inputs * matrix.outputs, matrix.role == "expert")
            for block in step.shape.kinds
            for matrix in block.matrices.values()
        }
        gathered = max([e * n * steps for n in (*tables, *(n for n, _ in inner))], default=0.0)
        changed = step.adapter is not None
        parts = [n / (1 if expert else ranks) for n, expert in inner]
        merged = changed * max(parts) * (FP32 + e)
        if step.is_quantised:
            # Codes and values of so many numbers at a time: trainer.layers.nf4.
            each = (2 if step.fp8_base else 1.5) * FP32
            merged = max(merged, max(e * n + min(n, 2**26) * each for n in parts))
        working = max(gathered, merged) if step.exports_model else 0.0
        return {
            "weights": self.state["weights"],
            "rotary tables": self.state["rotary tables"],
            "working memory": working,
        } | {name: size for name, size in self.state.items() if name == ASLEEP}

    def _terms(
        self, gradients: float, activations: float = 0.0, gathered: float = 0.0, **more: float
    ) -> Terms:
        return self.state | {
            "gradients": gradients,
            "activations": activations,
            "gathered weights": gathered,
            "gradient reduction": self.gather * more.get("reduction", 0.0),
            "logits and loss": more.get("logits", 0.0),
            "working memory": more.get("working", 0.0),
        }

    def _reduced(self, trained_here: float) -> float:
        """Bytes of the gradients of so many numbers of this rank's shards, reduced."""
        return self.on_gpu * trained_here * self.step.weight_bytes

    def forward_working(self) -> float:
        """What the pass of a layer works with."""
        kinds = (each.block for each in self.units.blocks)
        return max(activations.forward_working(self.step, block) for block in kinds)

    def _frozen_forward(self, other: "_Phases") -> Terms:
        """A pass that keeps nothing: two layers gathered, and the output layer without a slope."""
        working = other.forward_working()
        gathered = other.root + other.head + 2 * other.layer
        logits = loss_memory(other.step).made + self.imitated
        return self._terms(self.accumulated, other.entry, gathered, logits=logits, working=working)

    def _generation(self) -> float:
        """What `generation` says; and while the policy is gathered, one table as it is trained."""
        step = self.step
        terms = generation(step)
        weights = terms.pop("weights")
        gathered = step.weight_bytes * step.shape.vocab * step.shape.dim
        return weights + max(sum(terms.values()), gathered)

    def _forward(self) -> Iterator[tuple[str, Terms]]:
        """Before the last layer this one lies gathered twice, in the collective's buffer and as
        parameters, and the buffer of the layer before is still there. Last layer: all activations.
        """
        step = self.step
        depth = step.shape.layers
        last = self.root + self.head + self.layer * 2
        between = self.root + self.layer * 2
        between += self.gather * self.kinds[max(depth - 2, 0)].gathered
        if self.stays:
            all_layers = self.gather * sum(each.gathered for each in self.kinds)
            between = self.root + all_layers + self.layer
            last = between + self.head
        kept = self.all_kept
        before = kept - self.kept[-1] + self.entry
        working = self.forward_working()
        for name, held, gathered, more in (
            ("before the last layer", before, between, 0.0),
            ("last layer", kept, last, working),
        ):
            terms = self._terms(self.accumulated, held, gathered, working=more)
            yield f"forward, {name}", terms | {"logits and loss": self.imitated}

    def _loss(self) -> Iterator[tuple[str, Terms]]:
        """The output layer and the loss; the output layer is there twice for a moment, and the
        gradients that the chunks of a trained one make are summed out of place.
        """
        step, loss, depth = self.step, loss_memory(self.step), self.step.shape.layers
        linear, chunked = step.loss == "linear", step.loss == "chunked"
        # The linear loss runs inside the model's forward pass, and makes the gradients there; a
        # trained weight's is summed up in fp32.
        early = self.output_gradient if linear else 0.0
        summed = early * FP32 / step.element_bytes
        norm = (FP32 * 2 if step.is_full else FP32) * self.entry / step.element_bytes
        norm += self.entry * step.layout.tensor_parallel if step.is_full else 0
        whole = self.root + self.head
        rest = (step.chunks - 2) / step.chunks if chunked else 1
        last = (3 if chunked else 1) * self.output_gradient
        loss_forward = loss.forward + self.imitated
        for name, gradients, gathered, logits in (
            ("output layer, gathered", 0.0, whole + self.head, self.imitated),
            ("loss, forward", summed, whole + self.layer * linear, loss_forward),
            ("loss, backward", early, whole, loss.backward),
            ("output layer, backward", last, whole + self.layer, rest * loss.gradient),
        ):
            held = depth * self.layer + whole if self.stays else gathered
            kept = self.all_kept + norm
            yield name, self._terms(self.accumulated + gradients, kept, held, logits=logits)

    def _layer_backward(self, index: int) -> Iterator[tuple[str, Terms]]:
        """A layer's backward. What is reduced lies in a buffer until the next reduction."""
        units, kinds = self.units, self.kinds
        unit, above = kinds[index], kinds[index + 1 :]
        block = units.blocks[self.order[index]].block
        step, e = self.step, self.step.element_bytes
        reduced = sum(self._reduced(each.trained_here) for each in above)
        done = reduced + (0.0 if self.late else self._reduced(units.output.trained_here))
        if step.accumulation > 1:
            done = self.accumulated
        if self.unreduced:
            done += reduced - step.reduce_bytes * sum(each.trained for each in above)
        # Without FSDP they are added at once to what the micro-steps before have left.
        if self.late and (step.fsdp or step.accumulation == 1):
            done += self.output_gradient
        fetched = kinds[: index + 1] if self.stays else kinds[max(index - 1, 0) : index + 1]
        gathered = self.root + self.gather * sum(each.gathered for each in fetched)
        gathered += (self.head if self.late else 0.0) + (self.ahead if index else 0.0)
        before_it = 0.0 if self.late else units.output.reduced
        reduction = step.reduce_bytes * (above[0].reduced if above else before_it)
        part = e * unit.trained * activations.first_gradients(step, block)
        working = activations.backward_working(step, block)
        before = sum(self.kept[:index])
        kept = before + self.kept[index] + self.again[index]
        mlp = self._terms(done + part, kept, gathered, reduction=reduction, working=working)
        yield f"backward, layer {index + 1}, MLP", mlp
        done, kept = done + e * unit.trained, before + self.entry
        end = self._terms(done, kept, gathered, reduction=reduction, working=4 * self.entry)
        yield f"backward, layer {index + 1}, end", end

    def _root_backward(self) -> Terms:
        """What is reduced at the end, a unit at a time: gradients in their dtype and a buffer."""
        step, units = self.step, self.units
        late = [units.root, units.embedding, *([units.output] if self.late else [])]
        gradients = self.gradients
        gradients += sum(
            unit.trained * step.element_bytes - self._reduced(unit.trained_here) for unit in late
        )
        reduction = step.reduce_bytes * max(unit.trained for unit in late)
        return self._terms(gradients + reduction * self.unreduced, reduction=reduction)


# Answers -----------------------------------------------------------------------------------------


def generation(step: StepConfig) -> Terms:
    """What the policy takes to answer, as transformers' class: its weights; the keys and values of
    rows that are as long as can be; what a layer works with over the prompts, and their mask; the
    logits of one token of each row.
    """
    shape, e = step.shape, step.element_bytes
    batch = step.answers_at_once if step.keeps_sampled else step.batch
    alone = replace(step, layout=Layout(), method="full", checkpointing="full", batch=batch)
    width = step.answer_positions
    each = sum(count * b.attention.kv_width for b, count in shape.blocks if b.attention)
    # In the dtype of the computation; in fp32 as scores, their noise and their sum, and where
    # their log-probabilities are kept a copy of them.
    copies = 4 if step.keeps_sampled else 3
    working = max(activations.forward_working(alone, block) for block, _ in shape.blocks)
    return {
        "weights": e * shape.parameters,
        "keys and values": 2 * e * step.answers_at_once * width * each,
        "logits": step.answers_at_once * shape.vocab * (e + copies * FP32),
        # Which prompts see what, as they are padded: of one and of all rows, a byte each.
        "working memory": working + width**2 * (1 + step.answers_at_once),
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


def transfer_bytes(step: StepConfig) -> float:
    """What a transfer to replicas writes: the whole weights, or what an adapter trains."""
    if not (step.replicas or step.vllm):
        return 0.0
    if step.is_full:
        return step.element_bytes * step.shape.parameters
    return step.weight_bytes * step.trainable


def host_bytes(step: StepConfig) -> float:
    """CPU memory of a node that offloading takes: weights, gradients and optimizer state."""
    if not step.cpu_offload:
        return 0.0
    there = StepMemory(replace(step, cpu_offload=False)).phases["optimizer step"]
    held = ("weights", "gradients", "optimizer", "frozen models")
    return step.gpus_per_node * sum(there.get(name, 0.0) for name in held)
