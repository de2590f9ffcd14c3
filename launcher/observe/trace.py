"""One rank's torch.profiler trace: where the time of its recorded steps went.

Each moment of the steps is given to one thing, the first of these that is going on: compute,
communication, copies, data loading, idle; on a CPU data loading and copies come first, because they
are operators like any other. So communication is "exposed" if nothing is computed meanwhile.
"""

import gzip
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import RunFault
from runspec.files import parse_json

Interval = tuple[float, float]
Event = dict[str, Any]

_FILE = re.compile(r"rank_(\d+)\.(\d+)\.pt\.trace\.json(?:\.gz)?\Z")
_NCCL = re.compile(r"nccl", re.IGNORECASE)
_BACKEND = re.compile(r"(?:gloo|nccl|mpi|ucc):")
_COLLECTIVE = re.compile(r"(?:gloo|nccl|mpi|ucc):|c10d::|_?c10d_functional::|record_param_comms")
# What computes: aten::mm, mine::op. The nodes of autograd also hold FSDP's hooks, which wait.
_OPERATOR = re.compile(r"(?!autograd::|torch::autograd::)\w+::")
_KERNELS = {"kernel"}
_COPIES = {"gpu_memcpy", "gpu_memset"}
_CPU_COPIES = {"aten::copy_", "aten::_to_copy"}


@dataclass(frozen=True)
class RankTime:
    """Where the time of a rank's recorded steps went, in seconds of all of them together.

    compute, exposed_communication, copies, data_loading and idle add up to total. communication is
    all of it, also what is hidden behind compute.
    """

    rank: int
    host: str
    steps: int
    on_gpu: bool
    total: float
    compute: float
    communication: float
    exposed_communication: float
    copies: float
    data_loading: float
    idle: float

    @property
    def own(self) -> float:
        """Seconds that it took without waiting for the network or for other ranks."""
        return self.total - self.exposed_communication


def newest(folder: Path) -> dict[int, Path]:
    """Return the newest trace of each rank in a run's profile folder."""
    newest_of: dict[int, tuple[int, Path]] = {}
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return {}
    for path in paths:
        if name := _FILE.match(path.name):
            rank, written = int(name[1]), int(name[2])
            newest_of[rank] = max(newest_of.get(rank, (-1, path)), (written, path))
    return {rank: path for rank, (_, path) in sorted(newest_of.items())}


def read(path: Path, rank: int) -> RankTime:
    """Return where the time of a trace went.

    Raises:
        RunFault: it cannot be read, or has no events.
    """
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rb") as file:
            trace = parse_json(file.read())
        events = [each for each in trace["traceEvents"] if each.get("ph") == "X"]
        host = str(trace.get("host_name") or "?")
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{path} is not a complete trace ({type(error).__name__})"
        raise RunFault(
            f"{message}: the job may have ended while it was written; record it again"
        ) from error
    try:
        return measured(events, rank, host)
    except (KeyError, TypeError, ValueError) as error:
        raise RunFault(
            f"{path} contains events in an unknown format ({error}): record it again"
        ) from error


def measured(events: list[Event], rank: int, host: str = "?") -> RankTime:
    """Return where the time of a trace's complete events went; their times are microseconds."""
    steps = [each for each in events if _name(each).startswith("ProfilerStep#")]
    steps = [each for each in steps if each.get("cat") != "gpu_user_annotation"]
    known = [each for each in events if each.get("cat") != "Trace"]
    if not known:
        raise ValueError("no events")
    window = _hull(_spans(steps or known))
    on_gpu = any(each.get("cat") in _KERNELS for each in known)
    loading = [each for each in known if _name(each).startswith("enumerate(DataLoader)")]
    layers = _gpu_layers(known, loading) if on_gpu else _cpu_layers(known, loading)
    free = [window]
    parts = {}
    for name, spans in layers:
        mine = _clipped(_union(spans), window)
        parts[name] = _length(_both(mine, free))
        free = _without(free, mine)
    communication = next(spans for name, spans in layers if name == "communication")
    second = 1e-6
    return RankTime(
        rank=rank,
        host=host,
        steps=max(1, len(steps)),
        on_gpu=on_gpu,
        total=(window[1] - window[0]) * second,
        compute=parts["compute"] * second,
        communication=_length(_clipped(_union(communication), window)) * second,
        exposed_communication=parts["communication"] * second,
        copies=parts["copies"] * second,
        data_loading=parts["data loading"] * second,
        idle=_length(free) * second,
    )


def _name(event: Event) -> str:
    return str(event.get("name", ""))


def _gpu_layers(events: list[Event], loading: list[Event]) -> list[tuple[str, list[Interval]]]:
    """Return what a GPU does, and what its rank loads while it does nothing."""
    kernels = [each for each in events if each.get("cat") in _KERNELS]
    return [
        ("compute", _spans(each for each in kernels if not _NCCL.search(_name(each)))),
        ("communication", _spans(each for each in kernels if _NCCL.search(_name(each)))),
        ("copies", _spans(each for each in events if each.get("cat") in _COPIES)),
        ("data loading", _spans(loading)),
    ]


def _cpu_layers(events: list[Event], loading: list[Event]) -> list[tuple[str, list[Interval]]]:
    """Return what a rank's threads do; a collective's own thread computes nothing."""
    collectives = [each for each in events if _COLLECTIVE.match(_name(each))]
    threads = {each.get("tid") for each in collectives if _BACKEND.match(_name(each))}
    operators = [
        each
        for each in events
        if each.get("cat") == "cpu_op"
        and each.get("tid") not in threads
        and _OPERATOR.match(_name(each))
        and not _COLLECTIVE.match(_name(each))
    ]
    return [
        ("data loading", _spans(loading)),
        ("copies", _spans(each for each in operators if _name(each) in _CPU_COPIES)),
        ("compute", _spans(operators)),
        ("communication", _spans(collectives)),
    ]


def _spans(events: Iterable[Event]) -> list[Interval]:
    return [(float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events]


def _hull(spans: list[Interval]) -> Interval:
    return min(begin for begin, _ in spans), max(end for _, end in spans)


def _union(spans: Iterable[Interval]) -> list[Interval]:
    """Return the same moments as intervals that do not touch, in order."""
    union: list[Interval] = []
    for begin, end in sorted(spans):
        if union and begin <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((begin, end))
    return union


def _clipped(spans: list[Interval], window: Interval) -> list[Interval]:
    return _both(spans, [window])


def _both(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """Return the moments that are in both; each in order and without overlaps."""
    common, k = [], 0
    for begin, end in one:
        while k < len(other) and other[k][1] <= begin:
            k += 1
        at = k
        while at < len(other) and other[at][0] < end:
            common.append((max(begin, other[at][0]), min(end, other[at][1])))
            at += 1
    return [(begin, end) for begin, end in common if begin < end]


def _without(spans: list[Interval], taken: list[Interval]) -> list[Interval]:
    """Return the moments of spans that are not taken."""
    rest, k = [], 0
    for begin, end in spans:
        while k < len(taken) and taken[k][1] <= begin:
            k += 1
        at = k
        while at < len(taken) and taken[at][0] < end:
            rest.append((begin, taken[at][0]))
            begin = max(begin, taken[at][1])
            at += 1
        rest.append((begin, end))
    return [(begin, end) for begin, end in rest if begin < end]


def _length(spans: list[Interval]) -> float:
    return sum(end - begin for begin, end in spans)
