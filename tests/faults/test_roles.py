"""Faults of a run whose answers are generated on nodes of their own."""

import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from plugins.rl import demo_sums
from runspec import files
from tests.failing_storage import FailingStorage
from tests.faults.conftest import user_of
from tests.faults.kit import attempts, ended, kill_node
from tests.launcher.kit import Kit, checkpoints, losses, processes_of, ranks_of, report, until
from tests.trainer.runs import metrics
from tests.vllm_stand_in import vllm_python

RUN = [
    *("--recipe", "demo_grpo", "--nodes", "1", "--gpus-per-node", "1", "batch_size=32"),
    *("max_steps=120", "save_every_n_steps=10", "log_every_n_steps=1", "updates_per_rollout=1"),
    "enable_async_checkpointing=false",
]
PROGRAM = "trainer.train"


def rollout(run: Path) -> dict[str, Any]:
    path = run / "rollout.json"
    return json.loads(path.read_text()) if path.exists() else {"samplers": [], "deaths": []}


def sampler(run: Path) -> int:
    """The process of the one sampler, once it listens."""
    path = run / ".rollout/sampler_0.json"
    return int(json.loads(until(lambda: path.exists() and path.read_text(), 60))["pid"])


def reaches(run: Path, step: int) -> None:
    until(lambda: max(checkpoints(run), default=0) >= step, 120, lambda: report(run))


def started(user: Kit, *more: str) -> Path:
    """A run with a sampler on a node of its own, once it has a checkpoint."""
    _, run = user.submit(*RUN, "resources.rollout=1", *more)
    reaches(run, 10)
    return run


def kill_rank(run: Path) -> int:
    rank = ranks_of(run, PROGRAM)[0]
    os.kill(rank, signal.SIGKILL)
    return rank


def resumes(user: Kit, run: Path, other: Path) -> None:
    """A run that has ended early ends like another when it is resumed."""
    assert user.cookbook("resume", run.name).returncode == 0
    user.wait(run, "COMPLETED")
    assert_equal(run, other)


def kill_sampler_then_rank(run: Path, kill: Callable[[Path], None], step: int) -> int:
    """Kill a sampler, and a rank once the run has reached a step; the sampler that took over."""
    kill(run)
    until(lambda: rollout(run)["deaths"], 30, lambda: report(run))
    reaches(run, step)
    second = sampler(run)
    kill_rank(run)
    return second


def killed_once(user: Kit, run: Path) -> None:
    """The run ends well; its second attempt has the sampler that was there."""
    lines = ended(user, run, "COMPLETED")
    assert [line["cause"] for line in lines] == ["killed", "finished"], report(run)
    assert len(rollout(run)["deaths"]) == 1, "the sampler waited for the next attempt"


def kill_sampler(run: Path) -> None:
    os.kill(sampler(run), signal.SIGKILL)


@pytest.fixture(scope="session")
def in_turns(user: Kit, root: Path) -> Path:
    """A run that nothing happened to, with rollouts on the GPUs that train."""
    demo_sums.make(root / "models/demo-sums", steps=40)
    _, run = user.submit(*RUN)
    ended(user, run, "COMPLETED")
    return run


def assert_equal(run: Path, other: Path) -> None:
    assert losses(run) == losses(other)
    names = ("export/model.safetensors", "rollouts.jsonl")
    assert [(run / name).read_bytes() for name in names] == [
        (other / name).read_bytes() for name in names
    ]


@pytest.mark.long
def test_a_sampler_and_then_a_rank_that_are_killed_change_no_loss(user: Kit, in_turns: Path):
    run = started(user)
    second = kill_sampler_then_rank(run, kill_sampler, 30)
    killed_once(user, run)
    assert [each["reason"] for each in rollout(run)["deaths"]] == ["killed by SIGKILL"]
    status = json.loads((run / "status.json").read_text())
    assert (len(status["nodes"]), len(status["rollout_nodes"])) == (1, 1)
    assert not Path(f"/proc/{second}").exists() and not (run / ".rollout").exists()
    assert_equal(run, in_turns)


@pytest.mark.named
def test_a_sampler_that_is_stopped_is_replaced(user: Kit, in_turns: Path):
    run = started(user)
    os.kill(sampler(run), signal.SIGSTOP)
    assert len(ended(user, run, "COMPLETED", timeout=240)) == 1
    assert rollout(run)["deaths"][0]["reason"] == "did not answer for 20 s"
    assert_equal(run, in_turns)


@pytest.mark.named
def test_a_sampler_that_is_slow_is_waited_for(user: Kit, in_turns: Path):
    run = started(user)
    slow = sampler(run)
    while max(checkpoints(run)) < 20:
        # It runs for a tenth of the time.
        for number, seconds in ((signal.SIGSTOP, 0.9), (signal.SIGCONT, 0.1)):
            os.kill(slow, number)
            time.sleep(seconds)
    assert len(ended(user, run, "COMPLETED", timeout=300)) == 1
    assert rollout(run)["deaths"] == []
    assert_equal(run, in_turns)


@pytest.mark.named
def test_a_job_whose_samplers_cannot_start_gives_its_nodes_back(user: Kit, in_turns: Path):
    """They are killed before they listen: three times, and the attempt fails within a minute."""
    _, run = user.submit(*RUN, "resources.rollout=1", "max_retries=0")
    until(lambda: _kill_samplers(run) and rollout(run)["deaths"], 60, lambda: report(run))
    until(lambda: _kill_samplers(run) and attempts(run), 60, lambda: report(run))
    (line,) = ended(user, run, "FAILED")
    assert "ended 3 times before it was ready: killed by SIGKILL" in line["message"], report(run)


