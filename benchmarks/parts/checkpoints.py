"""Seconds for which training stands still while a checkpoint is saved."""

from __future__ import annotations

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

from benchmarks.parts.measure import Case, Ready, Setting, Tensors, Variant
from trainer import distributed
from trainer.checkpoint import Checkpoints, TrainerState
from trainer.distributed import World

# Weights and AdamW's two moments, all in one dtype.
COPIES, LAYERS, WIDTH = 3, 8, 1024


def cases(setting: Setting) -> Iterator[Case]:
    """One state by each way of saving."""
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
            "long the call holds the training up"
        ),
        variants=[
            trainer("asynchronous (the trainer's default)", asynchronous=True),
            trainer("waiting for the disk (the trainer's)", asynchronous=False),
            Variant("dcp.save", lambda: _dcp(setting, folder / "dcp", state, False)),
            Variant("dcp.async_save", lambda: _dcp(setting, folder / "later", state, True)),
            Variant("torch.save", lambda: _torch_save(folder / "file.pt", state)),
        ],
        reference=state.tensors,
        tolerance=0.0,
        rate=("GiB saved a second held up", gib),
        blocking=True,
    )


class _State:
    """A model and its optimizer, with random content."""

    def __init__(self, setting: Setting, seed: int) -> None:
        numbers = setting.size.state_mib * 2**20 // COPIES // setting.dtype.itemsize
        height = max(1, numbers // LAYERS // WIDTH)
        self.model = nn.Sequential(
            *(nn.Linear(WIDTH, height, bias=False, device="meta") for _ in range(LAYERS))
        )
        for index, layer in enumerate(self.model):
            layer.weight = nn.Parameter(setting.random(height, WIDTH, seed=seed + index))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.update(rate=0.0)

    def update(self, rate: float) -> None:
        """A step of the optimizer, with the weights as gradients."""
        for layer in self.model:
            layer.weight.grad = layer.weight.detach().clone()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def content_copied(self) -> list[torch.Tensor]:
        """A copy of every tensor."""
        return [tensor.clone() for tensor in self.tensors().values()]

    @torch.no_grad()
    def restore(self, copies: list[torch.Tensor]) -> None:
        """Put a copy back."""
        for tensor, copied in zip(self.tensors().values(), copies, strict=True):
            tensor.copy_(copied)

    def content(self) -> dict[str, Any]:
        """As the trainer's checkpoints hold it."""
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def tensors(self) -> Tensors:
        """All of it, by name."""
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
        """What a checkpoint of it holds."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())


def _trainer(
    setting: Setting, world: World, folder: Path, state: _State, asynchronous: bool
) -> Ready:
    checkpoints = Checkpoints(folder, world, attempt=0, keep=1, asynchronous=asynchronous)
    step = 0

    def run() -> None:
        nonlocal step
        step += 1
        checkpoints.save(state.model, state.optimizer, TrainerState(step=step), wait=False)

    def loaded() -> Tensors:
        # An update right after the call must not get into what is saved.
        before = state.content_copied()
        run()
        state.update(rate=1.0)
        checkpoints.wait()
        other = _State(setting, seed=100)
        checkpoints.load(other.model, other.optimizer, {})
        state.restore(before)
        return other.tensors()

    def figures() -> dict[str, Any]:
        # The update waits for the copy, which in training is made beside the passes between.
        began = _now(setting)
        run()
        state.update(rate=0.0)
        seconds = _now(setting) - began
        checkpoints.wait()
        return {"to the end of an update right after it, ms": round(1e3 * seconds, 1)}

    return Ready(run, results=loaded, after=checkpoints.wait, figures=figures)


def _now(setting: Setting) -> float:
    if setting.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _dcp(setting: Setting, folder: Path, state: _State, later: bool) -> Ready:
    # It tells of what was chosen on purpose.
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    pending: list[Any] = []
    step = 0

    def writer() -> dcp.FileSystemWriter:
        nonlocal step
        step += 1
        return dcp.FileSystemWriter(folder / str(step % 2), sync_files=True, overwrite=True)

    def run() -> None:
        content = state.content()
        if later:
            pending.append(dcp.async_save(content, storage_writer=writer()))
        else:
            dcp.save(content, storage_writer=writer())

    def finish() -> None:
        while pending:
            pending.pop().result()

    def loaded() -> Tensors:
        other = _State(setting, seed=100)
        dcp.load(other.content(), storage_reader=dcp.FileSystemReader(folder / str(step % 2)))
        return other.tensors()

    return Ready(run, results=loaded, after=finish)


def _torch_save(path: Path, state: _State) -> Ready:
    path.parent.mkdir(parents=True, exist_ok=True)

    def loaded() -> Tensors:
        content = torch.load(path)
        return {
            f"{name} {index}": tensor
            for index in range(LAYERS)
            for name, tensor in (
                ("weight", content["model"][f"{index}.weight"]),
                ("first moment", content["optimizer"]["state"][f"{index}.weight"]["exp_avg"]),
                ("second moment", content["optimizer"]["state"][f"{index}.weight"]["exp_avg_sq"]),
            )
        }

    return Ready(lambda: torch.save(state.content(), path), results=loaded)
