"""What the job script does after an attempt: the policy, and the records it leaves."""

import errno
import json
import subprocess
import sys

import pytest

from plugins.serve import server
from runspec.files import DamagedFile, read_json_lines
from slurm import faults, records, retry
from slurm.retry import AttemptEnd, decide
from trainer.errors import (
    ConfigError,
    NonFiniteLossError,
    StorageError,
    write_error_record,
)

CRASH = {"rank": 3, "host": "n2", "time": 5.0, "type": "RuntimeError", "message": "boom"}
CRASH |= {"permanent": False}
BROKEN_PEER = {**CRASH, "rank": 0, "time": 4.0, "message": "Connection reset by peer"}
KILLED = {**CRASH, "rank": 2, "time": 6.0, "type": "Killed", "message": "killed by SIGKILL"}
NO_MEMORY = {**CRASH, "rank": None, "type": "OutOfMemory", "message": "oom-kill"}
CUDA_MEMORY = {**CRASH, "message": "CUDA error: out of memory"}
GPU_MEMORY = {**CRASH, "type": "OutOfMemoryError", "permanent": True}
NO_PACKAGE = {**CRASH, "type": "ImportError", "message": "cannot import name 'x' from 'y'"}
NO_LIBRARY = "libcuda.so.1: cannot open shared object file: No such file or directory"
CONFIG = {**CRASH, "rank": 1, "time": 9.0, "type": "ConfigError", "message": "no such file"}
CONFIG |= {"permanent": True}

STOPPED = {"progress": {"state": "stopped"}}


def judged(**changes):
    given = {"exit_code": 1, "progress": {"state": "running"}, "errors": [], "fruitless": 1}
    given |= dict.fromkeys(("stop_asked", "cancelled"), False)
    given |= {"job_state": None, "can_requeue": True, "max_retries": 3}
    verdict = decide(AttemptEnd(**{**given, **changes}))
    return verdict.state, verdict.next, verdict.cause


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"exit_code": 0, "progress": {"state": "finished"}}, "COMPLETED finished finished"),
        # A run of a sweep that has no memory has its result.
        ({"errors": [NO_MEMORY], "memory_is_result": True}, "FAILED failed out_of_memory"),
        ({"errors": [CUDA_MEMORY]}, "RETRYING run out_of_memory"),
        # An entry of torchtune's own writes no progress: its exit status is all there is.
        ({"exit_code": 0, "progress": {}}, "COMPLETED finished finished"),
        ({"errors": [CRASH]}, "RETRYING run error"),
        ({"errors": [BROKEN_PEER, KILLED]}, "RETRYING run killed"),
        ({"errors": [CRASH, CONFIG]}, "FAILED failed user_error"),
        ({"errors": [CRASH], "fruitless": 4}, "FAILED failed error"),
        ({"errors": []}, "RETRYING run killed"),
        ({"exit_code": 0, **STOPPED, "stop_asked": True}, "REQUEUED requeue time_limit"),
        ({**STOPPED, "stop_asked": True, "can_requeue": False}, "RETRYING run time_limit"),
        # Slurm asked them itself, as for a preemption with a time of grace.
        ({"exit_code": 0, **STOPPED}, "REQUEUED requeue stopped"),
        # torchrun was killed, and the other ranks stopped in order.
        ({"exit_code": 137, **STOPPED}, "RETRYING run killed"),
        ({"errors": [NO_MEMORY, KILLED]}, "RETRYING run out_of_memory"),
        ({"errors": [NO_MEMORY], "cause_before": "out_of_memory"}, "FAILED failed out_of_memory"),
        ({"errors": [GPU_MEMORY]}, "FAILED failed out_of_memory"),
        # No retry installs a package; if an attempt before found it, a node's files are missing.
        ({"errors": [NO_PACKAGE]}, "FAILED failed missing_package"),
        ({"errors": [NO_PACKAGE], "cause_before": "killed"}, "RETRYING run missing_package"),
        (
            {"errors": [NO_PACKAGE], "cause_before": "missing_package"},
            "FAILED failed missing_package",
        ),
        # Another node may have the library.
        ({"errors": [{**NO_PACKAGE, "message": NO_LIBRARY}]}, "RETRYING run error"),
        ({"not_started": "Unable to contact", "fruitless": 9}, "RETRYING run controller"),
        ({"not_started": "Unable", "cause_before": "controller"}, "RETRYING run killed"),
        ({"stop_asked": True, "errors": [CRASH]}, "REQUEUED requeue error"),
        ({"stop_asked": True, "fruitless": 4}, "FAILED failed time_limit"),
        ({"cancelled": True, "errors": [KILLED]}, "CANCELLED failed cancelled"),
        ({"job_state": "CANCELLED"}, "CANCELLED failed cancelled"),
        ({"job_state": "TIMEOUT"}, "INTERRUPTED failed time_limit"),
        ({"job_state": "PREEMPTED"}, "INTERRUPTED failed preempted"),
        ({"job_state": "NODE_FAIL"}, "INTERRUPTED failed node_failure"),
        ({"job_state": "REQUEUED"}, "INTERRUPTED failed requeued"),
        # Stopped by the first signal of a preemption, judged before the state changed.
        ({"exit_code": 0, "progress": {"state": "none"}}, "RETRYING run killed"),
    ],
)
def test_the_verdict(changes, expected):
    assert judged(**changes) == tuple(expected.split())


