"""Faults of a served model on the one-host Slurm: no request fails, nothing of the log is lost."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from plugins.serve.cli.query import ask
from plugins.serve.launcher.endpoint import Endpoint
from tests.faults.conftest import user_of
from tests.faults.kit import ended, lose_node
from tests.launcher.kit import Kit, processes_of, ranks_of, report, until


@contextmanager
def asking(user: Kit, name: str, count: int) -> Iterator[None]:
    """Ask an endpoint many questions during the block, four at a time; none of them may fail."""
    endpoint = Endpoint(user.root / "endpoints" / name)

    def asked(number: int) -> str:
        turns = [{"role": "user", "content": f"job {number}"}]
        return ask(endpoint, {"model": name, "messages": turns, "max_tokens": 16})

    pool = ThreadPoolExecutor(4)
    try:
        answers = [pool.submit(asked, number) for number in range(count)]
        until(answers[0].done, 60)
        yield
        for each in answers:
            each.result(600)
    finally:
        pool.shutdown(cancel_futures=True)


def listed(user: Kit, name: str) -> dict[str, Any]:
    rows = json.loads(user.cookbook("serve", "--list", "--json").stdout)
    return next(row for row in rows if row["endpoint"] == name)


def words_of(user: Kit) -> str:
    return "\n".join(report(run) for run in user.runs())


def front_of(user: Kit, run: str) -> int:
    return ranks_of(user.root / "runs" / run, "plugins.serve.server")[0]


def backend_of(user: Kit, run: str) -> int:
    """The process id of the backend of a run."""
    (backend,) = processes_of(user.root / "runs" / run, "plugins.serve.transformers_backend")
    return backend


@pytest.mark.long
def test_a_successor_and_killed_processes_fail_no_request_and_lose_none(user: Kit, model: Path):
    name = "takeover"
    started = user.cookbook("serve", str(model), "--name", name, "--json")
    assert started.returncode == 0, started.stderr + words_of(user)
    url = json.loads(started.stdout)["url"]
    try:
        with asking(user, name, 40):
            replaced = user.cookbook("serve", str(model), "--name", name, "--replace")
            assert replaced.returncode == 0, replaced.stderr + words_of(user)
        (run,) = listed(user, name)["runs"]
        os.kill(backend_of(user, run), signal.SIGKILL)
        gateway = json.loads((user.root / "endpoints" / name / "gateway.json").read_text())
        os.kill(gateway["pid"], signal.SIGKILL)
        # Until the kernel has ended it, it counts as running, and nothing is to be done.
        until(lambda: not Path(f"/proc/{gateway['pid']}").exists(), 30)
        kept = user.cookbook("serve", "--keep", name, "--once")
        assert kept.returncode == 0 and url.removesuffix("/v1") in kept.stderr, kept.stderr
        with asking(user, name, 12):
            os.kill(front_of(user, run), signal.SIGKILL)
        until(lambda: listed(user, name)["ready"] == 1, 90, lambda: words_of(user))
        told = json.loads(user.cookbook("serve", "--stats", name, "--json").stdout)
        assert told["status"].get("200", 0) == 52, told
    finally:
        user.cookbook("serve", "--stop", name)


# Two backends on two nodes of a busy machine take minutes.
@pytest.mark.named
def test_a_lost_node_fails_no_request_and_its_server_comes_back(new_cluster, tmp_path, model):
    shape = ["--requeue-delay", "5", "--set", "SlurmdTimeout=6"]
    with new_cluster("served", *shape) as cluster:
        user = user_of(cluster, tmp_path)
        argv = ["serve", str(model), "--name", "two", "--replicas", "2", "bind=node"]
        started = user.cookbook(*argv, "resources.exclusive=true", "--json", timeout=600)
        assert started.returncode == 0, started.stderr + words_of(user)
        try:
            found = listed(user, "two")
            assert (found["ready"], found["replicas"], len(found["runs"])) == (2, 2, 2)
            run = next(
                user.root / "runs" / name
                for name in found["runs"]
                if json.loads((user.root / "runs" / name / "status.json").read_text())["nodes"]
                == ["n2"]
            )
            job = json.loads((run / "status.json").read_text())["job_id"]
            with asking(user, "two", 120):
                lose_node(cluster, "n2", job)
                assert listed(user, "two")["ready"] == 1
                cluster.start_dead_daemons()
            until(lambda: listed(user, "two")["ready"] == 2, 300, lambda: words_of(user))
            assert (run / "logs" / "1").is_dir(), "the same run, another attempt"
        finally:
            user.cookbook("serve", "--stop", "two")


# Three backends, one after another.
@pytest.mark.named
def test_a_moved_alias_fails_no_request(new_cluster, tmp_path: Path, model: Path):
    promote = ["promote", "tiny", "--to", "champion", "--gates", "none"]
    with new_cluster("kept", "--requeue-delay", "5") as cluster:
        user = user_of(cluster, tmp_path)

        def done(*argv: str) -> subprocess.CompletedProcess[str]:
            found = user.cookbook(*argv, timeout=600)
            assert found.returncode == 0, found.stderr + words_of(user)
            return found

        done("register", str(model), "--as", "tiny")
        done(*promote)
        done("register", str(model), "--as", "tiny")
        done("serve", "models:/tiny@champion")
        try:
            done(*promote)
            with asking(user, "tiny", 40):
                moved = done("serve", "--keep", "tiny", "--once")
                assert "models:/tiny@champion is v2 now, and tiny v1 is served" in moved.stderr
            assert listed(user, "tiny")["versions"] == ["tiny v2"]
        finally:
            user.cookbook("serve", "--stop", "tiny")


class Watcher(threading.Thread):
    """Asks a gateway for its health, and notes the longest time that it was not ready."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.longest_s, self.ended = url, 0.0, threading.Event()

    def run(self) -> None:
        well = time.monotonic()
        while not self.ended.wait(0.2):
            with suppress(OSError), urllib.request.urlopen(self.url, timeout=5):
                well = time.monotonic()
            self.longest_s = max(self.longest_s, time.monotonic() - well)


