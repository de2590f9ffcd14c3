"""Finding, showing and following a run's log files: ranks, nodes, one or several."""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import UsageFault
from launcher.look.lines import Growing, Source, read, tail_start
from launcher.run.directory import Run
from launcher.run.states import own_state, state_of
from runspec import files
from runspec.states import FINAL

# Of a longer log only the last lines are shown, unless more are asked for.
WHOLE_BYTES = 2**20
TAIL_LINES = 1000
# How often a log that is followed is looked at, and the controller asked whether the job runs.
_LOOK_S, _ASK_S = 0.5, 30.0
_RANGE = re.compile(r"(\d+)(?:-(\d+))?\Z")


@dataclass(frozen=True)
class Wanted:
    """Which logs of a run are asked for.

    ranks: such as "0", "0-3,8" or "all". nodes: their places or names, or "all". job: the job
    script's own log too. attempt: None for the newest.
    """

    ranks: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    job: bool = False
    attempt: int | None = None

    @property
    def default(self) -> bool:
        return not (self.ranks or self.nodes or self.job)


def choose(run: Run, wanted: Wanted) -> list[Source]:
    """Return the logs that are asked for; by default the first node's, which holds its ranks'.

    Before the first attempt, or if no node has started in it, it is the job script's own log.
    """
    folder = run.latest_logs() if wanted.attempt is None else run.logs / str(wanted.attempt)
    job = Source(run.path / files.JOB_LOG, "job")
    if folder is None or not folder.is_dir():
        if wanted.attempt is not None:
            known = ", ".join(path.name for path in attempts(run)) or "none yet"
            raise UsageFault(f"{run.name} has no attempt {wanted.attempt}; it has: {known}")
        if wanted.default or not (wanted.ranks or wanted.nodes):
            return [job]
        raise UsageFault(
            f"{run.name} has not started yet: see why with: cookbook status {run.name}"
        )
    if wanted.default:
        first = Source(folder / "node_0.log", "node 0")
        return [first if first.path.exists() else job]
    names = _node_names(run, int(folder.name) if folder.name.isdigit() else None)
    ranks, nodes = _numbers(folder, "rank"), _numbers(folder, "node")
    sources = [job] if wanted.job else []
    for number in _picked(wanted.nodes, nodes, "node", names, run, folder):
        sources.append(Source(folder / f"node_{number}.log", _node(number, names)))
    per_node = run.asked["gpus_per_node"] or 1
    for number in _picked(wanted.ranks, ranks, "rank", [], run, folder):
        origin = f"{_node(number // per_node, names)} rank {number}"
        sources.append(Source(folder / f"rank_{number}.log", origin))
    return sources


def _node(number: int, names: list[str]) -> str:
    return names[number] if number < len(names) else f"node {number}"


def _node_names(run: Run, attempt: int | None) -> list[str]:
    """Return the names of an attempt's nodes, in the order of their logs."""
    for record in (*run.attempts, run.status):
        nodes = record.get("nodes")
        if record.get("attempt") == attempt and isinstance(nodes, list):
            return [str(name) for name in nodes]
    return []


def _numbers(folder: Path, kind: str) -> list[int]:
    names = (path.stem.removeprefix(f"{kind}_") for path in folder.glob(f"{kind}_*.log"))
    return sorted(int(name) for name in names if name.isdigit())


def _picked(
    asked: tuple[str, ...], there: list[int], kind: str, names: list[str], run: Run, folder: Path
) -> list[int]:
    """Return the numbers that texts such as 0-3,8 or all or a node's name mean, each once."""
    picked: dict[int, None] = {}
    for part in (part.strip() for text in asked for part in text.split(",")):
        given = _RANGE.match(part)
        if part == "all":
            numbers = there
        elif part in names:
            numbers = [names.index(part)]
        elif given:
            numbers = list(range(int(given[1]), int(given[2] or given[1]) + 1))[:100_000]
        else:
            known = f", a name ({', '.join(names)})" if names else ""
            raise UsageFault(f"--{kind} {part}: write a number, a range such as 0-3, all{known}")
        if missing := [number for number in numbers if number not in there]:
            have = ", ".join(f"{kind}_{number}.log" for number in there[:16])
            have += f" and {len(there) - 16} more" if len(there) > 16 else ""
            message = f"attempt {folder.name} of {run.name} has no {kind}_{missing[0]}.log"
            raise UsageFault(f"{message}; it has: {have or 'none yet'}")
        picked |= dict.fromkeys(numbers)
    return list(picked)


