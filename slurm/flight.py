"""Collects what each rank waits for: python -P -m slurm.flight SOCKETS LOGS

torch's flight recorder keeps the last collectives of gloo and NCCL. Each rank answers for it at a
Unix socket (torch.distributed.elastic.control_plane), from a thread of its own that needs no
Python, so that a rank that waits for others answers, too. slurm/node.sh runs this on each node when
the supervisor asks, and slurm/watchdog.py reads the files. Standard library only.
"""

import json
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from runspec import client, files

# gloo's collectives and NCCL's; a build without NCCL does not know the second.
_HANDLERS = ("fr_trace_json", "dump_nccl_trace_json")
_ANSWER_S = 3.0


def entries(path: Path) -> list[dict[str, Any]] | None:
    """Return the collectives of the rank that listens there; None if it does not answer."""
    collectives: list[dict[str, Any]] = []
    for handler in _HANDLERS:
        try:
            url = f"http://localhost/handler/{handler}"
            answer = client.send(url, method="POST", unix_socket=path, timeout_s=_ANSWER_S)
        except OSError:
            return None
        if answer.status == 200:
            collectives += json.loads(answer.body).get("entries", [])
    return collectives


def waiting(logs: Path) -> str:
    """Return the collective that most ranks wait in, for a message; "" if no dump tells it."""
    ranks: dict[int, str] = {}
    for path in logs.glob(files.FLIGHT.format("*")):
        number = re.search(r"\d+", path.name)
        try:
            dump = files.read_json(path)
        except (OSError, files.DamagedFile):
            continue  # it only adds to a message
        open_ = [each for each in dump or [] if not _is_done(each)]
        if number and open_:
            ranks[int(number[0])] = _described(min(open_, key=lambda each: each["time_created_ns"]))
    if not ranks:
        return ""
    what = Counter(ranks.values()).most_common(1)[0][0]
    who = sorted(rank for rank, each in ranks.items() if each == what)
    shown = ", ".join(map(str, who[:4])) + (f" and {len(who) - 4} more" if len(who) > 4 else "")
    return f"rank{'s' * (len(who) > 1)} {shown} wait{'s' * (len(who) == 1)} in {what}"


def _is_done(entry: dict[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _described(entry: dict[str, Any]) -> str:
    """Such as: gloo:all_reduce number 12 of 8 Double."""
    sizes, types = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    each = [
        # The sum of a scalar has no sizes.
        f"{' x '.join(map(str, size or [1]))} {kind}"
        for size, kind in zip(sizes, types, strict=False)
    ]
    number = entry.get("collective_seq_id") or entry.get("p2p_seq_id")
    return f"{entry['profiling_name']} number {number}" + (f" of {each[0]}" if each else "")


def main(sockets: Path, logs: Path) -> None:
    """Write the dump of each rank of this node into the logs."""
    paths = list(sockets.glob("rank_*"))
    with ThreadPoolExecutor(max(1, len(paths))) as pool:
        for path, collectives in zip(paths, pool.map(entries, paths), strict=True):
            if collectives is not None:
                # The disk may be full.
                with suppress(OSError):
                    rank = path.name.removeprefix("rank_")
                    files.write_json(logs / files.FLIGHT.format(rank), collectives)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
