"""Records how busy a node's GPUs are: python -P -m slurm.gpu_use PID

slurm/node.sh starts it beside the ranks, with LOGS, NODE_RANK and NODE_NAME set, if there is an
nvidia-smi. It runs for the whole attempt and samples every 5 s; every half minute a line
with the means goes to the node's file in LOGS. It ends with PID. Standard library only.
"""

import csv
import json
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from runspec import files
from runspec.states import process_start

SAMPLE_S, LINE_S, FIRST_S = 5, 30.0, 1.0
_FIELDS = ("index", "uuid", "utilization.gpu", "memory.used", "memory.total", "power.draw")
# By the fields after uuid: the key of the record, and what the value is divided by.
_KEYS = {"busy_percent": 1, "memory_gib": 1024, "memory_total_gib": 1024, "watts": 1}


def samples(text: Iterable[str], visible: str) -> list[dict[str, Any]]:
    """Return one record for each line of nvidia-smi about a GPU of the job.

    A value that the GPU does not report, such as the power of some cards, is left out.

    Args:
        visible: CUDA_VISIBLE_DEVICES; "" means all.
    """
    chosen = visible.split(",") if visible else []
    gpus = []
    for row in csv.reader(text, skipinitialspace=True):
        if len(row) != len(_FIELDS) or not row[0].isdigit():
            continue
        if chosen and row[0] not in chosen and row[1] not in chosen:
            continue
        gpu: dict[str, Any] = {"index": int(row[0])}
        for (key, divisor), value in zip(_KEYS.items(), row[2:], strict=True):
            with suppress(ValueError):
                gpu[key] = float(value) / divisor
        gpus.append(gpu)
    return gpus


def line_of(seen: Iterable[dict[str, Any]], now: float, node: str) -> dict[str, Any]:
    """Return the line for some samples: each GPU's means, and its peak memory."""
    by_gpu: dict[int, list[dict[str, Any]]] = {}
    for each in seen:
        by_gpu.setdefault(each["index"], []).append(each)
    gpus = []
    for index, given in sorted(by_gpu.items()):
        gpu: dict[str, Any] = {"index": index}
        for key in _KEYS:
            values = [each[key] for each in given if key in each]
            if values:
                gpu[key] = round(max(values) if key.startswith("memory") else fmean(values), 2)
        gpus.append(gpu)
    return {"time": now, "node": node, "gpus": gpus}


def main() -> None:
    pid = int(sys.argv[1])
    target = Path(os.environ["LOGS"]) / files.GPU_USE.format(os.environ["NODE_RANK"])
    visible, node = os.environ.get("CUDA_VISIBLE_DEVICES", ""), os.environ["NODE_NAME"]
    if "MIG-" in visible:
        return  # a MIG instance has no utilization of its own
    query = f"--query-gpu={','.join(_FIELDS)}"
    argv = ["nvidia-smi", query, "--format=csv,noheader,nounits", f"--loop={SAMPLE_S}"]
    try:
        tool = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError:
        return
    assert tool.stdout is not None
    rest, seen, due = b"", [], math.inf
    try:
        while process_start(pid) is not None:
            # This process must end even if the tool hangs.
            ready, _, _ = select.select([tool.stdout], [], [], FIRST_S)
            read = os.read(tool.stdout.fileno(), 65536) if ready else b""
            if ready and not read:
                return  # nvidia-smi has ended: there is nothing to sample
            *lines, rest = (rest + read).split(b"\n")
            seen += samples((line.decode(errors="replace") for line in lines), visible)
            # The first line comes early, to show that sampling works, but after all GPUs have been
            # sampled.
            if seen and due == math.inf:
                due = time.monotonic() + FIRST_S
            if seen and time.monotonic() >= due:
                with target.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line_of(seen, time.time(), node)) + "\n")
                seen, due = [], time.monotonic() + LINE_S
    except OSError:
        return  # a full disk: training continues without
    finally:
        tool.kill()
        tool.wait()


if __name__ == "__main__":
    main()
