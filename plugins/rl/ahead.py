"""Answers of later rollouts, which samplers sample while one is trained: see max_staleness."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import torch

from plugins.rl.recipe_keys import GrpoConfig
from plugins.rl.rewards.pool import Scores
from plugins.rl.rollouts import Answer, Generation, PromptBatches
from trainer.errors import ConfigError
from trainer.layers.batch import MicroBatch
from trainer.methods.base import Models
from trainer.parallel.world import World


class Drawn(NamedTuple):
    """A rank's answers of a rollout."""

    # The answers to each prompt, and their scores.
    groups: list[list[Answer]]
    scores: list[list[Scores]]
    # fp64 [groups, group_size], NaN for none.
    rewards: torch.Tensor
    # Seconds that scoring took.
    scored_s: float


class Ahead:
    """Draws the answers of each rollout; with max_staleness in a thread, some rollouts ahead.

    A rollout is begun when the weights of the one max_staleness before it are there, and goes on
    with newer ones as they come. A start that resumes draws all again, by the weights it has.

    Args:
        draw: the answers to a rank's prompts of the rollout of this number, on this rank alone.
    """

    def __init__(
        self,
        config: GrpoConfig,
        world: World,
        generation: Generation,
        prompts: PromptBatches,
        draw: Callable[[list[MicroBatch], int], Drawn],
    ) -> None:
        self._world, self._generation, self._prompts, self._draw = world, generation, prompts, draw
        self._most = config.max_staleness
        if self._most and generation.samplers is None:
            raise ConfigError("max_staleness: only rollout nodes work ahead; set resources.rollout")
        self._later: Iterator[tuple[int, list[MicroBatch]]] = iter(())
        self._pending: deque[Future[Drawn]] = deque()
        # One, so that rollouts are drawn in turn; a rank that ends does not wait for it.
        self._thread = ThreadPoolExecutor(1)

    def take(self, models: Models, given: list[MicroBatch], number: int) -> Drawn:
        """The answers of the rollout of this number; all ranks call this together."""
        if not self._most:
            with self._generation.holding(models, number):
                return self._world.on_all(lambda: self._draw(given, number))
        begins = not self._pending
        drawn = None if begins else self._next()
        self._generation.hold(models, number)
        if begins:
            self._later = enumerate(self._prompts.inner.from_step(number), number)
        for _ in range(self._most + 1 if begins else 1):
            if (following := next(self._later, None)) is not None:
                self._pending.append(self._thread.submit(self._draw, following[1], following[0]))
        return drawn or self._next()

    def rest(self) -> None:
        """Wait until nothing is drawn; what was, is kept."""
        wait(self._pending)

    def _next(self) -> Drawn:
        future = self._pending.popleft()
        return self._world.on_all(future.result)
