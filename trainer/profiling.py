"""torch.profiler by the config's `profiler` block; traces land where TensorBoard finds them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity

from runspec import files
from trainer.config import PROFILER_KEYS, TrainConfig
from trainer.errors import ConfigError
from trainer.parallel.world import World

SUMMARY_ROWS = 50
SNAPSHOT_EVENTS = 200_000


class Profiler:
    """What `profiler` describes."""

    def __init__(self, config: TrainConfig, world: World, settings: dict, done: int) -> None:
        self._folder, self._rank = config.output_dir / files.PROFILE, world.rank
        self._cuda = world.device.type == "cuda"
        self._snapshot = settings["memory_snapshot"] and self._cuda
        self._save_trace = torch.profiler.tensorboard_trace_handler(
            str(self._folder), worker_name=f"rank_{world.rank}"
        )
        activities = [ProfilerActivity.CPU] if settings["cpu"] else []
        if settings["cuda"] and self._cuda:
            activities.append(ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(
            activities=activities or [ProfilerActivity.CPU],
            profile_memory=settings["profile_memory"],
            with_stack=settings["with_stack"],
            record_shapes=settings["record_shapes"],
            with_flops=settings["with_flops"],
            schedule=_schedule(settings, done),
            on_trace_ready=self._write,
        )

    def __enter__(self) -> "Profiler":
        if self._snapshot:
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS)
        self._profile.__enter__()
        return self

    def __exit__(self, kind: type | None, *error: Any) -> None:
        if kind is not None and issubclass(kind, torch.OutOfMemoryError):
            self._write_snapshot()
        self._profile.__exit__(kind, *error)

    def step(self) -> None:
        """One training step is done."""
        self._profile.step()

    def _write(self, recorded: torch.profiler.profile) -> None:
        self._save_trace(recorded)
        by = "self_cuda_time_total" if self._cuda else "self_cpu_time_total"
        table = recorded.key_averages().table(sort_by=by, row_limit=SUMMARY_ROWS)
        files.write_text(self._folder / f"summary_rank_{self._rank}.txt", table + "\n")
        self._write_snapshot()

    def _write_snapshot(self) -> None:
        if self._snapshot:
            self._folder.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self._folder / f"memory_rank_{self._rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
            self._snapshot = False


def profiler(
    config: TrainConfig, world: World, done: int
) -> AbstractContextManager[Profiler | None]:
    """A context manager that gives what `step()` is called on after each step, or None.

    On the chosen ranks (`ranks`: a list or all; the first of each node by default) it
    writes <output_dir>/profile/rank_<r>.<time>.pt.trace.json and summary_rank_<r>.txt, the time by
    operation. With `memory_snapshot` it writes memory_rank_<r>.pickle, for pytorch.org/memory_viz,
    when the first recorded steps end, or when the GPU's memory does before.

    Args:
        done: the last step that an earlier start of the run has done.

    Raises:
        ConfigError: a chosen rank does not exist.
    """
    settings = PROFILER_KEYS | (config.profiler or {})
    ranks = settings["ranks"]
    if not settings["enabled"]:
        return nullcontext()
    if isinstance(ranks, list) and max(ranks) >= world.size:
        raise ConfigError(
            f"profiler.ranks: there is no rank {max(ranks)}, the run has {world.size}, counted "
            "from 0"
        )
    if settings["memory_snapshot"] and world.device.type != "cuda":
        world.say("note: profiler.memory_snapshot: ignored; it needs a GPU")
    # The ranks of one node do the same work, and each trace takes tens of megabytes.
    chosen = world.local_rank == 0 if ranks is None else ranks == "all" or world.rank in ranks
    return Profiler(config, world, settings, done) if chosen else nullcontext()


def _schedule(settings: dict[str, Any], done: int) -> Callable[[int], ProfilerAction]:
    """What to do in the n-th step of this start, n from 0.

    wait_steps and the like count from this start's beginning; `steps` are the run's own numbers.
    """
    if settings["steps"] is None:
        return torch.profiler.schedule(
            wait=settings["wait_steps"],
            warmup=settings["warmup_steps"],
            active=settings["active_steps"],
            repeat=settings["num_cycles"],
        )
    first, last = settings["steps"]

    def action(number: int) -> ProfilerAction:
        step = done + number + 1
        if first <= step < last:
            return ProfilerAction.RECORD
        if step == last:
            return ProfilerAction.RECORD_AND_SAVE
        warms_up = first - settings["warmup_steps"] <= step < first
        return ProfilerAction.WARMUP if warms_up else ProfilerAction.NONE

    return action
