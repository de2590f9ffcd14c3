"""One rank's torch.profiler trace: where the time of its recorded steps went.

Each moment of the steps is given to one thing, the first of these that is going on: compute,
communication, copies, data loading, idle; on a CPU data loading and copies come first, because they
are operators like any other. So communication is "exposed" if nothing is computed meanwhile.
"""

import gzip
import re
from collections.abc import Iterable, Mapping, Sequence
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
    """Where the time of a rank's recorded steps went, in seconds of all of them together."""

    rank: int
    steps: int
    on_gpu: bool
    total: float
    # Compute, exposed communication, copies, data loading and idle, which add up to total.
    parts: Mapping[str, float]
    # All of it, also what is hidden behind compute.
    communication: float

    @property
    def own(self) -> float:
        """Seconds per step that it took without waiting for the network or for other ranks."""
        return (self.total - self.parts["communication"]) / self.steps

    def share(self, part: str) -> float:
        """The share of a part in its time."""
        return self.parts[part] / self.total


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
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{path} is not a complete trace ({type(error).__name__})"
        raise RunFault(
            f"{message}: the job may have ended while it was written; record it again"
        ) from error
    try:
        return measured(events, rank)
    except (KeyError, TypeError, ValueError) as error:
        raise RunFault(
            f"{path} contains events in an unknown format ({error}): record it again"
        ) from error


def measured(events: list[Event], rank: int) -> RankTime:
    """Return where the time of a trace's complete events went; their times are microseconds."""
    steps = [each for each in events if _name(each).startswith("ProfilerStep#")]
    steps = [each for each in steps if each.get("cat") != "gpu_user_annotation"]
    known = [each for each in events if each.get("cat") != "Trace"]
    if not known:
        raise ValueError("no events")
    spans = _spans(steps or known)
    window = min(begin for begin, _ in spans), max(end for _, end in spans)
    total = (window[1] - window[0]) * 1e-6
    on_gpu = any(each.get("cat") in _KERNELS for each in known)
    loading = [each for each in known if _name(each).startswith("enumerate(DataLoader)")]
    layers = dict(_gpu_layers(known, loading) if on_gpu else _cpu_layers(known, loading))
    parts = dict(zip(layers, _given([*layers.values()], window), strict=True))
    parts["idle"] = total - sum(parts.values())
    (communication,) = _given([layers["communication"]], window)
    return RankTime(rank, max(1, len(steps)), on_gpu, total, parts, communication)


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


def _given(layers: Sequence[list[Interval]], window: Interval) -> list[float]:
    """Return for how many seconds each layer is at work while no layer before it is."""
    begin, end = window
    marks = sorted(
        (min(max(moment, begin), end), change, layer)
        for layer, spans in enumerate(layers)
        for span in spans
        for moment, change in zip(span, (1, -1), strict=True)
    )
    at_work, lengths, last = [0] * len(layers), [0.0] * len(layers), begin
    for moment, change, layer in marks:
        first = next((k for k, count in enumerate(at_work) if count > 0), None)
        if first is not None:
            lengths[first] += (moment - last) * 1e-6
        last = moment
        at_work[layer] += change
    return lengths
