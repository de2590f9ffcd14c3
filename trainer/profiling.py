"""torch.profiler by the config's `profiler` block; traces land where TensorBoard finds them."""

from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from trainer.config import PROFILER_KEYS, TrainConfig
from trainer.distributed import World


class NoProfiler:
    """Stands where the profiler would, and does nothing."""

    def __enter__(self) -> "NoProfiler":
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to write."""

    def step(self) -> None:
        """Nothing to record."""


def profiler(config: TrainConfig, world: World) -> Any:
    """A context manager with `step()`, to be called once after each training step.

    Traces are written as <output_dir>/profile/rank_<r>.<time>.pt.trace.json.
    """
    settings = PROFILER_KEYS | (config.profiler or {})
    if not settings["enabled"]:
        return NoProfiler()
    activities = [ProfilerActivity.CPU] if settings["cpu"] else []
    if settings["cuda"] and world.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return profile(
        activities=activities or [ProfilerActivity.CPU],
        profile_memory=settings["profile_memory"],
        with_stack=settings["with_stack"],
        record_shapes=settings["record_shapes"],
        with_flops=settings["with_flops"],
        schedule=schedule(
            wait=settings["wait_steps"],
            warmup=settings["warmup_steps"],
            active=settings["active_steps"],
            repeat=settings["num_cycles"],
        ),
        on_trace_ready=tensorboard_trace_handler(
            str(config.output_dir / "profile"), worker_name=f"rank_{world.rank}"
        ),
    )
