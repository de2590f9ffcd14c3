"""A rank that stands still: noticed, named, and started again."""

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from runspec import files
from runspec.progress import Heartbeat
from slurm.watchdog import Watch, laggards, stop_limit_s
from tests.conftest import SlurmCluster
from tests.faults.kit import SAVE_EVERY, SHORT, Undisturbed, ended, rank, trains
from tests.launcher.kit import Kit, report

BEAT = {"phase": "training", "step": 7, "steps": 3, "median_step_s": 2.0}


SAVING = {**BEAT, "phase": "saving", "longest_s": {"saving": 3.0}}
FIRST = {**BEAT, "steps": 1, "median_step_s": None}
STARTING = {"phase": "starting", "step": 0, "steps": 0, "median_step_s": None}


@pytest.mark.parametrize(
    ("timeout_s", "beat", "well", "hangs"),
    [
        (30, BEAT, 29, 30),
        (5, BEAT, 9.9, 10),  # five steps of 2 s
        # Of the first step nobody knows how long it takes.
        (5, FIRST, 599, 600),
        (900, FIRST, 899, 900),
        # A save that takes much longer than those before it.
        (5, SAVING, 14, 15),
        (60, SAVING, 59, 60),
        # What is no step may take its time, and a timeout of 0 waits for ever.
        (5, None, 3600, None),
        (5, {**BEAT, "phase": "saving"}, 3600, None),
        (5, {**SAVING, "phase": "validating"}, 3600, None),
        (5, {**BEAT, "phase": "exporting"}, 3600, None),
        (5, STARTING, 3600, None),
        (0, BEAT, 1e6, None),
    ],
)
def test_no_step_or_save_within_the_time_is_a_hang(timeout_s, beat, well, hangs):
    watch = Watch(timeout_s=timeout_s, stop_s=100)
    assert watch.look(beat, False, 0) is None and watch.look(beat, False, well) is None
    if hangs is not None:
        fault = watch.look(beat, False, hangs)
        assert fault and fault[0] == "Hang"


def test_a_step_begins_the_time_anew_and_a_slow_save_says_what_to_do():
    watch, next_step = Watch(timeout_s=30, stop_s=100), {**BEAT, "step": 8}
    for beat, now in ((BEAT, 0), (next_step, 31), (next_step, 60), (None, 60.5)):
        assert watch.look(beat, False, now) is None
    assert watch.look(next_step, False, 61)[0] == "Hang"
    watch = Watch(timeout_s=5, stop_s=100)
    assert watch.look(SAVING, False, 0) is None
    assert watch.look(SAVING, False, 20)[1] == (
        "saving has not ended for 20 s after step 7 (longest before 3.00 s): the storage hangs, "
        "or is slow; if a save may take that long, raise hang_timeout_s (5 s)"
    )


def test_the_heartbeat_tells_the_longest_save(tmp_path: Path):
    beat = Heartbeat(tmp_path)
    beat.step(1)
    for seconds in (0.02, 0.0):
        with beat.phase("saving"):
            time.sleep(seconds)
    told = json.loads((tmp_path / files.HEARTBEAT).read_text())
    assert told["phase"] == "training" and 0.02 <= told["longest_s"]["saving"] < 10


def test_ranks_that_do_not_stop_are_given_most_of_the_lead():
    assert stop_limit_s(300) == 240 and stop_limit_s(60) == 40
    watch = Watch(timeout_s=0, stop_s=40)
    assert [watch.look(BEAT, True, now) for now in (100, 139)] == [None, None]
    assert watch.look(BEAT, True, 141)[0] == "NotStopped"


def test_the_one_that_lags_is_silent_or_waits_for_nobody(tmp_path: Path):
    wait = 'Thread 0x1 (most recent call first):\n  File "/torch/distributed/x.py", line 1 in f\n'
    work = 'Thread 0x1 (most recent call first):\n  File "/data/batches.py", line 1 in next\n'
    for number, text in enumerate([wait, work, wait]):
        (tmp_path / f"stack_rank_{number}.log").write_text(f"n{number + 1} 4711\n{text}")
    assert laggards(tmp_path) == [(1, "n2", "is not waiting for the others")]
    (tmp_path / "stack_rank_2.log").write_text("n3 4711\n")
    assert laggards(tmp_path) == [(2, "n3", "does not answer")]


@pytest.fixture(scope="module")
def unstoppable(user: Kit, slurm: SlurmCluster, undisturbed: Undisturbed) -> Path:
    """A run that is asked to stop and cannot, which takes a while: another test runs meanwhile."""
    # The lead of a limit of 3 minutes is 45 s, of which the ranks have 30.
    job, run = user.submit(*SHORT, "resources.time=3", "hang_timeout_s=0")
    trains(run)
    os.kill(rank(run, 0), signal.SIGSTOP)
    slurm.run(["scancel", "--batch", "--signal=USR1", job])
    return run


def stop_in_a_step(run: Path, number: int) -> None:
    """Stop a rank where a hang is noticed: how long a first save takes is not known."""
    beat = run / files.LOGS / "0" / files.HEARTBEAT
    while True:
        os.kill(rank(run, number), signal.SIGSTOP)
        # Until the others wait for it.
        time.sleep(3)
        if files.peek(beat).get("phase") == "training":
            return
        os.kill(rank(run, number), signal.SIGCONT)
        time.sleep(0.5)


@pytest.mark.usefixtures("unstoppable")
@pytest.mark.parametrize(
    "where",
    [pytest.param([], marks=pytest.mark.long), pytest.param(["--local"], marks=pytest.mark.named)],
)
def test_a_stopped_rank_is_named_and_the_run_goes_on(user: Kit, undisturbed: Undisturbed, where):
    _, run = user.submit(*SHORT, "hang_timeout_s=8", *where)
    trains(run)
    stop_in_a_step(run, 1)
    first, second = ended(user, run, "COMPLETED")
    assert first["cause"] == "hang", report(run)
    host = socket.gethostname() if where else "n2"
    assert f"rank 1 on {host} does not answer" in first["message"], first
    assert "no step for" in first["message"]
    assert first["message"] in user.cookbook("status", run.name).stdout.replace("\n", " ")
    stacks = (run / "logs" / "0" / "stack_rank_0.log").read_text()
    assert "most recent call first" in stacks and "trainer/loop.py" in stacks
    assert second["cause"] == "finished" and second["job_id"] == first["job_id"]
    undisturbed.is_equalled_by(run)


@pytest.mark.long
def test_ranks_that_cannot_stop_before_the_limit_are_ended_and_requeued(
    user: Kit, unstoppable: Path, undisturbed: Undisturbed
):
    first, second = ended(user, unstoppable, "COMPLETED")
    assert first["cause"] == "time_limit", report(unstoppable)
    assert "did not stop within 30 s" in first["message"]
    assert "rank 0 on n1 does not answer" in first["message"]
    assert (first["restart_count"], second["restart_count"]) == (0, 1)
    assert first["checkpoint_step"] >= SAVE_EVERY
    undisturbed.is_equalled_by(unstoppable)