@pytest.mark.parametrize(
    ("kind", "message", "name"),
    [
        ("ModuleNotFoundError", "No module named 'a.b'", "a"),
        ("importlib.metadata.PackageNotFoundError", "No package metadata was found for a-b", "a-b"),
        ("ImportError", "Llama requires the SentencePiece library but", "SentencePiece"),
        ("ValueError", "PEFT is missing. Make sure to run `pip install -U peft`. (u.py:2)", "peft"),
        ("ImportError", "cannot import name 'x' from 'y'", None),
    ],
)
def test_a_missing_package_is_named_with_what_adds_it(monkeypatch, kind, message, name):
    monkeypatch.setenv("VENV", "/v")
    end = AttemptEnd(1, {}, [{**CRASH, "type": kind, "message": message}], max_retries=3)
    verdict = decide(end)
    assert (verdict.state, verdict.cause) == ("FAILED", "missing_package")
    add = f"environment /v lacks it: add {name} to environment.dependencies in the recipe, or "
    add += f"/v/bin/python -m pip install {name}"
    assert verdict.message.endswith(add if name else "change environment.dependencies")


def test_the_named_error_is_the_one_that_the_others_follow_from():
    assert faults.first_error([BROKEN_PEER, CRASH]) == BROKEN_PEER
    assert faults.first_error([BROKEN_PEER, KILLED]) == KILLED
    assert faults.first_error([KILLED, BROKEN_PEER, CONFIG]) == CONFIG
    reported = {**CONFIG, "type": "PeerError", "rank": 0, "time": CONFIG["time"] - 1}
    assert faults.first_error([reported, CONFIG]) == CONFIG
    assert faults.first_error([]) is None
    assert faults.describe(CONFIG) == "rank 1 on n2: ConfigError: no such file"


class DistBackendError(RuntimeError):
    """Has the name of torch.distributed's, which is in C++."""


