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
from launcher.sizing.step_config import FP32, StepConfig
from launcher.sizing.tensors import loss_memory, units_of

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


class _Phases:
    """Yields the phases of a step, each with its terms."""

    def __init__(self, step: StepConfig) -> None:
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
        self.layer = self.gather * units.largest
        # What is not resharded stays gathered from forward to backward.
        self.stays = step.fsdp and not step.reshard
        # In full fine-tuning the output layer has a gradient, tied or not.
        head = step.trains_table("output") * shape.output.parameters
        self.output_gradient = e * head / tp if step.loss != "score" else 0.0

    def __iter__(self) -> Iterator[tuple[str, Terms]]:
        depth = self.step.shape.layers
        for number, model in enumerate(self.frozen, 1):
            yield f"frozen model {number}, forward", self._frozen_forward(model)
        yield from self._forward()
        yield from self._loss()
        # The last two, the first, and the last one of each kind and of those computed again.
        found = {depth - 1, max(depth - 2, 0), 0}
        found |= {max((i for i, again in enumerate(self.again) if again), default=0)}
        found |= {depth - 1 - self.order[::-1].index(which) for which in set(self.order)}
        for index in sorted(found):
            yield from self._layer_backward(index)
        if self.step.fsdp:
            yield "backward, root", self._root_backward()
        # A fused update needs nothing; foreach a copy of all second moments, single two of the
        # largest parameter.
        shard = self.step.layout.shard
        numbers = {"fused": 0, "foreach": self.trained_here, "single": 2 * self.largest / shard}
        working = self._reduced(numbers[self.step.update])
        yield "optimizer step", self._terms(self.gradients, working=working)

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

    def _frozen_forward(self, other: "_Phases") -> Terms:
        """A pass that keeps nothing: two layers gathered, and the output layer without a slope."""
        kinds = (each.block for each in other.units.blocks)
        working = max(activations.forward_working(other.step, block) for block in kinds)
        gathered = other.root + 2 * other.layer
        logits = loss_memory(other.step).made + self.imitated
        return self._terms(self.accumulated, other.entry, gathered, logits=logits, working=working)

    def _forward(self) -> Iterator[tuple[str, Terms]]:
        """First layer: the root and the first unit after it lie gathered twice, in the
        collective's buffer and as parameters; before the last one that one does, and the buffer of
        the layer before is still there. Last layer: all activations.
        """
        step, units = self.step, self.units
        depth = step.shape.layers
        first_unit = max(self.kinds[0].gathered, units.embedding.gathered)
        first = self.gather * 2 * (units.root.gathered + first_unit)
        last = self.root + self.layer * 2
        between = last + self.gather * self.kinds[max(depth - 2, 0)].gathered
        if self.stays:
            all_layers = self.gather * sum(each.gathered for each in self.kinds)
            last = between = self.root + all_layers + self.layer
        kept = self.all_kept
        before = kept - self.kept[-1] + self.entry
        working = max(activations.forward_working(step, each.block) for each in units.blocks)
        for name, held, gathered, more in (
            ("first layer", self.entry, first, 0.0),
            ("before the last layer", before, between, 0.0),
            ("last layer", kept, last, working),
        ):
            terms = self._terms(self.accumulated, held, gathered, working=more)
            yield f"forward, {name}", terms | {"logits and loss": self.imitated}

    def _loss(self) -> Iterator[tuple[str, Terms]]:
        """The output layer and the loss; in backward the root is gathered again, twice for a
        moment, and the gradients that the chunks of a trained output layer make are summed out of
        place.
        """
        step, loss, depth = self.step, loss_memory(self.step), self.step.shape.layers
        linear, chunked = step.loss == "linear", step.loss == "chunked"
        # The linear loss runs inside the model's forward pass, and makes the gradients there; a
        # trained weight's is summed up in fp32.
        early = self.output_gradient if linear else 0.0
        summed = early * FP32 / step.element_bytes
        norm = (FP32 * 2 if step.is_full else FP32) * self.entry / step.element_bytes
        norm += self.entry * step.layout.tensor_parallel if step.is_full else 0
        output = self.units.output
        unit = self.gather * output.gathered if output.parameters else self.root
        rest = (step.chunks - 2) / step.chunks if chunked else 1
        last = (3 if chunked else 1) * self.output_gradient
        loss_forward = loss.forward + self.imitated
        for name, gradients, gathered, logits in (
            ("output layer, forward", 0.0, self.root, loss.made + self.imitated),
            ("loss, forward", summed, (self.root + self.layer) * linear, loss_forward),
            ("loss, backward", early, 0.0, loss.backward),
            ("output layer, backward, gathered", early, 2 * unit, loss.gradient),
            ("output layer, backward", last, unit + self.layer, rest * loss.gradient),
        ):
            held = depth * self.layer + self.root if self.stays else gathered
            kept = self.all_kept + norm
            yield name, self._terms(self.accumulated + gradients, kept, held, logits=logits)

    def _layer_backward(self, index: int) -> Iterator[tuple[str, Terms]]:
        """A layer's backward. What is reduced lies in a buffer until the next reduction."""
        units, kinds = self.units, self.kinds
        unit, above = kinds[index], kinds[index + 1 :]
        block = units.blocks[self.order[index]].block
        step, e = self.step, self.step.element_bytes
        reduced = sum(self._reduced(each.trained_here) for each in above)
        done = reduced + self._reduced(units.output.trained_here)
        if step.accumulation > 1:
            done = self.accumulated
        if self.unreduced:
            done += reduced - step.reduce_bytes * sum(each.trained for each in above)
        # Without FSDP they are added at once to what the micro-steps before have left.
        if not units.output.parameters and (step.fsdp or step.accumulation == 1):
            done += self.output_gradient
        fetched = kinds[: index + 1] if self.stays else kinds[max(index - 1, 0) : index + 1]
        gathered = self.root + self.gather * sum(each.gathered for each in fetched)
        reduction = step.reduce_bytes * (above[0].reduced if above else units.output.reduced)
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
        """The root's own reduction: gradients in their dtype and in the buffer."""
        step, root = self.step, self.units.root.trained
        gradients = self.gradients
        gradients += root * step.element_bytes - self._reduced(self.units.root.trained_here)
        reduction = step.reduce_bytes * root
        return self._terms(gradients + reduction * self.unreduced, reduction=reduction)


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
