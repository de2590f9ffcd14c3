"""The figures of a step: begun to be copied when it is launched, read while the next one runs."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from trainer.parallel.world import World

# By the kind of a figure, how those of two micro-batches become one.
COMBINED = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}


class Figures(NamedTuple):
    """What is to be logged of a step, on its way from this rank's device."""

    step: int
    # Of the run.
    tokens: int
    # Of the step.
    lr: float
    # Of the step, over all ranks.
    targets: float
    # Of the sums.
    names: list[str]
    # Steps since the last logged one.
    losses: int
    # Figures that all ranks know.
    more: Mapping[str, float | None]
    # The sums, the losses' sum, the gradient norm, and the updates that were left out, in all and
    # in a row; fp64 on the host, once `arrived` has happened.
    values: torch.Tensor
    arrived: torch.cuda.Event | None

    def read(self) -> list[float]:
        """The values; waits until the device has come to them."""
        if self.arrived is not None:
            self.arrived.synchronize()
        values: list[float] = self.values.tolist()
        return values


def sent(values: list[torch.Tensor]) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Begin to copy scalars to the host, all to the first one's device before; and what tells when
    they have arrived.
    """
    device = values[0].device
    together = torch.stack([each.detach().to(device, torch.float64) for each in values])
    if not together.is_cuda:
        return together, None
    host = torch.empty_like(together, device="cpu", pin_memory=True)
    host.copy_(together, non_blocking=True)
    return host, torch.cuda.current_stream().record_event()


def add(
    sums: dict[str, torch.Tensor], more: Mapping[str, torch.Tensor], extremes: Mapping[str, str]
) -> None:
    """Add the figures of another micro-batch, or take its extremes, in place."""
    for name, value in more.items():
        combine = COMBINED[extremes.get(name, "sum")]
        sums[name] = combine(sums[name], value) if name in sums else value


def over_ranks(
    world: World, own: dict[str, float], more: float, extremes: Mapping[str, str]
) -> tuple[dict[str, float], float]:
    """Sums and extremes by name, and one further sum, over all ranks that see other data."""
    signs = {n: -1.0 if extremes[n] == "min" else 1.0 for n in own if n in extremes}
    *summed, total = world.sum([world.data_weight * value for value in (*own.values(), more)])
    values = dict(zip(own, summed, strict=True))
    if signs:
        highest = world.max([sign * own[name] for name, sign in signs.items()])
        values |= {n: signs[n] * value for n, value in zip(signs, highest, strict=True)}
    return values, total


def means(
    sums: dict[str, float], targets: float, extremes: Mapping[str, str], counted: Mapping[str, str]
) -> dict[str, float | None]:
    """Figures by name; None for one that is not finite, as is a mean over nothing.

    Args:
        counted: see Objective; the counts themselves are no figures.
    """
    found: dict[str, float | None] = {}
    for name, value in sums.items():
        if name not in counted.values():
            count = sums[counted[name]] if name in counted else targets
            found[name] = finite(value if name in extremes else value / (count or math.nan))
    return found


def finite(value: float) -> float | None:
    """`value`, or None."""
    return value if math.isfinite(value) else None