def told_to_the_user(error):
    """As the trainer turns what it cannot read into a fault of the config."""
    try:
        try:
            raise error
        except OSError:
            raise ConfigError("dataset: cannot be opened") from None
    except ConfigError as fault:
        return fault


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/{}] {}"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "no_space"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "quota"),
        (OSError(errno.EIO, "Input/output error"), "storage"),
        (StorageError("step_2 could not be read for 120 s"), "storage"),
        (told_to_the_user(OSError(errno.ESTALE, "Stale file handle", "model.json")), "storage"),
        (told_to_the_user(FileNotFoundError(errno.ENOENT, "No such file")), "user_error"),
        (told_to_the_user(OSError(errno.ENOSPC, "No space left on device")), "no_space"),
        (DamagedFile("config.json does not hold JSON"), "user_error"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "killed"),
        (MemoryError(), "out_of_memory"),
        (ConfigError("model.path: no such folder"), "user_error"),
        (NonFiniteLossError("the loss is NaN"), "non_finite_loss"),
        (RuntimeError(GLOO.format("pair.cc:537", "Connection reset by peer")), "network"),
        (RuntimeError(GLOO.format("unbound_buffer.cc:78", "Timed out waiting")), "network_timeout"),
        (DistBackendError("NCCL error ... ncclRemoteError"), "network"),
        (RuntimeError("a shape is wrong"), "error"),
    ],
)
def test_a_ranks_fault_has_its_cause(run_dir, error, cause):
    records.begin(run_dir, ["n1"])
    write_error_record(run_dir / "logs" / "0", 0, error)
    records.end(run_dir, 0, 1)
    assert read_json_lines(run_dir / "attempts.jsonl")[-1]["cause"] == cause


def test_a_full_disk_ends_a_server_with_its_cause(run_dir):
    records.begin(run_dir, ["n1"])
    error = OSError(errno.ENOSPC, "No space left on device", "requests/journal.jsonl")
    server.leave_fault(error, run_dir / "logs" / "0", 0)
    records.end(run_dir, 0, 1)
    (line,) = read_json_lines(run_dir / "attempts.jsonl")
    assert line["cause"] == "no_space"
    assert "free some space" in line["message"]


def test_another_ranks_fault_explains_a_broken_connection():
    broken = {**BROKEN_PEER, "type": "NetworkError", "time": BROKEN_PEER["time"] - 5}
    late = {**broken, "type": "NetworkTimeout", "time": broken["time"] + 1}
    assert faults.first_error([broken, CRASH]) == CRASH
    assert faults.first_error([broken, late]) == late


@pytest.mark.parametrize("script", [False, True])
def test_shared_storage_that_fails_is_no_nodes_fault(run_dir, monkeypatch, script):
    monkeypatch.setenv("RANKS_PER_NODE", "1")
    for number in range(3):
        records.begin(run_dir, ["n1", "n2"])
        logs = run_dir / "logs" / str(number)
        if script:
            said = "Traceback\nOSError: [Errno 5] Input/output error: '/shared/data.bin'\n"
            (logs / "rank_1.log").write_text(said)
        else:
            write_error_record(logs, 1, OSError(errno.ESTALE, "Stale file handle", "/shared/x"))
        assert records.end(run_dir, number, 1, max_retries=9) == "run"
    lines = read_json_lines(run_dir / "attempts.jsonl")
    assert {line["cause"] for line in lines} == {"storage"}
    assert [retry.pause_s(lines[:number]) for number in range(4)] == [0, 15, 30, 60]
    assert retry.pause_s([*lines, {"cause": "error"}]) == 0
    assert retry.pause_s(lines * 9) == 240
    assert records.nodes_to_leave(run_dir, ["n1", "n2"]) == []


