"""What training by a recipe needs of its GPUs, if a plug-in computes it."""

from collections.abc import Mapping
from typing import Any, Protocol

from launcher.gpus import Gpu
from launcher.plugins import hook


class Needs(Protocol):
    """The result of the hook "needs": computed, nothing of it measured."""

    @property
    def gpu(self) -> Gpu:
        """The kind of GPU."""

    @property
    def fits(self) -> bool:
        """Whether that has enough memory."""

    @property
    def peak_gib(self) -> float:
        """Memory of a rank's GPU at the peak of a step."""

    @property
    def hours(self) -> float:
        """Hours that the given tokens take, or an epoch."""


def needs(
    config: Mapping[str, Any],
    nodes: int,
    gpus_per_node: int,
    gpu: str | None = None,
    *,
    tokens: int | None = None,
) -> Needs | None:
    """Return what a resolved recipe needs on these GPUs; None without a plug-in that computes it.

    Args:
        gpu: a name of configs/gpus.yaml; None for the default.
        tokens: to train; None for an epoch.

    Raises:
        CookbookError: it cannot be computed.
    """
    compute = hook("needs")
    if compute is None:
        return None
    found: Needs = compute(config, nodes, gpus_per_node, gpu, tokens)
    return found
