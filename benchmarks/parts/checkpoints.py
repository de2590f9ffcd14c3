"""How long saving a checkpoint blocks training."""

import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from benchmarks.parts.measure import Case, Runnable, Setting, Tensors, Variant
from trainer.parallel import world as distributed
from trainer.parallel.world import World
from trainer.storage.checkpoint import Checkpoints
from trainer.storage.committed import TrainerState

# Per parameter: the weight and AdamW's two moments, in one dtype.
TENSORS_PER_WEIGHT, LAYERS, WIDTH = 3, 8, 1024


def cases(setting: Setting) -> Iterator[Case]:
    """The same state saved by each method."""
    world = distributed.start(setting.device.type)
    try:
        with tempfile.TemporaryDirectory(prefix="levers-") as folder:
            yield _case(setting, world, Path(folder))
    finally:
        distributed.stop()


def _case(setting: Setting, world: World, folder: Path) -> Case:
    state = _State(setting, seed=1)
    gib = state.bytes() / 2**30

    def trainer(name: str, asynchronous: bool) -> Variant:
        return Variant(
            name, lambda: _trainer(setting, world, folder / name[:12], state, asynchronous)
        )

    return Case(
        name="saving",
        what=(
            f"weights and AdamW's moments, {gib:.3f} GiB, to {folder.parent}; the time is how "
            "long the call blocks training"
        ),
        variants=[
            trainer("asynchronous (the trainer's default)", asynchronous=True),
            trainer("synchronous (the trainer's)", asynchronous=False),
            Variant("dcp.save", lambda: _dcp(setting, folder / "dcp", state, False)),
            Variant("dcp.async_save", lambda: _dcp(setting, folder / "dcp_async", state, True)),
            Variant("torch.save", lambda: _torch_save(folder / "file.pt", state)),
        ],
        reference=state.tensors,
        tolerance=0.0,
        rate=("GiB saved per second of blocking", gib),
        blocking=True,
    )


class _State:
    """A model and its optimizer with random values."""

    def __init__(self, setting: Setting, seed: int) -> None:
        numbers = setting.size.state_mib * 2**20 // TENSORS_PER_WEIGHT // setting.dtype.itemsize
        height = max(1, numbers // LAYERS // WIDTH)
        self.model = nn.Sequential(
            *(nn.Linear(WIDTH, height, bias=False, device="meta") for _ in range(LAYERS))
        )
        for index, layer in enumerate(self.model):
            layer.weight = nn.Parameter(setting.random(height, WIDTH, seed=seed + index))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.update(lr=0.0)

    def update(self, lr: float) -> None:
        """One optimizer step with the weights as gradients."""
        for layer in self.model:
            layer.weight.grad = layer.weight.detach().clone()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def clone_tensors(self) -> list[torch.Tensor]:
        """A clone of every tensor."""
        return [tensor.clone() for tensor in self.tensors().values()]

    @torch.no_grad()
    def restore(self, copies: list[torch.Tensor]) -> None:
        """Copy the cloned values back."""
        for tensor, copied in zip(self.tensors().values(), copies, strict=True):
            tensor.copy_(copied)

    def state_dict(self) -> dict[str, Any]:
        """State dicts as the trainer's checkpoints store them."""
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def tensors(self) -> Tensors:
        """All tensors by name."""
        return {
            f"{name} {index}": tensor
            for index, layer in enumerate(self.model)
            for name, tensor in (
                ("weight", layer.weight.detach()),
                ("first moment", self.optimizer.state[layer.weight]["exp_avg"]),
                ("second moment", self.optimizer.state[layer.weight]["exp_avg_sq"]),
            )
        }

    def bytes(self) -> int:
        """Size of a checkpoint."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())


def _trainer(
    setting: Setting, world: World, folder: Path, state: _State, asynchronous: bool
) -> Runnable:
    checkpoints = Checkpoints(folder, world, attempt=0, keep=1, asynchronous=asynchronous)
    step = 0

    def run() -> None:
        nonlocal step
        step += 1
        checkpoints.save(state.model, state.optimizer, TrainerState(step=step), wait=False)

    def loaded() -> Tensors:
        # An optimizer step right after the call must not change what is saved.
        before = state.clone_tensors()
        run()
        state.update(lr=1.0)
        checkpoints.wait()
        other = _State(setting, seed=100)
        checkpoints.load(other.model, other.optimizer, {})
        state.restore(before)
        return other.tensors()

    def figures() -> dict[str, Any]:
        # The step waits for the copy; in training the copy overlaps with the next passes.
        began = _now(setting)
        run()
        state.update(lr=0.0)
        seconds = _now(setting) - began
        checkpoints.wait()
        return {"save and the next optimizer step, ms": round(1e3 * seconds, 1)}

    return Runnable(run, results=loaded, after=checkpoints.wait, figures=figures)


def _now(setting: Setting) -> float:
    if setting.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _dcp(setting: Setting, folder: Path, state: _State, asynchronous: bool) -> Runnable:
    # DCP warns of settings that are intended here.
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    pending: list[Any] = []
    step = 0

    def writer() -> dcp.FileSystemWriter:
        nonlocal step
        step += 1
        return dcp.FileSystemWriter(folder / str(step % 2), sync_files=True, overwrite=True)

    def run() -> None:
        state_dict = state.state_dict()
        if asynchronous:
            pending.append(dcp.async_save(state_dict, storage_writer=writer()))
        else:
            dcp.save(state_dict, storage_writer=writer())

    def finish() -> None:
        while pending:
            pending.pop().result()

    def loaded() -> Tensors:
        other = _State(setting, seed=100)
        dcp.load(other.state_dict(), storage_reader=dcp.FileSystemReader(folder / str(step % 2)))
        return other.tensors()

    return Runnable(run, results=loaded, after=finish)


def _torch_save(path: Path, state: _State) -> Runnable:
    path.parent.mkdir(parents=True, exist_ok=True)

    def loaded() -> Tensors:
        saved = torch.load(path)
        return {
            f"{name} {index}": tensor
            for index in range(LAYERS)
            for name, tensor in (
                ("weight", saved["model"][f"{index}.weight"]),
                ("first moment", saved["optimizer"]["state"][f"{index}.weight"]["exp_avg"]),
                ("second moment", saved["optimizer"]["state"][f"{index}.weight"]["exp_avg_sq"]),
            )
        }

    return Runnable(lambda: torch.save(state.state_dict(), path), results=loaded)
