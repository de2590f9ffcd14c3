"""Peak memory of a training step, traced without a GPU.

    python -m plugins.estimate.trace <train.yaml> --ranks N --objective METHOD

The model is built and laid out by the trainer's own code on the meta device, for one rank of a
fake process group, which communicates nothing. Forward, backward and the optimizer's step then run
on fake tensors, which have shapes but no data, while the bytes of every storage are counted. With
`compile` the blocks keep for backward what the compiler chooses, and run operator by operator. Not
counted: workspaces of kernels, NCCL's buffers, fragmentation, and what fusing saves within a
block.
"""

import argparse
import gc
import json
import math
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from plugins.estimate.launcher.activations import EXPERT_IMBALANCE
from plugins.estimate.memory_tracker import MemoryTracker
from plugins.estimate.traced_attention import attend_as_on_a_gpu
from runspec.keys.train import ModelSpec
from trainer import groups
from trainer.config import TrainConfig, arguments_of, load
from trainer.errors import ConfigError
from trainer.layers import log_probs
from trainer.layers.adapters.base import method as method_of
from trainer.layers.batch import MicroBatch
from trainer.layers.patch import COMPILE_BACKEND
from trainer.methods.base import named
from trainer.model import Decoder, Documents, Inputs, pattern
from trainer.models import build as models
from trainer.models.builder import Builder
from trainer.parallel import gradients
from trainer.parallel.fake import fake_world
from trainer.parallel.world import World

# Two depths tell how much each phase grows per block; deeper models are extrapolated linearly.
# Where blocks differ, these are the least, and they end and grow by whole periods.
DEPTHS = (3, 5)


@dataclass(frozen=True)
class Traced:
    """Bytes of one rank: the peak of each phase of a step, and what is kept between steps."""

    layers: int
    weights: int
    optimizer: int
    phases: dict[str, int]

    @property
    def peak(self) -> int:
        """The most that any phase needs."""
        return max(self.phases.values())


def trace(
    config: TrainConfig,
    ranks: int,
    layers: int | None = None,
) -> Traced:
    """Run two steps of rank 0 of `ranks` on fake tensors; return the figures of the second.

    Every batch is as long as tokenizer.max_seq_len allows, and every position is trained.

    Args:
        config: of a training method's own class.
        layers: how many of the model's blocks are kept; None keeps all.

    Raises:
        ConfigError: the layout does not exist, or is one that only a GPU can run.
    """
    keys = ("fsdp_cpu_offload", "enable_activation_offloading")
    faults = [f"{k}: cannot be traced; use the closed form" for k in keys if getattr(config, k)]
    if faults:
        raise ConfigError(*faults)
    if config.compile:
        # Past the limit of variants of one function the compiler would leave it as it is.
        torch._dynamo.reset()
    with fake_world(vars(config), ranks) as world:
        return _trace(config, world, layers)


class FakeBuilder(Builder):
    """Makes models on fake tensors, of as many blocks as are traced.

    Args:
        layers: blocks that are kept of the policy, and of models as deep as it; None keeps all.
    """

    def __init__(self, spec: ModelSpec, world: World, layers: int | None) -> None:
        self.spec, self.world, self.fingerprints = spec, world, {}
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._layers, self._depth = layers, 0

    def _built(self, spec: ModelSpec) -> models.Model:
        module = models.cut(models.empty(spec), spec.first_blocks)
        if faults := models.layout_faults(module, spec):
            raise ConfigError(*faults)
        self._depth = self._depth or len(module.blocks)
        if self._layers is not None and len(module.blocks) == self._depth:
            del module.blocks[self._layers :]
        # On fake tensors torch.compile must make no kernels: it traces and partitions only.
        backend = {COMPILE_BACKEND: "aot_eager_decomp_partition"}
        with mock.patch.dict(os.environ, backend):
            models.lay_out(module, spec, self.world)
        # What that compiles is counted by `_fused_chunk`.
        module.compiles_loss = False
        attend_as_on_a_gpu(module, spec.dtype)
        with self.fake:
            module.to_empty(device=self.world.device)
        _fill_buffers(module, self.fake)
        module.train(not spec.frozen)
        return models.Model(module, method_of(module), models.DTYPES[spec.dtype])

    def _load_adapter(self, model: models.Model) -> None:
        """Nothing: fake tensors have no values."""

    def _fingerprint(self, spec: ModelSpec) -> str:
        return ""


