"""The job's records: whose they are, what broken ones cost, and their last word on a full disk."""

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest

from runspec.files import read_json_lines
from slurm import job_log, records
from slurm.faults import first_error, on_nodes, slurm_errors

HEAD = "127.0.0.1"


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "11")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "west")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    monkeypatch.setenv("RANKS_PER_NODE", "1")
    (tmp_path / "logs").mkdir()
    return tmp_path


def status(run_dir: Path) -> dict:
    return json.loads((run_dir / "status.json").read_text())


def lines(run_dir: Path) -> list[dict]:
    return read_json_lines(run_dir / "attempts.jsonl")


# Whose they are -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "restarts"), [("12", "0"), ("11", "1")], ids=["another job", "the job requeued"]
)
def test_an_older_job_does_not_overwrite_a_newer_attempt(run_dir, monkeypatch, job, restarts):
    records.begin(run_dir, ["n1"])
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    assert records.begin(run_dir, ["n2"], exists=lambda job: False) == 1
    newer, told = status(run_dir), lines(run_dir)
    monkeypatch.setenv("SLURM_JOB_ID", "11")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert records.end(run_dir, 0, 1, max_retries=3) == "superseded"
    if job == "11":
        with pytest.raises(records.Follows) as follows:
            records.begin(run_dir, ["n1"])
        assert follows.value.what == "superseded"
    records.between(run_dir, "Slurm refused", state="FAILED")
    records.between(run_dir, "waiting for the controller")
    assert status(run_dir) == newer and lines(run_dir) == told


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "\0\0"])
def test_a_broken_status_does_not_keep_a_job_from_its_end(run_dir, text):
    records.begin(run_dir, ["n1"])
    (run_dir / "status.json").write_text(text)
    (run_dir / "progress.json").write_text(text)
    (run_dir / "cancelled.json").write_text(text)
    assert records.end(run_dir, 0, 1, max_retries=3) == "run"
    assert status(run_dir)["attempt"] == 0 and len(lines(run_dir)) == 1
    (run_dir / "status.json").write_text(text)
    assert records.begin(run_dir, ["n1"]) == 1, "a number is given once"


# Attempts without a word --------------------------------------------------------------------


def test_attempts_that_end_without_a_word_are_counted(run_dir, monkeypatch):
    for number in range(3):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(number))
        assert records.begin(run_dir, ["n1"], max_retries=2) == number
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    with pytest.raises(records.Follows, match="3 attempts saved nothing new"):
        records.begin(run_dir, ["n1"], max_retries=2)
    assert status(run_dir)["state"] == "FAILED"
    assert "cookbook resume" in status(run_dir)["message"]
    assert [line["cause"] for line in lines(run_dir)] == ["lost"] * 3


def test_a_preemption_is_no_fault_of_the_run_and_a_resumed_job_counts_anew(run_dir, monkeypatch):
    for number in range(4):
        records.begin(run_dir, ["n1"], max_retries=1)
        records.end(run_dir, number, 143, max_retries=1, job_state="PREEMPTED")
    records.begin(run_dir, ["n1"], max_retries=1)
    assert records.end(run_dir, 4, 1, max_retries=1) == "run"
    records.begin(run_dir, ["n1"], max_retries=1)
    assert records.end(run_dir, 5, 1, max_retries=1) == "failed"
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    records.begin(run_dir, ["n1"], max_retries=1)
    assert records.end(run_dir, 6, 1, max_retries=1) == "run"


# Nodes --------------------------------------------------------------------------------------


def killed(run_dir: Path, number: int, rank: int) -> None:
    error = {"rank": rank, "host": "localhost", "time": 1, "type": "Killed", "message": "SIGKILL"}
    (run_dir / "logs" / str(number) / "error_rank.json").write_text(json.dumps(error))


def test_a_node_that_fails_twice_in_a_row_is_left_out(run_dir):
    hosts = ["n1", "n2"]
    assert records.nodes_to_leave(run_dir, hosts) == []
    for number, rank in enumerate([1, 0, 1, 1]):
        records.begin(run_dir, hosts)
        killed(run_dir, number, rank)
        records.end(run_dir, number, 1, max_retries=9)
        assert records.nodes_to_leave(run_dir, hosts) == (["n2"] if number == 3 else [])
    assert lines(run_dir)[-1]["node"] == "n2"
    assert lines(run_dir)[-1]["message"].startswith("rank 1 on n2: Killed")
    assert records.nodes_to_leave(run_dir, ["n1", "n2", "n3"], ["n3"]) == ["n2", "n3"]


def test_a_new_allocation_is_tried_once(run_dir, monkeypatch):
    for number in range(2):
        records.begin(run_dir, ["n1"])
        killed(run_dir, number, 0)
        records.end(run_dir, number, 1, max_retries=9)
    assert records.nodes_to_leave(run_dir, ["n1"]) == ["n1"]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert records.nodes_to_leave(run_dir, ["n1"]) == []


# Slurm's words ------------------------------------------------------------------------------

STAMP = "CANCELLED AT 2026-11-22T13:00:53"


