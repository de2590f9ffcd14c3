"""Counts the memory of tensors that have no data."""

import weakref
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, and the peak in each phase.

    A storage counts once however many tensors view it, from the operator that made it until
    nothing refers to it. FSDP2 frees and allocates storages by `resize_`, which is counted too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peaks: dict[str, int] = {}
        # Tells micro-steps apart, because gradients are not reduced after each.
        self.suffix = ""
        self._phase = "setup"
        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._paused = False
        self._patches = ExitStack()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether torch.compile takes no notice of this mode, instead of compiling nothing."""
        return True

    def enter(self, phase: str) -> None:
        """Count towards `phase` from here on."""
        self._phase = phase + self.suffix
        self._note()

    def count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage; for tensors from before the tracker was entered."""
        key, size = id(storage), storage.nbytes()
        before, reference = self._alive.get(key, (0, None))
        if reference is None:
            reference = weakref.ref(storage, lambda _: self._forget(key))
        if size != before:
            self.now += size - before
            self._alive[key] = size, reference
            self._note()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator and count what it made."""
        if DTensor in types:
            # It must first come down to operators on local tensors.
            return NotImplemented
        if func is torch.ops._c10d_functional.wait_tensor.default:
            # On fake tensors it would make a copy; on real ones it does not.
            return args[0]
        result = func(*args, **(kwargs or {}))
        if not self._paused:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.count(leaf.untyped_storage())
        return result

    def _forget(self, key: int) -> None:
        size, _ = self._alive.pop(key)
        self.now -= size

    def _note(self) -> None:
        self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self.now)

    def __enter__(self) -> "MemoryTracker":
        """Also watch what no operator shows."""
        resize = torch.UntypedStorage.resize_
        infer = ShardingPropagator._propagate_tensor_meta_non_cached

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if id(storage) in self._alive:
                self.count(storage)

        def infer_shapes(*args: Any) -> Any:
            # DTensor computes global shapes by running operators on them; that is no memory.
            self._paused = True
            try:
                return infer(*args)
            finally:
                self._paused = False

        for owner, function, replacement in (
            (torch.UntypedStorage, "resize_", resize_),
            (ShardingPropagator, "_propagate_tensor_meta_non_cached", infer_shapes),
        ):
            self._patches.enter_context(mock.patch.object(owner, function, replacement))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Stop watching."""
        super().__exit__(*error)
        self._patches.close()