# What Slurm 22.05 wrote when it lost n2, which was not the first node.
LOST = """srun: error: n1: task 0: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=5485111.0
srun: error: Node failure on {nodes}
slurmstepd-n1: error: *** JOB 11 ON n1 CANCELLED AT 2026-11-24T01:52:31 DUE TO NODE FAILURE, SEE \
SLURMCTLD LOG FOR DETAILS ***
"""


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(("nodes", "names"), [("n2", ["n2"]), ("n[2-3]", ["n2", "n3"])])
def test_a_lost_node_is_named_and_left_out(run_dir, monkeypatch, recorded, nodes, names):
    monkeypatch.setenv("SLURM_JOB_ID", "11")
    # scontrol, which writes out a list of nodes, starts with a cluster's configuration only.
    conf = run_dir / "slurm.conf"
    conf.write_text("ClusterName=west\nSlurmctldHost=localhost\n")
    monkeypatch.setenv("SLURM_CONF", str(conf))
    hosts = ["n1", "n2", "n3", "n4"]
    records.begin(run_dir, hosts)
    text = LOST.format(nodes=nodes).replace("\\\n", "")
    # The job script may die with the first node, and with it what Slurm says of the job.
    (run_dir / "logs/job.log").write_text(text if recorded else text.partition("slurmstepd")[0])
    if recorded:
        records.end(run_dir, 0, 143, job_state="COMPLETING")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    records.begin(run_dir, hosts)
    (line,) = read_json_lines(run_dir / "attempts.jsonl")
    assert (line["cause"], line["node"], line["bad_nodes"]) == ("node_failure", "n2", names)
    assert line["message"] == f"Slurm ended the job because it lost a node: {', '.join(names)}"
    assert retry.bad_nodes([line]) == set(names)


MEMORY = "error: StepId=11.0 exceeded memory limit (944 > 900), being killed"
KILL = "error: Detected 1 oom_kill event in StepId=11.0."


@pytest.mark.parametrize(
    ("log", "text", "node"),
    [
        ("job.log", f"slurmstepd-n1: {MEMORY}\nsrun: error: n2: task 1: Killed\n", "n1"),
        ("0/node_1.log", f"slurmstepd: {KILL}\n", "n2"),
        ("0/node_0.log", f"slurmstepd-n2: {KILL}\n", "n2"),
        ("job.log", "srun: error: n2: task 1: Out Of Memory\n", "n2"),
        ("job.log", f"slurmstepd: {KILL}\nsrun: error: n2: task 1: Killed\n", None),
    ],
)
def test_memory_ran_out_on_the_node_that_slurm_names(run_dir, log, text, node):
    records.begin(run_dir, ["n1", "n2"])
    (run_dir / "logs" / log).write_text(text)
    records.end(run_dir, 0, 1)
    (line,) = read_json_lines(run_dir / "attempts.jsonl")
    assert (line["cause"], line["node"]) == ("out_of_memory", node)


def test_nccls_time_out_is_no_crash_of_a_rank(tmp_path):
    (tmp_path / "node_0.log").write_text(
        "  time      : 2026-11-22_13:00:53\n  host      : n1\n  rank      : 3 (local_rank: 3)\n"
        "  exitcode  : -6 (pid: 77) (SIGABRT)\n  error_file: <N/A>"
    )
    log = tmp_path / "rank_3.log"
    log.write_text("terminate called\n")
    (crash,) = faults.read_errors(tmp_path)
    assert (crash["type"], crash["rank"]) == ("Killed", 3)
    log.write_text(
        "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE)"
    )
    (late,) = faults.read_errors(tmp_path)
    assert late["type"] == "NetworkTimeout" and "OpType=ALLREDUCE" in late["message"]


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.setenv("JOB_PID", "1")
    (tmp_path / "logs").mkdir()
    return tmp_path


def checkpoint(run_dir, step):
    folder = run_dir / "checkpoints" / f"step_{step}"
    folder.mkdir(parents=True)
    (folder / "COMPLETE").touch()


def test_retries_end_when_nothing_is_gained_and_go_on_while_something_is(run_dir):
    for number, (gain, expected) in enumerate(
        [(10, "run"), (None, "run"), (20, "run"), (None, "run"), (None, "failed")]
    ):
        assert records.begin(run_dir, ["n1"]) == number
        if gain:
            checkpoint(run_dir, gain)
        assert records.end(run_dir, number, 1, max_retries=1, job_state=None) == expected
    told = [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]
    assert [line["gained"] for line in told] == [True, False, True, False, False]
    assert told[-1]["checkpoint_step"] == 20
    status = json.loads((run_dir / "status.json").read_text())
    assert status["state"] == "FAILED" and "2 attempts saved nothing new" in status["message"]
    assert (run_dir / "logs" / "latest").resolve().name == "4"