@pytest.mark.parametrize(
    ("said", "state"),
    [
        # Slurm 26.05
        (
            f"[{STAMP[13:]}.351] error: *** JOB 11 ON n1 {STAMP} DUE to SIGNAL Terminated ***",
            "CANCELLED",
        ),
        (f"error: *** JOB 11 ON n1 {STAMP} DUE to SIGNAL User defined signal 2 ***", None),
        (f"slurmstepd: error: *** JOB 11 ON n1 {STAMP} DUE TO TIME LIMIT ***", "TIMEOUT"),
        (f"slurmstepd: error: *** JOB 11 ON n1 {STAMP} DUE TO PREEMPTION ***", "PREEMPTED"),
        (f"slurmstepd: error: *** JOB 11 ON n1 {STAMP} DUE TO NODE FAILURE ***", "NODE_FAIL"),
        (f"*** JOB 11 ON n1 {STAMP} DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***", "NODE_FAIL"),
        (f"slurmstepd-n1: error: *** JOB 11 ON n1 {STAMP} DUE TO JOB REQUEUE ***", "REQUEUED"),
        (f"slurmstepd: error: *** JOB 11 ON n1 {STAMP} ***", "CANCELLED"),
        (f"slurmstepd: error: *** STEP 11.0 ON n1 {STAMP} ***", None),
        (f"slurmstepd: error: *** JOB 111 ON n1 {STAMP} ***", None),
        ("", None),
    ],
)
def test_slurms_line_tells_why_a_job_ends(said, state):
    assert job_log.ended(f"attempt 0 on n1\n{said}\nterminated\n", "11") == state


def test_only_what_was_said_in_this_attempt_counts(run_dir):
    log = run_dir / "logs" / "job.log"
    log.write_text(f"slurmstepd: error: *** JOB 11 ON n1 {STAMP} DUE TO PREEMPTION ***\n")
    records.begin(run_dir, ["n1"])
    with log.open("a") as file:
        file.write(f"slurmstepd: error: *** JOB 11 ON n1 {STAMP} DUE TO TIME LIMIT ***\n")
    records.end(run_dir, 0, 143, job_state="COMPLETING")
    assert (status(run_dir)["state"], status(run_dir)["cause"]) == ("INTERRUPTED", "time_limit")


def test_a_killed_torchrun_is_the_first_task_that_srun_reports(run_dir):
    text = "srun: error: n2: task 1: Killed\nsrun: error: n1: task 0: Terminated\n"
    (error,) = slurm_errors(text, run_dir)
    assert (error["host"], error["type"]) == ("n2", "Killed")
    segv = "srun: error: n1: task 0: Segmentation fault (core dumped)\n"
    (error_of_n1,) = slurm_errors(segv + "srun: error: n2: task 1: Terminated\n", run_dir)
    assert (error_of_n1["host"], error_of_n1["type"]) == ("n1", "Killed")
    assert "(task 0) was killed by SIGSEGV" in error_of_n1["message"]
    broken = {"rank": 1, "host": "n2", "time": 1.0, "type": "NetworkError", "message": "reset"}
    assert first_error([broken, error_of_n1]) == error_of_n1
    # One that was killed only after another had ended explains nothing.
    after = "srun: error: n1: task 0: Exited with exit code 1\nsrun: error: n2: task 1: Killed\n"
    assert slurm_errors(after, run_dir) == []
    peer = {"rank": 0, "host": "localhost", "time": 1.0, "type": "RuntimeError"}
    assert first_error([*on_nodes([peer], ["n1", "n2"], 1), error]) == error


def test_srun_without_a_controller_is_no_attempt_of_the_run(run_dir):
    log = run_dir / "logs" / "job.log"
    for number in range(3):
        records.begin(run_dir, ["n1"], max_retries=1)
        with log.open("a") as file:
            file.write("srun: error: Unable to confirm allocation for job 11: Unable to contact ")
            file.write("slurm controller (connect failure)\n")
        assert records.end(run_dir, number, 1, max_retries=1) == "run"
    assert status(run_dir)["cause"] == "controller"


# A full disk --------------------------------------------------------------------------------


@pytest.fixture
def tiny_disk(tmp_path):
    """A filesystem of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mounted, capture_output=True).returncode:
        pytest.skip("only root can mount a filesystem")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> None:
    with open(folder / "filler", "ab", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError as error:
                assert error.errno == errno.ENOSPC


def test_a_disk_that_is_full_to_the_last_byte_leaves_room_for_the_last_word(
    tiny_disk, monkeypatch, capsys
):
    monkeypatch.setenv("SLURM_JOB_ID", "11")
    (tiny_disk / "logs").mkdir()
    records.begin(tiny_disk, ["n1"])
    fill(tiny_disk)
    (tiny_disk / "logs" / "0" / "x").touch()  # an empty file needs no block
    assert records.end(tiny_disk, 0, 1, max_retries=3) == "failed"
    told = status(tiny_disk)
    assert (told["state"], told["cause"]) == ("FAILED", "no_space")
    assert "no space left on the filesystem of" in told["message"]
    # What has no block yet gets none.
    assert lines(tiny_disk) == [] and "has no line of attempt 0" in capsys.readouterr().out
