"""What a forward pass keeps for the backward pass: recomputed layers, and inputs on the CPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from trainer.compat import TransformerDecoder
from trainer.config import TrainConfig

# By name, as not every torch has every one.
SAVED_OPERATIONS = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.linear",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_attention_math",
    "torch_attn._varlen_attn",
    # What tensor parallelism communicated is not communicated again.
    "_c10d_functional.all_gather_into_tensor",
    "_c10d_functional.reduce_scatter_tensor",
)


def prepare(model: TransformerDecoder, config: TrainConfig) -> None:
    """Compile and recompute the layers of `model` as `config` says, in place.

    Each layer is compiled by itself: all layers share one compiled code. The first batch of
    another length makes it general in the length, after which no length compiles again; packed
    batches are all of one length and keep the faster code.

    A recomputed layer keeps its input only. With "op" it also keeps the results of matrix
    products, of attention and of communication.
    """
    mode = config.activation_checkpointing
    # By operation the compiler must see what is kept; else it need not know of the recomputation.
    if config.compile and mode != "op":
        _compile(model)
    if mode == "op":
        _recompute(model, 1, context_fn=partial(create_selective_checkpoint_contexts, _policy()))
    elif mode is not None:
        offload = config.enable_activation_offloading
        _recompute(model, mode, **({"checkpoint_fn": InputOffloading()} if offload else {}))
    if config.compile and mode == "op":
        _compile(model)


def _compile(model: TransformerDecoder) -> None:
    # One code for each of: lengths, a short last batch, the first layer, validation.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    for layer in model.layers:
        # Not the call: FSDP's hooks and the checkpoint's stand around it.
        layer.forward = torch.compile(layer.forward)


def _recompute(model: TransformerDecoder, step: int, **settings: Any) -> None:
    for index in range(step - 1, len(model.layers), step):
        model.layers[index] = checkpoint_wrapper(model.layers[index], **settings)


def _policy() -> Callable[..., CheckpointPolicy]:
    saved = {op for name in SAVED_OPERATIONS if (op := _operation(name)) is not None}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = operation in saved
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _operation(name: str) -> Any:
    namespace, _, operation = name.partition(".")
    found = getattr(getattr(torch.ops, namespace), operation, None)
    return None if found is None else found.default


class InputOffloading:
    """torch.utils.checkpoint, with a layer's input on the CPU until the backward pass wants it.

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
        with saved_tensors_hooks(self._pack, _Input.take):
            return checkpoint(function, *args, use_reentrant=False, **kwargs)

    def _pack(self, tensor: torch.Tensor) -> "_Input":
        if tensor.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream()
        self._newest = _Input(tensor, self._newest, self._stream)
        return self._newest


class _Input:
    """One layer's input while it is on the CPU.

    Args:
        before: the input of the layer before, which the backward pass wants next.
    """

    def __init__(
        self, tensor: torch.Tensor, before: "_Input | None", stream: torch.cuda.Stream | None
    ) -> None:
        self._before, self._stream, self._device = before, stream, tensor.device
        self._fetched: torch.Tensor | None = None
        self._taken = False
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        if stream is None:
            self._host.copy_(tensor)
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._host.copy_(tensor, non_blocking=True)
        # Its memory is used again only when the copy is done.
        tensor.record_stream(stream)

    def take(self) -> torch.Tensor:
        """The tensor, on its device again."""
        self._fetch()
        tensor, self._fetched = self._fetched, None
        self._taken = True
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            tensor.record_stream(torch.cuda.current_stream())
        if self._before is not None and not self._before._taken:
            self._before._fetch()
        self._before = None
        return tensor

    def _fetch(self) -> None:
        if self._fetched is None:
            with torch.cuda.stream(self._stream):
                self._fetched = self._host.to(self._device, non_blocking=True)