@pytest.mark.parametrize(
    ("file", "contents", "gained"),
    [
        # An evaluation by its shards, a replica by the minutes for which it was ready.
        ("evals/shards/{}.json", ["{}", None, "{}"], [True, False, True]),
        (
            "served.json",
            [f'{{"minutes": {minutes}}}' for minutes in (0, 2, 2, 3)],
            [False, True, False, True],
        ),
    ],
)
def test_what_is_no_training_gains_otherwise(run_dir, file, contents, gained):
    (run_dir / "evals/shards").mkdir(parents=True)
    for number, content in enumerate(contents):
        records.begin(run_dir, ["n1"])
        if content:
            (run_dir / file.format(number)).write_text(content)
        records.end(run_dir, number, 1, max_retries=3)
    assert [line["gained"] for line in read_json_lines(run_dir / "attempts.jsonl")] == gained


def test_an_attempt_that_could_not_record_its_end_gets_a_line(run_dir, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "11")
    records.begin(run_dir, ["n1"])
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    # The job script has to ask whether that job still runs; it does not.
    with pytest.raises(records.Follows, match="job 11 still works on this run"):
        records.begin(run_dir, ["n2"], exists=lambda job: job == "11")
    assert read_json_lines(run_dir / "attempts.jsonl") == []
    assert records.begin(run_dir, ["n2"], exists=lambda job: False) == 1
    (line,) = read_json_lines(run_dir / "attempts.jsonl")
    assert line["attempt"] == 0 and line["cause"] == "lost" and line["nodes"] == ["n1"]


def test_progress_of_an_attempt_before_does_not_finish_this_one(run_dir):
    (run_dir / "progress.json").write_text('{"state": "stopped", "attempt": 0}')
    records.begin(run_dir, ["n1"])
    assert records.end(run_dir, 0, 0, 3, None) == "run"  # stopped, without Slurm: again at once
    records.begin(run_dir, ["n1"])
    assert records.end(run_dir, 1, 0, 3, None) == "run"
    causes = [line["cause"] for line in read_json_lines(run_dir / "attempts.jsonl")]
    assert causes == ["stopped", "killed"]


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("import no_such_module", "ModuleNotFoundError", "No module named 'no_such_module'"),
        ("raise ImportError('\\nX requires the Y library')", "ImportError", "X requires the Y"),
        ("json.loads('{')", "json.decoder.JSONDecodeError", "Expecting property name enclosed"),
        ("raise Overflow('too much')", "Overflow", "too much"),
    ],
)
def test_a_scripts_traceback_is_named_with_file_and_line(tmp_path, code, kind, message):
    """Also if the exception is raised in a package, and whatever its name is."""
    script = tmp_path / "train.py"
    script.write_text(f"import json\nclass Overflow(Exception):\n    pass\n{code}\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    # In a process group torch marks the lines.
    marked = "".join(f"[rank0]: {line}\n" for line in done.stderr.splitlines())
    (tmp_path / "rank_0.log").write_text(f"step 1\n{marked if kind == 'Overflow' else done.stderr}")
    (error,) = faults.read_errors(tmp_path)
    assert error["type"] == kind
    assert error["message"].startswith(message) and error["message"].endswith("(train.py:4)")


def test_records_that_cannot_be_read_are_waited_for_together(tmp_path, monkeypatch, capsys):
    """Slurm gives the job script 30 s, and there may be a record of each of a thousand ranks."""
    monkeypatch.setattr(faults, "WAIT_S", 0.1)
    for path in (tmp_path / f"error_rank_{rank}.json" for rank in range(9)):
        path.symlink_to(path)
    assert {each["type"] for each in faults.read_errors(tmp_path)} == {faults.STORAGE}
    assert capsys.readouterr().err.count("trying again") == 1
