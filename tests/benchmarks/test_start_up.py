"""benchmarks.start_up.replay: nodes repeat a record in its order, and wait for each other."""

import shutil
from pathlib import Path

import pytest

from benchmarks.start_up.replay import Line, Node, Operation, plans, replay

needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")


def node(name: str, times: list[tuple[int, int]], met: int, ranks: int, end: int) -> Node:
    """A node whose operations have these times, two of which follow barriers."""
    paths = {met: f"/run/logs/0/node_{name}.log", ranks: f"/run/logs/0/rank_{name}.log"}
    kinds = {met: "w", ranks: "o"}
    record = [
        Operation(kinds.get(k, "l"), 0, 0, *time, paths.get(k, "/tmp"))
        for k, time in enumerate(times)
    ]
    return Node([*record, Operation("s", 0, 0, end, end, "-")])


def test_an_operation_follows_the_one_that_ended_last() -> None:
    """Two at a time go on at a time, and the wait at a barrier is not computing."""
    first = node("0", [(100, 110), (150, 160), (155, 190), (200, 210), (300, 310)], 3, 4, 400)
    other = node("1", [(120, 130), (135, 145), (200, 205), (305, 310)], 2, 3, 390)
    lines, others = plans(first, other)
    # The job script has started the other node 10 us after its first operation.
    assert lines[0] == Line(4, 10, "b", 0) and others[0] == Line(-1, 0, "b", 0)
    assert [(line.after, line.gap) for line in lines[4:]] == [
        (-1, 100),
        (4, 40),
        (4, 45),
        # 10 us after the third, when the other had waited for 45.
        (1, 0),
        (2, 0),
    ]
    assert [(line.after, line.gap) for line in others[4:]] == [(0, 0), (4, 5), (1, 0), (2, 5)]
    assert lines[1] == Line(6, 10, "b", 1) and others[1] == Line(5, 10, "b", 1)
    # At the first step, which the other reached later.
    assert [line[:2] for line in (lines[3], others[3])] == [(8, 80), (7, 80)]


def write(folder: Path, operations: int) -> Path:
    """A record of two nodes with so many operations each, of 1 ms and 1 ms apart."""
    for number, name in enumerate(("n1", "n2")):
        times = [(2000 * k, 2000 * k + 1000) for k in range(1 + number, operations + 1 + number)]
        made = node(str(number), times, operations // 3, operations // 2, times[-1][1] + 1000)
        text = "".join(" ".join(map(str, each)) + "\n" for each in made.record)
        (folder / f"{name}.log").write_text(text)
    return folder


@needs_gcc
def test_nodes_ask_one_server_that_answers_late_or_has_a_rate(tmp_path: Path) -> None:
    record = write(tmp_path, 60)
    few, many = replay(record, [2, 16], 1000, 0)
    # 1 ms each, and 1 ms before each and before the first step.
    for measured, nodes in ((few, 2), (many, 16)):
        assert measured["operations"] == 60 * nodes
        assert measured["barriers_s"][-1] >= 0.12 and measured["mean_ms"] >= 1
        assert measured["barriers_s"] == sorted(measured["barriers_s"])
    (bounded,) = replay(record, [16], 1000, 2000)
    assert bounded["barriers_s"][-1] > 960 / 2000
    (slow,) = replay(record, [2], 5000, 0)
    assert slow["barriers_s"][-1] >= 0.36
