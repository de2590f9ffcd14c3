"""cookbook logs: one log or several, followed to the end, and far too long ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.errors import UsageFault
from launcher.look import logs as log_files
from launcher.look.first_error import first_error
from launcher.look.lines import Growing, tail_start
from launcher.look.logs import Wanted, choose, show
from launcher.run.directory import Run
from tests.launcher.kit import Kit

BEGAN = 1795360650.0  # 2026-11-22 15:17:30 UTC


def made(root: Path, state: str = "RUNNING", attempts: int = 1) -> Run:
    """A run of 2 x 2 ranks, with the logs of one attempt or more."""
    run = Run(root / "runs" / "20261122-151728-demo-0a1b")
    run.path.mkdir(parents=True)
    asked = {"nodes": 2, "gpus_per_node": 2}
    run.write("submission.json", {"recipe": "demo", "jobs": [{"job_id": "7"}], "asked": asked})
    record = {"attempt": attempts - 1, "nodes": ["n1", "n2"], "started": BEGAN}
    run.write("status.json", {"job_id": "7", "state": state, **record})
    for attempt in range(attempts):
        add_attempt(run, attempt)
    (run.logs / "job.log").write_text("15:17:30 cookbook: attempt 0 on n1, n2\nsrun: an error\n")
    return run


def add_attempt(run: Run, attempt: int) -> Path:
    folder = run.logs / str(attempt)
    folder.mkdir(parents=True)
    for node in range(2):
        (folder / f"node_{node}.log").write_text(f"[{node}] of node {node}\n")
    for rank in range(4):
        (folder / f"rank_{rank}.log").write_text("")
    latest = run.logs / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(str(attempt))
    return folder


def test_several_logs_come_one_after_another_with_their_origin(tmp_path):
    run = made(tmp_path)
    (run.logs / "0/rank_0.log").write_text("model x\nstep 1/9 loss\nsaved\n")
    (run.logs / "0/rank_3.log").write_text("step 1/9 loss\nTraceback\n")
    sources = choose(run, Wanted(ranks=("0", "3"), job=True))
    assert list(show(sources, None)) == [
        "job       | 15:17:30 cookbook: attempt 0 on n1, n2",
        "job       | srun: an error",
        "n1 rank 0 | model x",
        "n1 rank 0 | step 1/9 loss",
        "n1 rank 0 | saved",
        "n2 rank 3 | step 1/9 loss",
        "n2 rank 3 | Traceback",
    ]
    assert list(show(sources, 1)) == [
        "job       | srun: an error",
        "n1 rank 0 | saved",
        "n2 rank 3 | Traceback",
    ]


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (Wanted(), ["node_0"]),
        (Wanted(ranks=("1-2",)), ["rank_1", "rank_2"]),
        (Wanted(ranks=("all",)), ["rank_0", "rank_1", "rank_2", "rank_3"]),
        (Wanted(ranks=("3,0",)), ["rank_3", "rank_0"]),
        (Wanted(nodes=("n2", "0")), ["node_1", "node_0"]),
        (Wanted(nodes=("1",), ranks=("0",), job=True), ["job", "node_1", "rank_0"]),
    ],
)
def test_any_rank_on_any_node(tmp_path, wanted, names):
    assert [source.path.stem for source in choose(made(tmp_path), wanted)] == names


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Wanted(ranks=("4",)), "has no rank_4.log; it has: rank_0.log, rank_1.log"),
        (Wanted(nodes=("n9",)), "--node n9: write a number, a range such as 0-3, all, a name"),
        (Wanted(attempt=3), "has no attempt 3; it has: 0"),
    ],
)
def test_what_is_not_there(tmp_path, wanted, words):
    with pytest.raises(UsageFault, match=words):
        choose(made(tmp_path), wanted)


def test_the_last_lines_of_a_file(tmp_path):
    path = tmp_path / "log"
    for text in ("", "a", "a\n", "a\nb", "a\nb\n", "\n\n", "a\n" * 700_000):
        path.write_text(text)
        for count in (1, 2, 3):
            assert (
                path.read_text()[tail_start(path, count) :].splitlines()
                == (text.splitlines()[-count:])
            )
        assert text[tail_start(path, 0) :] == text.rpartition("\n")[2]


def test_a_line_that_never_ends_is_shown_when_nobody_writes_any_more(tmp_path):
    path = tmp_path / "log"
    path.write_text("one\ntwo")
    log = Growing(path)
    assert log.new_lines() == ["one"] and log.new_lines() == []
    assert log.new_lines(ended=True) == ["two"]
    path.write_text("new\n")  # emptied and written anew
    assert log.new_lines() == ["new"]


def test_follow_goes_through_attempts_to_the_end(tmp_path, monkeypatch):
    """Each line is written when the one before it was shown."""
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm to ask
    run = made(tmp_path)

    def write(rank: int, text: str, attempt: int = 0) -> None:
        with (run.logs / str(attempt) / f"rank_{rank}.log").open("a") as log:
            log.write(f"{text}\n")

    def requeued() -> None:
        run.write("status.json", {**run.status, "state": "REQUEUED"})
        add_attempt(run, 1)
        run.write("status.json", {**run.status, "state": "RUNNING", "attempt": 1})
        write(3, "third", attempt=1)

    job = {
        f"==> {run.logs / '0'} <==": lambda: write(0, "first"),
        "n1 rank 0 | first": lambda: write(3, "second"),
        "n2 rank 3 | second": requeued,
        f"==> {run.logs / '1'} <==": lambda: None,
        "n2 rank 3 | third": lambda: write(0, "last", attempt=1),
        "n1 rank 0 | last": lambda: run.write("status.json", {**run.status, "state": "COMPLETED"}),
    }
    lines = []
    for line in log_files.follow(run, Wanted(ranks=("0", "3"))):
        lines.append(line)
        job[line]()
    assert lines == list(job)


def test_half_a_gigabyte_is_never_read_whole(tmp_path, user: Kit):
    """With 300 MB of address space, which the command alone fills to two thirds."""
    run = made(tmp_path, "COMPLETED")
    log = run.logs / "0/rank_1.log"
    with log.open("r+b") as file:
        file.truncate(500 * 2**20)  # a line of zeros that takes no disk
        file.seek(0, 2)
        file.write(b"\n" + b"".join(b"line %d\n" % k for k in range(5000)))

    def shown(*options: str) -> list[str]:
        argv = [sys.executable, "-m", "launcher", "logs", run.name, "--rank", "1", *options]
        done = subprocess.run(
            ["bash", "-c", 'ulimit -v 300000; exec "$@"', "-", *argv],
            env={**user.env, "COOKBOOK_ROOT": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.splitlines()

    assert shown("--tail", "2") == ["line 4998", "line 4999"]
    assert shown()[0] == "line 4000" and len(shown("--rank", "0", "--tail", "3000")) == 3000
    assert shown("-f", "--tail", "1")[1:] == ["line 4999"]


def test_the_first_error_is_what_the_job_recorded(tmp_path):
    run = made(tmp_path, attempts=2)
    assert first_error(run) is None
    verdict = {"attempt": 1, "cause": "killed", "message": "rank 3 on n2: Killed: by SIGKILL"}
    verdict |= {"nodes": ["n1", "n2"], "node": "n2", "ended": 5.0}
    (run.path / "attempts.jsonl").write_text(json.dumps(verdict) + "\n")
    message = f"attempt 1 of {run.name} failed: killed: rank 3 on n2: Killed: by SIGKILL"
    # The rank wrote nothing.
    assert first_error(run) == (message, run.logs / "1/node_1.log")
    (run.logs / "1/rank_3.log").write_text("its words\n")
    assert first_error(run) == (message, run.logs / "1/rank_3.log")
    assert first_error(run, 0) is None