# A job of two minutes is replaced before its limit: Slurm's warning comes after 90 s.
@pytest.mark.named
def test_a_job_is_replaced_before_its_time_limit_without_a_failed_request(
    new_cluster, tmp_path: Path, model: Path
):
    with new_cluster("limit", "--requeue-delay", "5") as cluster:
        user = user_of(cluster, tmp_path)
        argv = ["serve", str(model), "--name", "short", "--time", "2", "--json"]
        started = user.cookbook(*argv)
        assert started.returncode == 0, started.stderr
        (before,) = listed(user, "short")["runs"]
        argv = [sys.executable, "-m", "launcher", "serve", "--keep", "short"]
        keeper = subprocess.Popen(argv, env=user.env, stderr=subprocess.PIPE, text=True)
        url = json.loads(started.stdout)["url"].removesuffix("/v1")
        watcher = Watcher(f"{url}/health")
        watcher.start()
        try:
            with asking(user, "short", 400):
                until(lambda: before not in listed(user, "short")["runs"], 200)
            assert listed(user, "short")["ready"]
        finally:
            watcher.ended.set()
            keeper.terminate()
            _, words = keeper.communicate()
            user.cookbook("serve", "--stop", "short")
        assert f"the time limit of {before} is" in words
        ended = json.loads((user.root / "runs" / before / "status.json").read_text())
        assert ended["state"] == "CANCELLED", "it was ended before its limit, by the keeper"
        assert watcher.longest_s < 3, "another server was ready all the time"


# As many questions as take long enough to be killed between the first answers and the last.
@pytest.mark.named
def test_an_evaluation_that_is_killed_and_cancelled_goes_on(user: Kit, tmp_path: Path, model: Path):
    questions = tmp_path / "questions.jsonl"
    rows = ({"question": f"job {k}", "answer": "a job"} for k in range(6000))
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["eval", str(model), "~tasks.likelihood", f"tasks.answers.data={questions}"]
    argv += ["tasks.answers.limit=6000", "max_new_tokens=16"]
    done = user.cookbook(*argv, "--local", "--watch", "--json", timeout=600)
    assert done.returncode == 0, done.stderr + words_of(user)
    alone = user.root / "runs" / json.loads(done.stdout)["run"]
    told = user.cookbook(*argv, "--nodes=2", "--gpus-per-node=1", "--json")
    assert told.returncode == 0, told.stderr
    run = Path(json.loads(told.stdout)["path"])

    def saved() -> int:
        return len(list(run.glob("evals/shards/*.json")))

    until(lambda: saved() >= 2, 120, lambda: report(run))
    os.kill(ranks_of(run, "plugins.evaluate.main")[1], signal.SIGKILL)
    kept = {path: path.stat().st_mtime_ns for path in run.glob("evals/shards/*.json")}
    until(lambda: (run / "logs" / "1").is_dir(), 120, lambda: report(run))
    before = saved()
    until(lambda: saved() >= before + 2, 120, lambda: report(run))
    assert user.cookbook("cancel", run.name).returncode == 0
    user.wait(run, "CANCELLED")
    resumed = user.cookbook("resume", run.name)
    assert resumed.returncode == 0, resumed.stderr
    assert len(ended(user, run, "COMPLETED")) == 3
    first, second = (
        (each / "evals" / "validation.samples.jsonl").read_bytes() for each in (alone, run)
    )
    assert first == second
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())