def attempts(run: Run) -> list[Path]:
    """Return the log folders of the attempts, the first one first."""
    try:
        folders = [path for path in run.logs.iterdir() if path.name.isdigit()]
    except OSError:
        return []
    return sorted(folders, key=lambda path: int(path.name))


def show(sources: list[Source], tail: int | None) -> Iterator[str]:
    """Yield the lines of logs, one log after another; of several each line has its origin.

    tail: only the last lines of each; None for all.
    """
    width = max(len(source.origin) for source in sources)
    for source in sources:
        mark = f"{source.origin:<{width}} | " if len(sources) > 1 else ""
        yield from (f"{mark}{line}" for line in read(source.path, _start(source, tail)))


def _start(source: Source, count: int | None) -> int:
    return 0 if count is None else tail_start(source.path, count)


def is_long(sources: list[Source]) -> bool:
    """Whether the logs are too long to be shown whole unless somebody asks for that."""
    return sum(source.size() for source in sources) > WHOLE_BYTES


def follow(run: Run, wanted: Wanted, tail: int | None = None) -> Iterator[str]:
    """Yield the lines of logs as they come, through retries and requeues, until the run has ended.

    Of what is there at the beginning, the last lines come: `tail`, or all if that is not much.
    """
    current: dict[Path, Growing] = {}
    origins: dict[Path, str] = {}
    folder, first = None, True
    next_question, ended = 0.0, False
    while True:
        sources = _choose_if_there(run, wanted)
        if sources and sources[-1].path.parent != folder:
            # First the last words of the attempt before.
            yield from _new_lines(current, origins, ended=True)
            current, folder = {}, sources[-1].path.parent
            yield f"==> {sources[0].path if len(sources) == 1 else folder} <=="
        fresh = [source for source in sources if source.path not in current]
        starts = [0] * len(fresh)
        if fresh and first:
            if tail is None and is_long(fresh):
                tail = TAIL_LINES
            starts = [_start(source, tail) for source in fresh]
            first = False
        for source, start in zip(fresh, starts, strict=True):
            current[source.path] = Growing(source.path, start)
        if len(sources) > 1:
            origins = {source.path: source.origin for source in sources}
        yield from _new_lines(current, origins, ended)
        if ended:
            return
        # After the end the files are read once more, for what was written while Slurm was asked.
        ended = own_state(run) in FINAL
        if not ended and time.monotonic() >= next_question:
            ended = state_of(run).ended
            next_question = time.monotonic() + _ASK_S
        if not ended:
            time.sleep(_LOOK_S)


def _new_lines(
    logs: dict[Path, Growing],
    origins: dict[Path, str],
    ended: bool,
) -> Iterator[str]:
    width = max(map(len, origins.values()), default=0)
    for path, log in logs.items():
        mark = f"{origins[path]:<{width}} | " if path in origins else ""
        while lines := log.new_lines(ended):
            yield from (f"{mark}{line}" for line in lines)


def _choose_if_there(run: Run, wanted: Wanted) -> list[Source]:
    """Like choose, but without logs that may still come."""
    try:
        sources = choose(run, wanted)
    except UsageFault:
        if wanted.attempt is not None and run.latest_logs() is not None:
            raise
        return []
    return [source for source in sources if source.path.exists()]


class Tail:
    """The lines that `cookbook watch` shows: the job script's, and rank 0's of each attempt."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._logs: dict[Path, Growing] = {}

    def new_lines(self) -> list[str]:
        """Return what has been written since the last call."""
        paths = [self._run.path / files.JOB_LOG]
        paths += [folder / "rank_0.log" for folder in attempts(self._run)]
        fresh: list[str] = []
        for path in paths:
            fresh += self._logs.setdefault(path, Growing(path)).new_lines()
        return fresh
