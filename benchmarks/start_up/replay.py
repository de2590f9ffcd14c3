"""Starts of more nodes than this host can run: python -m benchmarks.start_up.replay RECORD

RECORD is what `python -m benchmarks.start_up --records` wrote of a real start on two nodes or more.
As many nodes as asked for repeat it at the same time, on one server (replay.c): the first node does
what n1 did, each other what n2 did, in the same order and with the same computing time between
operations, for which they sleep: nodes have cores of their own. Nodes wait for each other where
they did: for the job script, at the rendezvous, as ranks start, and at the first step. Needs gcc.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Operations before which a node waits for all others. The node's log gets its first line when the
# node has met the first one; torchrun starts the ranks; kind s is the first step.
BARRIERS: list[Callable[["Operation"], bool]] = [
    lambda each: each.kind == "w" and "/logs/0/node_" in each.path,
    lambda each: each.kind == "o" and "/logs/0/rank_" in each.path,
    lambda each: each.kind == "s",
]


class Operation(NamedTuple):
    """A line of a record: times in microseconds since the allocation."""

    kind: str
    size: int
    offset: int
    start: int
    end: int
    path: str


class Line(NamedTuple):
    """A line of a plan: see replay.c."""

    after: int
    gap: int
    kind: str
    size: int = 0
    offset: int = 0
    path: str = "-"


def read(file: Path) -> list[Operation]:
    """Operations of a node in the order in which they began."""
    found = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        kind, size, offset, start, end, path = line.split(" ", 5)
        found.append(Operation(kind, int(size), int(offset), int(start), int(end), path))
    return sorted(found, key=lambda each: each.start)


class Node:
    """What a node did, and of each operation the one that ended last before it began."""

    def __init__(self, record: list[Operation]) -> None:
        self.record = record
        self._order = sorted(range(len(record)), key=lambda k: record[k].end)
        self._ends = [record[k].end for k in self._order]
        self.before = [self.ended_before(each.start) for each in record]

    def ended_before(self, time: int) -> int:
        """The operation that ended last before a time, -1 if none did."""
        place = bisect_left(self._ends, time) - 1
        return self._order[place] if place >= 0 else -1

    def plan(
        self, arrivals: list[tuple[int, int]], released: dict[int, tuple[int, int]]
    ) -> list[Line]:
        """Its plan: the barriers, then the operations.

        Args:
            arrivals: for each barrier the operation that precedes it, and the time between them.
            released: of operations that follow a barrier its number, and the time after it.
        """
        shift = len(arrivals)
        lines = [
            Line(after + shift if after >= 0 else -1, gap, "b", number)
            for number, (after, gap) in enumerate(arrivals)
        ]
        for k, (each, after) in enumerate(zip(self.record, self.before, strict=True)):
            if each.kind == "s":
                continue
            gap = each.start - (self.record[after].end if after >= 0 else 0)
            follows = released.get(k, (after + shift if after >= 0 else -1, gap))
            lines.append(Line(*follows, each.kind, each.size, each.offset, each.path))
        return lines


def plans(first: Node, other: Node) -> tuple[list[Line], list[Line]]:
    """What the first node does, and what each other does."""
    # Barrier 0: the job script on the first node starts the others, which wait for nothing else.
    begin = other.record[0].start
    last = first.ended_before(begin)
    arrivals = [[(last, begin - first.record[last].end)], [(-1, 0)]]
    released: list[dict[int, tuple[int, int]]] = [{}, {}]
    for k, after in enumerate(other.before):
        if after < 0:
            released[1][k] = (0, other.record[k].start - begin)
    for number, follows in enumerate(BARRIERS, 1):
        found = []
        for node in (first, other):
            mark = next(k for k, each in enumerate(node.record) if follows(each))
            found.append((mark, node.record[mark].start, node.record[node.before[mark]].end))
        # The node with the shortest time in between did not wait, and computed.
        computed = min(start - end for _, start, end in found)
        release = max(end for _, _, end in found) + computed
        for k, (node, (mark, start, _)) in enumerate(zip((first, other), found, strict=True)):
            arrivals[k].append((node.before[mark], computed))
            released[k][mark] = (number, max(0, start - release))
    return first.plan(arrivals[0], released[0]), other.plan(arrivals[1], released[1])


def replay(record: Path, nodes: list[int], delay_us: int, rate: int) -> Iterator[dict[str, Any]]:
    """Repeat a start on so many nodes, one number after the other; what replay.c measured."""
    both = plans(*(Node(read(record / f"{name}.log")) for name in ("n1", "n2")))
    with tempfile.TemporaryDirectory() as name:
        program, files = Path(name, "replay"), [Path(name, "first"), Path(name, "other")]
        source = Path(__file__).with_suffix(".c")
        subprocess.run(["gcc", "-O2", "-o", program, source], check=True)
        for file, lines in zip(files, both, strict=True):
            file.write_text("".join(" ".join(map(str, line)) + "\n" for line in lines))
        for count in nodes:
            argv = [program, *files, *map(str, (count, delay_us, rate))]
            yield json.loads(subprocess.check_output(argv))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--delay-us", type=int, default=1000)
    parser.add_argument("--rate", type=int, default=0, help="operations per second; 0: any number")
    given = parser.parse_args()
    if missing := [name for name in ("n1.log", "n2.log") if not (given.record / name).is_file()]:
        parser.error(f"{given.record} has no {' and '.join(missing)}: give a folder in --records")
    if min(given.nodes) < 1:
        parser.error("--nodes must be 1 or more")
    for measured in replay(given.record, given.nodes, given.delay_us, given.rate):
        print(json.dumps(measured), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