def _kill_samplers(run: Path) -> bool:
    for process in processes_of(run, "plugins.rl.sampler"):
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)
    return True


@pytest.mark.named
def test_a_cancelled_job_leaves_nothing_and_resumes(user: Kit, in_turns: Path):
    run = started(user)
    done = user.cookbook("cancel", run.name)
    assert done.returncode == 0, done.stderr
    ended(user, run, "CANCELLED")
    resumes(user, run, in_turns)


@contextmanager
def in_place_of(run: Path, does: Callable[[], None]) -> Iterator[None]:
    """A server that says it is the run's sampler, and does this when weights come to it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            does()

        def log_message(self, *arguments: Any) -> None: ...

    path = run / ".rollout/sampler_0.json"
    before = json.loads(path.read_text())
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever).start()
    files.write_json(path, before | {"host": "127.0.0.1", "port": server.server_port})
    try:
        yield
    finally:
        files.write_json(path, before)
        server.shutdown()
        server.server_close()


@pytest.mark.long
def test_a_rank_that_is_killed_in_the_transfer_changes_no_loss(user: Kit, in_turns: Path):
    run = started(user)
    killed: list[int] = []
    with in_place_of(run, lambda: killed.append(kill_rank(run))):
        until(lambda: attempts(run), 60, lambda: report(run))
    lines = ended(user, run, "COMPLETED")
    assert killed and [line["cause"] for line in lines] == ["killed", "finished"], report(run)
    assert rollout(run)["deaths"] == []
    assert_equal(run, in_turns)


@pytest.mark.named
@pytest.mark.parametrize("part", [".rollout/.weights", "rollouts.jsonl"])
def test_a_full_disk_ends_the_run_which_resumes(user: Kit, in_turns: Path, tmp_path: Path, part):
    """Of the transfer of weights, and of the log of answers."""
    storage = FailingStorage(tmp_path)
    run = started(user, *(f"+env.{key}={value}" for key, value in storage.env.items()))
    storage.fail(f"{run.name}/{part}", errno.ENOSPC)
    (line,) = ended(user, run, "FAILED")
    assert line["cause"] == "no_space" and "No space left on device" in line["message"], line
    storage.recover()
    resumes(user, run, in_turns)


@pytest.mark.named
def test_a_time_limit_and_a_requeue_change_no_loss(slurm, user: Kit, in_turns: Path):
    run = started(user)
    job = json.loads((run / "status.json").read_text())["job_id"]
    slurm.run(["scancel", "--batch", "--signal=USR1", job])
    until(lambda: len(attempts(run)) == 1 and ranks_of(run, PROGRAM), 180, lambda: report(run))
    reaches(run, max(checkpoints(run)) + 10)
    slurm.run(["scontrol", "requeue", job])
    first, *_, last = ended(user, run, "COMPLETED", timeout=300)
    assert (first["cause"], last["restart_count"]) == ("time_limit", 2), report(run)
    assert_equal(run, in_turns)


@pytest.mark.named
@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_lost_node_is_replaced(new_cluster, root: Path, in_turns: Path, node: str):
    """The one that trains, and the one that generates."""
    shape = ("--nodes", "3", "--requeue-delay", "5", "--set", "SlurmdTimeout=6")
    with new_cluster(f"roles-{node}", *shape) as cluster:
        user = user_of(cluster, root)
        job, run = user.submit(*RUN, "resources.rollout=1")
        reaches(run, 10)
        kill_node(cluster, node, job)
        *_, last = ended(user, run, "COMPLETED", timeout=300)
        status = json.loads((run / "status.json").read_text())
        used = {*status["nodes"], *status["rollout_nodes"]}
        assert used == {"n1", "n2", "n3"} - {node} and last["restart_count"] == 1, report(run)
        assert_equal(run, in_turns)


@pytest.mark.named
def test_a_run_ahead_loses_no_step_and_keeps_its_bound(user: Kit, in_turns: Path):
    """A sampler that is killed, and then a rank: not the same losses, but all steps."""
    run = started(user, "max_staleness=2", "importance_cap=2")
    kill_sampler_then_rank(run, kill_sampler, 40)
    killed_once(user, run)
    logged = metrics(run)
    assert [line["step"] for line in logged] == [*range(1, 121)]
    assert max(line["staleness/most"] for line in logged) == 2


def kill_vllm(run: Path) -> None:
    (engine,) = processes_of(run, "vllm.entrypoints.cli.main")
    os.kill(engine, signal.SIGKILL)


@pytest.mark.named
def test_vllm_in_an_environment_of_its_own_is_replaced_when_it_dies(
    user: Kit, in_turns: Path, tmp_path: Path
):
    """A stand-in of vLLM; its process is killed, and then a rank."""
    own = f"environment={{python: {vllm_python(tmp_path)}}}"
    run = started(user, "rollout_engine=vllm", own)
    kill_sampler_then_rank(run, kill_vllm, 30)
    killed_once(user, run)
    assert "vLLM ended with status -9" in rollout(run)["deaths"][0]["reason"]
    rows, same = metrics(run), metrics(in_turns)
    assert [row["step"] for row in rows] == [row["step"] for row in same]
    assert max(abs(row["kl/sampler"]) for row in rows) < 1e-4
    assert rows[-1]["reward"] == pytest.approx(same[-1]["reward"], abs=0.1)
    assert processes_of(run) == []
