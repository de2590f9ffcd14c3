"""Ranks of one host that connect as gloo does: python -m benchmarks.groups RANKS ...

Each makes the two groups that a rank of the trainer makes, and then talks in the second one. With
TORCH_GLOO_LAZY_INIT=1 a rank connects to another when it first talks to it. Prints one line of JSON
for each number of ranks: seconds of rank 0, its open files, and CPU seconds of all ranks.
"""

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from slurm.rendezvous import port_of

LIMIT = timedelta(minutes=5)


def rank(number: int, ranks: int, port: int) -> dict[str, float]:
    """Seconds of each part, and open files."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
    began, found = time.monotonic(), {}
    dist.init_process_group("gloo", store=store, rank=number, world_size=ranks, timeout=LIMIT)
    group = dist.new_group(backend="gloo", timeout=LIMIT)
    found["groups_s"] = time.monotonic() - began
    numbers = [0.0] * 9
    parts: dict[str, Callable[[], object]] = {
        "barrier_s": lambda: dist.barrier(group=group),
        "gather_s": lambda: dist.all_gather_object([None] * ranks, None, group=group),
        "sum_s": lambda: dist.all_reduce(torch.tensor(numbers).double(), group=group),
    }
    for name, part in parts.items():
        # Nobody is late, and who talks is connected.
        for _ in range(2):
            dist.barrier(group=group)
            began = time.monotonic()
            part()
            found[name] = time.monotonic() - began
    found["files"] = len(os.listdir("/proc/self/fd"))
    dist.barrier(group=group)
    return found


def measure(ranks: int) -> dict[str, float]:
    """What rank 0 measures, and the CPU time of all."""
    port = port_of(str(os.getpid()), ranks)
    reader, writer = os.pipe()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # As in trainer.launch, the store is not rank 0's, and begins after the ranks are forked.
    pids = []
    for number in range(ranks):
        if (pid := os.fork()) == 0:
            found = rank(number, ranks, port)
            if not number:
                os.write(writer, json.dumps(found).encode())
            os._exit(0)
        pids.append(pid)
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    for pid in pids:
        os.waitpid(pid, 0)
    del store
    os.close(writer)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    with os.fdopen(reader) as result:
        return {"ranks": ranks, **json.loads(result.read()), "cpu_s": spent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", type=int, nargs="+")
    for count in parser.parse_args().ranks:
        print(json.dumps({name: round(value, 3) for name, value in measure(count).items()}))


if __name__ == "__main__":
    main()
