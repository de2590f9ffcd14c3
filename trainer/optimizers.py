"""The optimizer and its schedule, any component by name, and updates that are left out."""

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from runspec.layout import StepFacts
from trainer.config import component, instantiate
from trainer.errors import ConfigError, NonFiniteLossError
from trainer.groups import Trained, make
from trainer.parallel import gradients

# Optimizers of torch whose fused form works on CPU and GPU, for sharded parameters too.
FUSED = ("torch.optim.Adam", "torch.optim.AdamW")
# Keys of a schedule's block that are shares of the run's steps, and what they become.
SHARES = {"warmup_ratio": "num_warmup_steps", "decay_ratio": "num_decay_steps"}
PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau"


def build(
    block: dict[str, Any], trained: Sequence[Trained] | Sequence[torch.nn.Parameter]
) -> Optimizer:
    """The optimizer that a config's `optimizer` block names; see `groups.make`.

    torch's Adam and AdamW are fused unless the block gives `fused` or `foreach`.

    Args:
        trained: parameters without names, of which no group is made, are taken too.

    Raises:
        ConfigError: it does not exist, or cannot work on parameters that are laid out like these.
    """
    named = [each if isinstance(each, Trained) else _unnamed(each) for each in trained]
    name = str(block.get("_component_"))
    if name in FUSED and not block.keys() & {"fused", "foreach"}:
        block = block | {"fused": True}
    sharded = any(isinstance(each.parameter, DTensor) for each in named)
    if known := StepFacts(optimizer=name, sharded=sharded).faults():
        raise ConfigError(*known)
    if name.startswith("torchao."):
        # It compiles its step, and torch's cache on the disk takes the code of sharded 8-bit state
        # for that of 4-bit or plain state ("'Tensor' object has no attribute 'codes'").
        import torch._functorch.config

        torch._functorch.config.enable_autograd_cache = False
    optimizer = make(block, named)
    # torchao's CPUOffloadOptimizer, which is made on GPUs only.
    if not hasattr(optimizer, "state"):
        raise ConfigError(
            f"optimizer: {name} has no state that a checkpoint could hold; fsdp_cpu_offload=true "
            "keeps optimizer and parameters in CPU memory"
        )
    _try_a_step(block, named)
    return optimizer


def _unnamed(parameter: torch.nn.Parameter) -> Trained:
    return Trained(parameter, kind="matrix" if parameter.ndim == 2 else "norm")


@torch.no_grad()
def _try_a_step(block: dict[str, Any], trained: Sequence[Trained]) -> None:
    """Step on copies of a small parameter of each kind, to fail before the model is trained."""
    copies = []
    for kind in {(each.kind, each.parameter.ndim) for each in trained}:
        alike = [each.parameter for each in trained if (each.kind, each.parameter.ndim) == kind]
        smallest = min(alike, key=torch.numel)
        copies.append(Trained(torch.nn.Parameter(torch.zeros_like(smallest)), kind=kind[0]))
        copies[-1].parameter.grad = torch.zeros_like(smallest)
    try:
        make(block, copies).step()
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0]
        raise ConfigError(
            f"optimizer: {block['_component_']} cannot update parameters in this layout "
            f"({_layout(copies[0].parameter)}): {reason}; use "
            "torch.optim.AdamW or torchao.optim.AdamW8bit"
        ) from error


def _layout(parameter: torch.Tensor) -> str:
    if not isinstance(parameter, DTensor):
        return f"whole, on {parameter.device.type}"
    mesh = parameter.device_mesh
    sizes = zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)
    return f"sharded, {', '.join(f'{name} {size}' for name, size in sizes)}"


def schedule(block: dict[str, Any] | None, optimizer: Optimizer, steps: int) -> LRScheduler | None:
    """The learning rate's schedule over `steps` optimizer steps; None if none is named.

    It is stepped after each optimizer step.

    Raises:
        ConfigError: it does not exist, does not take its arguments, or cannot work here.
    """
    if block is None:
        return None
    if why := unusable_schedule(block):
        raise ConfigError(why)
    block = _in_steps(block, steps)
    factory = component("lr_scheduler", block["_component_"])
    given = {
        name: optimizer if name == "optimizer" else steps
        for name in schedule_arguments(factory, block)
    }
    positional = () if "optimizer" in given else (optimizer,)
    made = instantiate("lr_scheduler", block, *positional, **given)
    if not isinstance(made, LRScheduler):
        raise ConfigError(f"lr_scheduler: {block['_component_']} returns no LRScheduler of torch")
    total = getattr(made, "total_steps", steps)
    if total < steps:
        raise ConfigError(
            f"lr_scheduler.total_steps: {block['_component_']} ends after {total} steps, the run "
            f"after {steps}; leave it out: it is then the run's number"
        )
    return made


def _in_steps(block: dict[str, Any], steps: int) -> dict[str, Any]:
    """A block whose shares of the run are numbers of steps, rounded up as transformers does."""
    arguments = inspect.signature(component("lr_scheduler", block["_component_"])).parameters
    for share, name in SHARES.items():
        if block.get(share) is None:
            continue
        if name not in arguments:
            raise ConfigError(
                f"lr_scheduler.{share}: {block['_component_']} has no {name}; use a schedule of "
                "transformers, such as transformers.get_wsd_schedule"
            )
        if name in block or not 0 <= block[share] <= 1:
            raise ConfigError(
                f"lr_scheduler.{share}: must be a share of all steps, from 0 to 1, without {name}"
            )
        block = block | {name: math.ceil(block[share] * steps)}
    return {k: v for k, v in block.items() if k not in SHARES}


