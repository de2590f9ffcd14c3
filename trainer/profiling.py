"""torch.profiler by the config's `profiler` block; traces land where TensorBoard finds them."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import ProfilerActivity, tensorboard_trace_handler

from runspec import files
from trainer.config import PROFILER_KEYS, TrainConfig
from trainer.errors import ConfigError
from trainer.parallel.world import World

# Keys that torch.profiler calls alike.
DETAILS = ("profile_memory", "with_stack", "record_shapes", "with_flops")
SUMMARY_ROWS = 50


def _recording(
    config: TrainConfig, world: World, settings: dict[str, Any]
) -> torch.profiler.profile:
    """Record what `profiler` describes."""
    folder, on_gpu = config.output_dir / files.PROFILE, world.device.type == "cuda"
    save_trace = tensorboard_trace_handler(str(folder), f"rank_{world.rank}")

    def write(recorded: torch.profiler.profile) -> None:
        save_trace(recorded)
        by = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        table = recorded.key_averages().table(sort_by=by, row_limit=SUMMARY_ROWS)
        files.write_text(folder / f"summary_rank_{world.rank}.txt", table + "\n")

    activities = [ProfilerActivity.CPU] if settings["cpu"] else []
    if settings["cuda"] and on_gpu:
        activities.append(ProfilerActivity.CUDA)
    return torch.profiler.profile(
        activities=activities or [ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(
            wait=settings["wait_steps"],
            warmup=settings["warmup_steps"],
            active=settings["active_steps"],
            repeat=settings["num_cycles"],
        ),
        on_trace_ready=write,
        **{name: settings[name] for name in DETAILS},
    )


def profiler(
    config: TrainConfig, world: World
) -> AbstractContextManager[torch.profiler.profile | None]:
    """A context manager that gives what `step()` is called on after each step, or None.

    On the chosen ranks (`ranks`: a list or all; the first of each node by default) it
    writes <output_dir>/profile/rank_<r>.<time>.pt.trace.json and summary_rank_<r>.txt, the time by
    operation.

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
    # The ranks of one node do the same work, and each trace takes tens of megabytes.
    chosen = world.local_rank == 0 if ranks is None else ranks == "all" or world.rank in ranks
    return _recording(config, world, settings) if chosen else nullcontext()