def _trace(config: TrainConfig, world: World, layers: int | None) -> Traced:
    method = named(config.objective)(config, world)
    builder = FakeBuilder(config, world, layers)
    made, fake = method.build_models(builder), builder.fake
    module = made.policy.module
    trainable = [p for p in module.parameters() if p.requires_grad]
    # The fused and the foreach kernels work on real tensors only; neither changes the states.
    block = config.optimizer | {"fused": False, "foreach": False}
    block = {k: v for k, v in block.items() if v or k in arguments_of("optimizer", block)}
    optimizer = groups.make(block, groups.trained_of(module))
    batch = _batch(config, module)
    # Answers that are packed again may need further micro-steps.
    several = config.gradient_accumulation_steps > 1
    several |= method.generates and bool(config.dataset.get("packed"))
    tracker = MemoryTracker()
    for each in made.modules:
        _spread_rows(batch, each, config, world)
        _count_tensors(each, tracker)
    weights = tracker.now
    _mark_phases(module, tracker)
    is_fused = config.compile and world.tensor_parallel_dim == 1
    chunk = mock.patch.object(log_probs, "_chunk", _fused_chunk) if is_fused else nullcontext()
    with fake, tracker, chunk:
        for _ in range(2):
            tracker.peaks.clear()
            if method.generates:
                tracker.enter("generating answers")
                method.trace_answers(made)
            for last in (False, True) if several else (True,):
                tracker.suffix = "" if last else ", earlier micro-step"
                gradients.set_gradient_sync(module, last=last, each=config.sync_each_micro_batch)
                tracker.enter("forward, first layer")
                total = method.loss(made, batch).total
                tracker.enter("output layer and loss, backward")
                (total * 0.5).backward()
                del total
            tracker.enter("optimizer step")
            gradients.reduce_partial_gradients(trainable)
            norm = gradients.gradient_norm(trainable)
            gradients.clip_gradients(trainable, norm, config.clip_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    kept = tracker.now - weights
    policy, layers = made.policy, len(module.blocks)
    # As the loop gives them up before the export.
    del made, module, each, trainable, optimizer, method, builder, batch
    gc.collect()
    with fake, tracker:
        tracker.suffix = ""
        tracker.enter("export")
        if not config.save_adapter_weights_only:
            _gather_all(policy)
    return Traced(layers, weights, kept, dict(tracker.peaks))


def _fused_chunk(
    logits: torch.Tensor,
    rows: list[Any],
    slope_wanted: bool,
    settings: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tensors that the linear loss makes of a chunk of logits if it is compiled."""
    exact = torch.promote_types(logits.dtype, torch.float32)
    results = logits.new_empty(2, len(logits), dtype=exact)
    return results, torch.empty_like(logits) if slope_wanted else None


def _gather_all(model: models.Model) -> None:
    """Gather a matrix of each kind as the export does."""
    from trainer.checkpoint import export, weights

    seen, layers = set(), export.layers_of(model)
    for name, parameter in weights.named_parameters(model.module):
        kind = pattern(name), parameter.shape
        if kind not in seen and not model.module.is_adapter(name):
            seen.add(kind)
            export.gather(model, layers, export.steps_of(model, name, parameter)[0])


def _count_tensors(module: Decoder, tracker: MemoryTracker) -> None:
    for tensor in (*module.parameters(), *module.buffers()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        tracker.count(local.untyped_storage())


def _spread_rows(batch: MicroBatch, module: Decoder, config: TrainConfig, world: World) -> None:
    """Say how many rows come to this rank's experts, which fake tensors cannot tell.

    It sends as many to every rank, and gets EXPERT_IMBALANCE times as many from each.
    """
    from trainer.layers import experts

    tokens = batch.token_count // world.tensor_parallel_dim
    for name, layer in experts.layers(module):
        if layer.exchange is not None:
            ranks = world.layout.expert_parallel
            share = round(tokens * module.active_experts(name) / ranks)
            sizes = [[share] * ranks, [round(share * EXPERT_IMBALANCE)] * ranks]
            layer.exchange.counted = lambda *_: None
            layer.exchange.rows_per_rank = lambda *_, sizes=sizes: sizes


def _batch(config: TrainConfig, module: Decoder) -> MicroBatch:
    length = min(config.tokenizer.get("max_seq_len") or module.max_seq_len, module.max_seq_len)
    packed, each = bool(config.dataset.get("packed")), config.documents_per_sample
    # A packed row has one sample, whose documents share it; else each is a row.
    rows = config.batch_size * (1 if packed else each)
    shape = rows, length + -length % config.row_multiple
    count = shape[0] * shape[1]
    numbers = torch.zeros(shape, dtype=torch.int64)
    total = config.batch_size * each
    ends = [count * document // total for document in range(total + 1)]
    cu_seqlens = torch.tensor(ends, dtype=torch.int32)
    lengths = [end - begin for begin, end in pairwise(ends)]
    # In bf16 rows that are not packed go through flash attention too; a trace has it for
    # documents only.
    documents = Documents(numbers.int(), cu_seqlens)
    return MicroBatch(
        inputs=Inputs(
            numbers,
            documents if packed or config.dtype == "bf16" else None,
            numbers if packed else None,
        ),
        labels=numbers,
        trained=torch.arange(count),
        token_count=count,
        target_count=count,
        lengths=tuple(lengths),
        document_index=torch.arange(total).repeat_interleave(torch.tensor(lengths)),
        samples=torch.arange(config.batch_size),
        numbers=torch.zeros(config.batch_size),
        documents_per_sample=each,
        ends=torch.tensor(ends[1:]) - 1,
    )


def _fill_buffers(module: Decoder, fake: FakeTensorMode) -> None:
    # Rotary tables are computed from numbers, which fake tensors do not have.
    module.fill_buffers(torch.device("cpu"))
    made: dict[int, torch.Tensor] = {}
    for child in module.modules():
        for name, buffer in list(child.named_buffers(recurse=False)):
            if id(buffer) not in made:
                made[id(buffer)] = fake.from_tensor(buffer)
            child.register_buffer(name, made[id(buffer)], persistent=False)


def _mark_phases(module: Decoder, tracker: MemoryTracker) -> None:
    """Let `tracker` know which block a step is in, forward and backward.

    A phase must grow by the same amount with every block, so that two depths tell all others. The
    first block has phases of its own, because the root is gathered around it, and so has the last
    one, because nothing is being reduced yet in its backward pass.
    """
    last = len(module.blocks) - 1
    backward = {last: "last layer", last - 1: "layers between", 0: "first layer"}

    def mark(index: int) -> None:
        def after(_: Any, __: Any, output: torch.Tensor) -> None:
            if index in (0, last):
                tracker.enter("output layer and loss, forward" if index else "forward, layers")
            if index in backward and output.requires_grad:
                output.register_hook(lambda _: tracker.enter(f"backward, {backward[index]}"))

        module.blocks[index].register_forward_hook(after)

    def before_all(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: tracker.enter("backward, embedding"))

    module.blocks[0].register_forward_pre_hook(before_all)
    for index in range(last + 1):
        mark(index)


def extrapolate(shallow: Traced, deep: Traced, layers: int) -> Traced:
    """What a model of `layers` blocks takes: the peak of every phase is linear in the depth."""

    def line(low: int, high: int) -> int:
        return high + (high - low) * (layers - deep.layers) // (deep.layers - shallow.layers)

    return Traced(
        layers,
        line(shallow.weights, deep.weights),
        line(shallow.optimizer, deep.optimizer),
        {name: line(shallow.phases[name], high) for name, high in deep.phases.items()},
    )


def estimate(config: TrainConfig, ranks: int) -> Traced:
    """The whole model's step: traced if it is shallow, else extrapolated from two depths."""
    module = models.empty(config)
    every = config.activation_checkpointing
    layers, depths = len(module.blocks), depths_of(module, every if isinstance(every, int) else 1)
    if layers <= depths[-1]:
        return trace(config, ranks)
    shallow, deep = (trace(config, ranks, depth) for depth in depths)
    return extrapolate(shallow, deep, layers)


def depths_of(module: Decoder, every: int = 1) -> tuple[int, int]:
    """Two depths from which the whole depth can be extrapolated.

    Blocks may begin with others and then repeat: three of one kind and one of another, or one
    without experts and then all with them. Each depth has what comes first, at least three blocks
    behind it, and as many periods as end the model.

    Args:
        every: every n-th block is recomputed.
    """
    kinds = [_kind(block) for block in module.blocks]
    count = len(kinds)
    for first, period in sorted(product(range(count), range(1, count)), key=sum):
        rest = range(first, count - period)
        if all(kinds[index] == kinds[index + period] for index in rest):
            break
    period = math.lcm(period, every)
    over = (count - first) % period
    low = first + over + period * -(-(DEPTHS[0] - over) // period)
    return low, low + period * -(-(DEPTHS[1] - DEPTHS[0]) // period)


def _kind(block: torch.nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())


def main(arguments: list[str]) -> int:
    """Print one line of JSON, bytes; exit status 1 for a fault in the config, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m plugins.estimate.trace", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that run the step together")
    parser.add_argument("--objective", required=True, help="dotted path of the training method")
    chosen = parser.parse_args(arguments)
    try:
        objective = named(chosen.objective)
        estimated = estimate(load(chosen.config, objective.config_class), chosen.ranks)
    except ConfigError as error:
        for fault in error.faults:
            print(f"error: {fault}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(estimated) | {"peak": estimated.peak}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
