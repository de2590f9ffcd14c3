"""What a forward pass keeps for the backward pass: activation checkpointing and offloading."""

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from runspec.keys.fields import PrecisionKeys
from trainer.layers import delta
from trainer.layers.patch import compiled
from trainer.model import Decoder, Documents

# By name, as not every torch has every one.
SAVED_OPERATIONS = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.linear",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_attention_math",
    "torch_attn._varlen_attn",
    "higher_order.flex_attention",
    # FlexAttention compiled separately: see trainer.layers.flex.kernel.
    "higher_order.inductor_compiled_code",
    # A traced step has it in place of FlexAttention.
    "slurm_cookbook.traced_attention",
    "aten._grouped_mm",
    "slurm_cookbook.grouped",
    # fp8's products, and the magnitudes that its scales are made of.
    "aten._scaled_mm",
    "aten.amax",
    "aten.max",
    # What tensor parallelism communicated is not communicated again.
    "_c10d_functional.all_gather_into_tensor",
    "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.all_reduce",
    "_c10d_functional.all_to_all_single",
)

# Which experts a router chose: compiled code that computes it again may round to another choice.
# What is not compiled chooses by the same kernels from the product that is kept; and models change
# what comes of it in place, such as Mixtral, which a checkpoint by operation refuses.
SAVED_IF_COMPILED = ("aten.topk",)

# Ranges of torch's profiler. torch compares the operations of the recomputation with the first
# ones; FSDP marks one range more in it if experts within the block are a group of their own.
RANGES = ("profiler._record_function_enter_new", "profiler._record_function_exit._RecordFunction")

# Of a checkpoint: of its first pass, and of the one that computes it again.
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def prepare(model: Decoder, keys: PrecisionKeys) -> None:
    """Compile the blocks of `model`, and apply activation checkpointing, as `keys` say.

    Each block is compiled separately: all share one compiled code, of which the first block behind
    a frozen embedding and the validation have variants of their own. Packed batches all have one
    shape; of others, the first batch of another length makes the code general in the length,
    after which no length compiles again.

    A block with activation checkpointing keeps its input only. With "op" it also keeps the results
    of matrix products, of attention and of communication, and is not compiled if its experts are
    spread over ranks; a block with linear attention still keeps its input only.
    """
    mode = keys.activation_checkpointing
    if keys.compile:
        model.register_forward_pre_hook(mark_dynamic)
    by_operation = [mode == "op" and not _has_linear_attention(block) for block in model.blocks]
    whole = [index for index, chosen in enumerate(by_operation) if not chosen]
    # With "op" the compiler must see what is kept; else it need not know of the recomputation.
    if keys.compile:
        _compile(model.blocks[index] for index in whole)
    settings: dict[str, Any] = {}
    if any(map(_exchanges_tokens, model.blocks)):
        from trainer.parallel.expert_parallel import remembered

        settings = {"context_fn": remembered}
    if mode == "op":
        _recompute(model, whole, **settings)
        for compiled in (True, False):
            # All blocks of a kind have the same function, or each would be compiled separately.
            # Those that are compiled exchange no tokens; the compiler takes no other contexts.
            more = None if compiled else settings.get("context_fn")
            contexts = partial(_contexts, more, _policy(compiled))
            chosen = [
                index
                for index, block in enumerate(model.blocks)
                if by_operation[index]
                and compiled == (keys.compile and not _exchanges_tokens(block))
            ]
            _recompute(model, chosen, context_fn=contexts)
            if compiled:
                _compile(model.blocks[index] for index in chosen)
    elif isinstance(mode, int):
        if keys.enable_activation_offloading:
            settings["checkpoint_fn"] = InputOffloading()
        _recompute(model, range(mode - 1, len(model.blocks), mode), **settings)


def missing_for_compile(device: torch.device) -> str | None:
    """What this node lacks to compile with; None if it lacks nothing.

    torch.compile writes C++ for a CPU, and C for the launchers of a GPU's kernels, which include
    Python's headers.
    """
    names = ("g++", "clang++", "c++") if device.type == "cpu" else ("gcc", "clang", "cc")
    own = os.environ.get("CXX" if device.type == "cpu" else "CC")
    if not any(shutil.which(name) for name in ((own,) if own else names)):
        return f"a C compiler ({own or names[0]})"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return None if header.is_file() else f"{header} (the package python3-dev or python3-devel)"


def _exchanges_tokens(block: nn.Module) -> bool:
    """Whether a block's experts are spread over ranks; see `uncompiled_experts`."""
    return any(getattr(module, "exchange", None) is not None for module in block.modules())


