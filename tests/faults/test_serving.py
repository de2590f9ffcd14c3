"""Faults of a served model on the one-host Slurm: no request fails, nothing of the log is lost."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from plugins.serve import journal
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
        again = user.cookbook("serve", "--url", name)
        assert again.returncode == 0 and again.stdout.strip() == url, again.stderr
        with asking(user, name, 12):
            os.kill(front_of(user, run), signal.SIGKILL)
        until(lambda: listed(user, name)["ready"] == 1, 90, lambda: words_of(user))
        logged = journal.read(user.root / "endpoints" / name / "requests")
        assert sum(row["status"] == 200 for row in logged) == 52
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
