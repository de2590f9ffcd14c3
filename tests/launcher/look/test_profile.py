"""cookbook profile: traces whose answer is known by construction."""

import gzip
import json
from pathlib import Path

import pytest

from launcher.errors import RunFault
from launcher.look import profile, trace
from launcher.run.directory import Run
from tests.launcher.kit import Kit

NAME = "20260102-030405-demo-0a1b"


def event(cat: str, name: str, begin: float, end: float, tid: int = 1) -> dict:
    times = {"ts": 1e6 + begin, "dur": end - begin}
    return {"ph": "X", "cat": cat, "name": name, **times, "pid": 1, "tid": tid}


def gpu_step(at: float = 0.0, late: float = 0.0) -> list[dict]:
    """A step of 1000 us: 500 compute, 200 exposed communication, 100 copies, 50 data, 150 idle.

    late: so much longer is the first kernel, and so much shorter what it waits for others.
    """
    events = [
        event("user_annotation", f"ProfilerStep#{int(at)}", 0, 1000),
        event("gpu_user_annotation", f"ProfilerStep#{int(at)}", -300, 1400),
        event("kernel", "gemm", 0, 300 + late, tid=7),
        event("kernel", "ncclDevKernel_AllGather", 250 + late, 500, tid=8),
        event("kernel", "gemm", 500, 700, tid=7),
        # Two streams at once are no more time than one.
        event("kernel", "softmax", 550, 650, tid=9),
        event("kernel", "ncclDevKernel_ReduceScatter", 600, 700, tid=8),
        event("gpu_memcpy", "Memcpy HtoD", 700, 800, tid=7),
        event("user_annotation", "enumerate(DataLoader)#_Next", 750, 850),
        event("cpu_op", "aten::linear", 100, 400),
        event("cpu_op", "aten::mm", 200, 350),
        {"ph": "i", "name": "Iteration Start", "ts": 1.0},
    ]
    return [{**each, "ts": each["ts"] + at} for each in events]


def written(root: Path, **ranks: list[dict]) -> Run:
    run = Run(root / "runs" / NAME)
    (run.path / "profile").mkdir(parents=True)
    run.write("submission.json", {"recipe": "demo", "asked": {"nodes": 2, "gpus_per_node": 2}})
    for name, events in ranks.items():
        text = json.dumps({"traceEvents": events, "host_name": "n1"})
        (run.path / f"profile/{name}.100.pt.trace.json").write_text(text)
    return run


def shares(found: trace.RankTime) -> list[float]:
    parts = ("compute", "communication", "copies", "data loading", "idle")
    assert sum(found.parts.values()) == pytest.approx(found.total)
    return [round(1e6 * found.parts[part], 3) for part in parts]


def test_a_gpus_time_is_what_it_was_made_of():
    found = trace.measured([*gpu_step(), *gpu_step(1000)], 0)
    assert (found.steps, found.on_gpu, found.total) == (2, True, pytest.approx(2000e-6))
    assert shares(found) == [1000, 400, 200, 100, 300]
    # 250 + 100 of each step, of which the second hundred and a first fifty are hidden.
    assert found.communication == pytest.approx(700e-6)


def test_a_cpus_time_is_what_it_was_made_of():
    events = [
        event("user_annotation", "ProfilerStep#1", 0, 1000),
        event("user_annotation", "enumerate(DataLoader)#_Next", 0, 100),
        event("cpu_op", "aten::stack", 20, 80),
        event("cpu_op", "aten::mm", 100, 500),
        event("cpu_op", "aten::copy_", 300, 350),
        # A node of autograd whose hook waits for a collective.
        event("cpu_op", "RegisterPostBackwardFunctionBackward", 500, 800),
        event("cpu_op", "c10d::_allgather_base_", 500, 510),
        event("user_annotation", "gloo:all_gather", 400, 700, tid=2),
        event("cpu_op", "aten::view", 650, 690, tid=2),
    ]
    found = trace.measured(events, 0)
    assert shares(found) == [350, 200, 50, 100, 300]
    assert (found.on_gpu, found.communication) == (False, pytest.approx(300e-6))


def test_the_slowest_rank_is_the_one_that_waits_least(tmp_path):
    run = written(tmp_path, rank_0=gpu_step(), rank_1=gpu_step(late=100), rank_2=gpu_step())
    found, faults = profile.ranks(run)
    assert not faults and [each.rank for each in found] == [0, 1, 2]
    rank, seconds = profile.slowest(found)
    assert (rank.rank, seconds) == (1, pytest.approx(100e-6))
    table = ["----", "Name  Self CPU", "----", "aten::mm", "aten::add", "aten::view", "----"]
    (run.path / "profile/summary_rank_0.txt").write_text("\n".join(table) + "\n")
    told = list(profile.lines(run, found, 2))
    assert told[5].startswith("operators of rank 0, by torch.profiler") and told[6:11] == table[:5]
    assert told[0] == f"{NAME}: 1 step, traced on 3 of 4 ranks (GPU)"
    assert any(line.split()[:4] == ["1", "1.0", "ms", "60.0"] for line in told), told
    assert told[-1] == (
        "slowest    rank 1: 0.1 ms per step (10.0 %) more than the median of the others"
    )


def test_a_trace_that_is_corrupt_is_named_and_passed_over(tmp_path, user: Kit):
    run = written(tmp_path, rank_0=gpu_step(), rank_1=gpu_step())
    folder = run.path / "profile"
    whole = (folder / "rank_1.100.pt.trace.json").read_bytes()
    (folder / "rank_1.200.pt.trace.json").write_bytes(whole[:500])
    (folder / "rank_2.200.pt.trace.json.gz").write_bytes(gzip.compress(whole))
    (folder / "rank_3.200.pt.trace.json").write_text('{"traceEvents": [{"ph": "X"}]}')
    (folder / "rank_x.json").write_text("{}")
    user = Kit({**user.env, "COOKBOOK_ROOT": str(tmp_path)}, tmp_path)
    done = user.cookbook("profile", NAME)
    assert done.returncode == 0, done.stderr
    assert [line[:2] for line in done.stdout.splitlines()[2:4]] == ["0 ", "2 "]
    assert f"skipped: {folder / 'rank_1.200.pt.trace.json'} is not a complete trace" in done.stderr
    assert (
        f"{folder / 'rank_3.200.pt.trace.json'} contains events in an unknown format" in done.stderr
    )
    for path in folder.glob("rank_[02]*"):
        path.unlink()
    with pytest.raises(RunFault, match="not a complete trace"):
        profile.ranks(run)