def _has_linear_attention(block: nn.Module) -> bool:
    """Whether a block has linear attention, at which a compiled graph ends.

    torch compiles nothing of a checkpointed function in which a graph ends (torch 2.13), so such a
    block is compiled inside of its checkpoint, where the compiler does not see what is kept.
    """
    return next(delta.layers(block), None) is not None


def _compile(blocks: Iterable[nn.Module]) -> None:
    # Enough for one length, all lengths, the first layer, validation, and kinds of attention.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    # Else numbers in which the layers of a sharded model differ, as Gemma 4's heads do, are inputs
    # of its code, and FlexAttention cannot be compiled for them (torch 2.13).
    torch._dynamo.config.skip_fsdp_guards = False
    for block in blocks:
        # Not the call: FSDP's hooks and the checkpoint's stand around it.
        block.forward = compiled(block.forward)


def mark_dynamic(model: Decoder, args: tuple[Any, ...]) -> None:
    """Mark the number of documents as dynamic: it changes with each batch."""
    if isinstance(documents := args[0].documents, Documents):
        torch._dynamo.maybe_mark_dynamic(documents.cu_seqlens, 0)


def _recompute(model: Decoder, indices: Iterable[int], **settings: Any) -> None:
    for index in indices:
        model.blocks[index] = checkpoint_wrapper(model.blocks[index], **settings)


def _contexts(
    more: Callable[[], Contexts] | None, policy: Callable[..., CheckpointPolicy]
) -> Contexts:
    """The contexts of a checkpoint by operation, and others around them."""
    own = create_selective_checkpoint_contexts(policy)
    if more is None:
        return own
    first, again = (_both(*pair) for pair in zip(more(), own, strict=True))
    return first, again


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _policy(compiled: bool = False) -> Callable[..., CheckpointPolicy]:
    names = SAVED_OPERATIONS + (SAVED_IF_COMPILED if compiled else ())
    saved = {op for name in names if (op := _operation(name)) is not None}
    SAC_IGNORED_OPS.update(op for name in RANGES if (op := _operation(name)) is not None)

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = operation in saved
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _operation(name: str) -> Any:
    namespace, operation, *overload = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), operation, None)
    return getattr(packet, overload[0] if overload else "default", packet)


class InputOffloading:
    """torch.utils.checkpoint, with a layer's input on the CPU until the backward pass needs it.

    Only plain tensors that a checkpoint keeps are moved, neither weights nor DTensors, so tensor
    parallelism changes nothing. (torchtune's OffloadActivations sees every tensor that the whole
    model saves, and cannot copy DTensors: its issue 2451.) On a GPU copies go over a stream of
    their own; while one layer is recomputed, the input of the layer before it comes back.
    """

    def __init__(self) -> None:
        self._newest: _Input | None = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function` as torch.utils.checkpoint.checkpoint would."""
        # Inside, the checkpoint's own hooks stand before these: they see its inputs only.
        with saved_tensors_hooks(self._pack, _unpack):
            return checkpoint(function, *args, use_reentrant=False, **kwargs)

    def _pack(self, tensor: torch.Tensor) -> "_Input | torch.Tensor":
        if not tensor.numel():
            # Besides the inputs torch 2.11 keeps an empty tensor on the CPU.
            return tensor
        if tensor.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream()
        self._newest = _Input(tensor, self._newest, self._stream)
        return self._newest


def _unpack(kept: "_Input | torch.Tensor") -> torch.Tensor:
    return kept.take() if isinstance(kept, _Input) else kept


class _Input:
    """One layer's input while it is on the CPU.

    Args:
        before: the input of the layer before, which the backward pass needs next.
    """

    def __init__(
        self, tensor: torch.Tensor, before: "_Input | None", stream: torch.cuda.Stream | None
    ) -> None:
        self._before, self._stream, self._device = before, stream, tensor.device
        self._fetched: torch.Tensor | None = None
        self._taken = False
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
            # Its memory is used again only when the copy is done.
            tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            self._host.copy_(tensor, non_blocking=True)

    def take(self) -> torch.Tensor:
        """The tensor, on its device again."""
        tensor, self._fetched = self._fetch(), None
        self._taken = True
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            tensor.record_stream(torch.cuda.current_stream())
        if self._before is not None and not self._before._taken:
            self._before._fetch()
        self._before = None
        return tensor

    def _fetch(self) -> torch.Tensor:
        if self._fetched is None:
            with torch.cuda.stream(self._stream):
                self._fetched = self._host.to(self._device, non_blocking=True)
        return self._fetched