def schedule_arguments(factory: Callable[..., Any], block: dict[str, Any]) -> set[str]:
    """The arguments of a schedule that the trainer gives it, of those that the block does not."""
    parameters = inspect.signature(factory).parameters
    given = {"optimizer", "num_training_steps"} & parameters.keys()
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        given.add("num_training_steps")
    # OneCycleLR has it by this name, and takes two other numbers instead.
    if "total_steps" in parameters and not block.keys() & {"epochs", "steps_per_epoch"}:
        given.add("total_steps")
    return given - block.keys()


def unusable_schedule(block: dict[str, Any]) -> str | None:
    """Why a schedule of torch cannot work in any recipe; None if it may."""
    if block.get("_component_") != PLATEAU:
        return None
    return (
        f"lr_scheduler: {PLATEAU} needs a metric at each step, and validation is not at each step; "
        "use another schedule, such as torch.optim.lr_scheduler.CosineAnnealingLR"
    )


def learning_rate(optimizer: Optimizer) -> float:
    """The rate of the next step."""
    return float(optimizer.param_groups[0]["lr"])


def advance(scheduler: LRScheduler | None, steps: int) -> None:
    """Bring a schedule that was just made to where it is after `steps` steps.

    It is run through from the start, so that a schedule that the config changed, or that is over
    another number of steps, gives the rates that it would have given all along.
    """
    with warnings.catch_warnings():
        # torch misses the optimizer's steps in between.
        warnings.filterwarnings("ignore", ".*lr_scheduler.step", UserWarning)
        if scheduler is not None:
            for _ in range(steps):
                scheduler.step()


def warmup_note(block: dict[str, Any] | None, steps: int) -> str | None:
    """What to say if the run ends before the warm-up does."""
    warmup = (block or {}).get("num_warmup_steps")  # a share is never too long
    if not isinstance(warmup, int) or warmup < steps:
        return None
    return (
        f"note: lr_scheduler.num_warmup_steps: {warmup} steps of warm-up in a run of {steps}: the "
        "learning rate never reaches optimizer.lr"
    )


class NonFiniteGuard:
    """Leaves out updates that are not finite on every rank; too many in a row end the run.

    Fused optimizers of torch take the verdict on the device and leave weights and state alone (as
    they do for torch.amp's GradScaler); the GPU is never waited for. They also clip, while they
    read the gradients. For any other optimizer the gradients are clipped first, and the verdict is
    read before each step, which waits for the backward pass.

    Args:
        limit: steps in a row without an update that end the run.
        skipped: updates that earlier starts of the run left out.
    """

    def __init__(
        self, optimizer: Optimizer, limit: int, device: torch.device, skipped: int = 0
    ) -> None:
        self._optimizer, self._limit = optimizer, limit
        self._decides_on_device = getattr(optimizer, "_step_supports_amp_scaling", False)
        # Left out in all, in a row until now, and the most in a row.
        self._counts = torch.tensor([skipped, 0, 0], device=device)
        # A copy that arrives whenever the device comes to it: late, but without waiting.
        self._arrived = torch.zeros(3, dtype=torch.int64, pin_memory=device.type == "cuda")
        # The same memory, read by no operator of torch.
        self._known = self._arrived.numpy()

    def step(
        self, parameters: list[nn.Parameter], norm: torch.Tensor, max_norm: float | None
    ) -> None:
        """Clip to `max_norm` and step the optimizer, unless `norm` is not finite.

        Args:
            norm: of the parameters' gradients; a scalar, alike on all ranks.
        """
        finite = norm.isfinite()
        bad = ~finite
        if self._decides_on_device:
            scale = None if max_norm is None else gradients.excess(norm, max_norm)
            self._optimizer.grad_scale, self._optimizer.found_inf = scale, bad.float()
            self._optimizer.step()
        elif finite.item():
            gradients.clip_gradients(parameters, norm, max_norm)
            self._optimizer.step()
        total, row, most = self._counts.unbind()
        bad = bad.to(self._counts.device)
        row = (row + 1) * bad
        self._counts = torch.stack([total + bad, row, torch.maximum(most, row)])
        self._arrived.copy_(self._counts, non_blocking=True)

    def exceeded(self) -> bool:
        """True once it is known here that too many came in a row; the ranks must agree on it."""
        return int(self._known[2]) >= self._limit

    def left_out(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Updates that were left out, in all and in a row until now; scalars on the device."""
        return self._counts[0], self._counts[1]

    def total(self) -> int:
        """Updates that were left out in all; a copy to the CPU, which waits for the device."""
        return int(self._counts.tolist()[0])

    def fault(self, step: int, where: str = "") -> NonFiniteLossError:
        """What to raise if the ranks have agreed that the limit is exceeded after `step`.

        Args:
            where: the steps that had no update, if these are not as many in a row as the limit.
        """
        where = where or f"in {self._limit} steps in a row"
        return NonFiniteLossError(
            f"step {step}: the loss or the gradient was not finite {where}; none of them changed "
            "the weights, and no checkpoint has what followed; lower optimizer.lr or set "
            "clip_grad_norm=1.0, then start a new run"
        )
