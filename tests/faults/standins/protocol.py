"""What stand-ins of engines share: steps that take time, and the losses of a fixed sequence.

An engine that cannot start on a CPU is replaced by its protocol: the files that it writes, what it
does on a signal, and its exit status.
"""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])


def stops_on(number: signal.Signals) -> list[int]:
    """Return a list that is not empty once the signal has come."""
    seen: list[int] = []
    signal.signal(number, lambda *_: seen.append(number))
    return seen


def any_of(flag: object) -> bool:
    """Whether a flag is set on any rank; it fails when a rank is gone, as all collectives do."""
    found = torch.tensor(float(bool(flag)))
    dist.all_reduce(found)
    return bool(found.item())


def steps(first: int, last: int) -> Iterator[int]:
    dist.init_process_group("gloo")
    for step in range(first, last + 1):
        time.sleep(0.1)
        any_of(False)
        yield step


def end() -> None:
    """Leave the process group as a trainer does; a peer that is gone would abort this rank."""
    dist.barrier()
    dist.destroy_process_group()


def loss(step: int) -> float:
    return round(3.0 / step**0.5, 4)


def figures(step: int) -> dict[str, Any]:
    return {"loss": loss(step), "grad_norm": 1.0, "lr": 1e-4}
