"""How many GPU-hours a run has used. Standard library only: the job's own records count them."""

from collections.abc import Iterable, Mapping
from typing import Any


def gpu_hours(attempts: Iterable[Mapping[str, Any]]) -> float:
    """Return the GPU-hours of attempts, those that brought nothing included.

    Args:
        attempts: lines of attempts.jsonl: `started` and `ended` in seconds, and `gpus`, the number
            of GPUs of the allocation. A line without them, from a broken record, counts nothing.
    """
    used = 0.0
    for line in attempts:
        numbers = [line.get(key) for key in ("started", "ended", "gpus")]
        if all(isinstance(number, int | float) for number in numbers):
            started, ended, gpus = numbers
            used += max(0.0, ended - started) * gpus / 3600  # type: ignore[operator]
    return used
