"""Where the time of a run's profiled steps goes, by rank."""

from collections.abc import Iterator, Sequence
from statistics import median

from launcher.errors import RunFault, UsageFault
from launcher.look import trace
from launcher.look.text import plain
from launcher.look.trace import RankTime
from launcher.run.directory import Run
from runspec import files

# The parts of a step's time (launcher/look/trace.py) and their columns.
_HEADS = {
    "compute": "COMPUTE",
    "communication": "EXPOSED COMM",
    "copies": "COPIES",
    "data loading": "DATA",
    "idle": "IDLE",
}


def ranks(run: Run) -> tuple[list[RankTime], list[str]]:
    """Return where the time of each traced rank went, and what is wrong with other traces.

    Raises:
        UsageFault: the run has no trace.
        RunFault: none of its traces can be read.
    """
    paths = trace.newest(run.path / files.PROFILE)
    if not paths:
        raise UsageFault(
            f"{run.name} has no profiler trace: submit its recipe again with --profile"
        )
    times, faults = [], []
    for rank, path in paths.items():
        try:
            times.append(trace.read(path, rank))
        except RunFault as fault:
            faults += fault.faults
    if not times:
        raise RunFault(faults)
    return times, faults


def slowest(times: Sequence[RankTime]) -> tuple[RankTime, float] | None:
    """Return the rank that the others wait for, and by how many seconds per step; None for one.

    In a step that ends in a collective all ranks take as long as the slowest. It is the one that
    waits least: its time less exposed communication is compared with the median of the others.
    """
    if len(times) < 2:
        return None
    last = max(times, key=lambda each: each.own)
    return last, last.own - median(each.own for each in times if each is not last)


def lines(run: Run, times: Sequence[RankTime], top: int) -> Iterator[str]:
    """Yield the table, torch's own of the operators, and the slowest rank."""
    world = [run.asked[key] for key in ("nodes", "gpus_per_node")]
    total = world[0] * world[1] if all(world) else None
    traced = f"{len(times)} of {total} ranks" if total else f"{len(times)} ranks"
    steps = f"{times[0].steps} step{'s' if times[0].steps != 1 else ''}"
    yield f"{run.name}: {steps}, traced on {traced} ({'GPU' if times[0].on_gpu else 'CPU'})"
    heads = (*_HEADS.values(), "ALL COMM")
    yield "RANK  STEP       " + "  ".join(f"{head:>12}" for head in heads)
    for each in times:
        step = f"{each.total / each.steps * 1e3:,.1f} ms"
        shares = [f"{100 * each.share(part):.1f} %" for part in _HEADS]
        comm = f"{100 * each.communication / each.total:.1f} %"
        yield f"{each.rank:<5} {step:<11}" + "  ".join(f"{t:>12}" for t in (*shares, comm))
    yield from _operators(run, times[0].rank, top)
    if slow := slowest(times):
        rank, seconds = slow
        share = 100 * seconds / (rank.total / rank.steps)
        yield (
            f"slowest    rank {rank.rank}: {max(0.0, seconds) * 1e3:.1f} ms per step "
            f"({max(0.0, share):.1f} %) more than the median of the others"
        )


def _operators(run: Run, rank: int, top: int) -> Iterator[str]:
    """Yield the first rows of torch.profiler's table, which the rank has written."""
    path = run.path / files.PROFILE / f"summary_rank_{rank}.txt"
    if path.is_file():
        yield f"operators of rank {rank}, by torch.profiler ({path}):"
        # A rule, the heads and a rule stand before them.
        rows = path.read_text(encoding="utf-8", errors="replace").splitlines()[: 3 + top]
        yield from (plain(row).rstrip() for row in rows)
