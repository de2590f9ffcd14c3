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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import user_of
from tests.faults.kit import ended, processes_of, processes_of_node
from tests.launcher.kit import Kit, ranks_of, report, until


@contextmanager
def asking(user: Kit, name: str, folder: Path, count: int) -> Iterator[Path]:
    """Ask an endpoint many questions during the block; none of them may fail."""
    folder.mkdir(exist_ok=True)
    questions, answers = folder / "questions.jsonl", folder / "answers.jsonl"
    lines = (json.dumps({"prompt": f"job {k}"}) + "\n" for k in range(count))
    questions.write_text("".join(lines))
    argv = [sys.executable, "-m", "launcher", "query", name, f"--input={questions}"]
    argv += [f"--output={answers}", "--max-tokens=16", "--in-flight=4"]
    process = subprocess.Popen(argv, env=user.env, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: answers.exists() and answers.stat().st_size > 0, 60)
        yield answers
        _, words = process.communicate(timeout=600)
        assert process.returncode == 0 and ", 0 failed" in words, words
    finally:
        process.kill()
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [row["line"] for row in rows] == list(range(1, count + 1))


def listed(user: Kit, name: str) -> dict[str, Any]:
    rows = json.loads(user.cookbook("serve", "--list", "--json").stdout)
    return next(row for row in rows if row["endpoint"] == name)


def words_of(user: Kit) -> str:
    return "\n".join(report(run) for run in user.runs())


def front_of(user: Kit, run: str) -> int:
    return ranks_of(user.root / "runs" / run, "plugins.serve.server")[0]


def backend_of(user: Kit, run: str) -> int:
    """The process id of the backend of a run."""
    pids = processes_of(user.root / "runs" / run)
    (backend,) = [pid for pid in pids if b"transformers_backend" in _command(pid)]
    return backend


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.long
def test_a_successor_and_killed_processes_fail_no_request_and_lose_none(
    user: Kit, tmp_path: Path, model: Path
):
    name = "takeover"
    started = user.cookbook("serve", str(model), "--name", name, "--json")
    assert started.returncode == 0, started.stderr + words_of(user)
    url = json.loads(started.stdout)["url"]
    try:
        with asking(user, name, tmp_path, 40):
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
        with asking(user, name, tmp_path / "again", 12):
            os.kill(front_of(user, run), signal.SIGKILL)
        until(lambda: listed(user, name)["ready"] == 1, 90, lambda: words_of(user))
        told = json.loads(user.cookbook("serve", "--stats", name, "--json").stdout)
        assert told["status"].get("200", 0) == 52, told
    finally:
        user.cookbook("serve", "--stop", name)


@pytest.mark.long
def test_without_requests_a_server_ends_and_the_next_request_starts_one(
    user: Kit, tmp_path: Path, model: Path
):
    argv = ["serve", str(model), "--name", "asleep", "--replicas", "0-1"]
    refused = user.cookbook(*argv)
    assert refused.returncode == 2 and "add bind=node" in refused.stderr
    started = user.cookbook(*argv, "bind=node", "scale_idle_minutes=0.05", "--json")
    assert started.returncode == 0, started.stderr
    log = user.root / "endpoints" / "asleep" / "gateway.log"
    try:
        assert (listed(user, "asleep")["runs"], listed(user, "asleep")["ready"]) == ([], 0)
        with asking(user, "asleep", tmp_path, 4):
            pass
        (run,) = listed(user, "asleep")["runs"]
        until(lambda: listed(user, "asleep")["ready"] == 0, 120, lambda: log.read_text())
        status = user.root / "runs" / run / "status.json"
        until(lambda: json.loads(status.read_text())["state"] == "CANCELLED", 60)
    finally:
        user.cookbook("serve", "--stop", "asleep")


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
            with asking(user, "two", tmp_path, 120):
                for pid in processes_of_node("n2", job, cluster.state):
                    os.kill(pid, signal.SIGKILL)
                node = ["scontrol", "show", "node", "n2"]
                until(lambda: "State=DOWN" in cluster.run(node).stdout, 60, lambda: report(run))
                assert listed(user, "two")["ready"] == 1
                cluster.start_dead_daemons()
            until(lambda: listed(user, "two")["ready"] == 2, 300, lambda: words_of(user))
            assert (run / "logs" / "1").is_dir(), "the same run, another attempt"
        finally:
            user.cookbook("serve", "--stop", "two")


# Four backends, one after another.
@pytest.mark.named
def test_a_share_and_a_moved_alias_fail_no_request(new_cluster, tmp_path: Path, model: Path):
    gates = tmp_path / "gates.yaml"
    gates.write_text("aliases: [champion]\ngates: [{size_gib_at_most: 1}]\n")
    promote = ["promote", "tiny", "--to", "champion", "--gates", str(gates)]
    with new_cluster("kept", "--requeue-delay", "5") as cluster:
        user = user_of(cluster, tmp_path)

        def done(*argv: str, **more: Any) -> subprocess.CompletedProcess[str]:
            found = user.cookbook(*argv, timeout=600, **more)
            assert found.returncode == 0, found.stderr + words_of(user)
            return found

        done("register", str(model), "--as", "tiny")
        done(*promote)
        done("register", str(model), "--as", "tiny")
        done("serve", "models:/tiny@champion")
        try:
            shared = ["models:/tiny@candidate", "--name", "tiny", "--share", "0.5"]
            with asking(user, "tiny", tmp_path / "share", 40):
                done("serve", *shared)
            assert listed(user, "tiny")["versions"] == ["tiny v1", "tiny v2"]
            told = json.loads(done("serve", "--stats", "tiny", "--json").stdout)
            with asking(user, "tiny", tmp_path / "both", 40):
                pass
            after = json.loads(done("serve", "--stats", "tiny", "--json").stdout)["models"]
            gained = after["tiny v2"] - told["models"].get("tiny v2", 0)
            assert 8 <= gained <= 32, "about half of the traffic"
            replace = ["serve", "models:/tiny@champion", "--name", "tiny", "--replace"]
            done(*replace)
            done(*promote)
            with asking(user, "tiny", tmp_path / "moved", 40):
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
            with asking(user, "short", tmp_path / "limit", 400):
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
def test_a_file_is_answered_by_a_job_that_is_killed_and_cancelled(
    user: Kit, tmp_path: Path, model: Path
):
    questions, alone = tmp_path / "questions.jsonl", tmp_path / "alone.jsonl"
    questions.write_text("".join(json.dumps(f"job {k}") + "\n" for k in range(6000)))
    argv = ["eval", str(model), f"tasks.answers.data={questions}", "max_new_tokens=16"]
    argv += ["--suite", "batch"]
    alone_too = f"tasks.answers.output={alone}"
    done = user.cookbook(*argv, alone_too, "--local", "--watch", timeout=600)
    assert done.returncode == 0, done.stderr + words_of(user)
    answers = tmp_path / "answers.jsonl"
    size = ["--nodes=2", "--gpus-per-node=1", "--json"]
    told = user.cookbook(*argv, f"tasks.answers.output={answers}", *size)
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
    assert not answers.exists(), "it appears whole"
    resumed = user.cookbook("resume", run.name)
    assert resumed.returncode == 0, resumed.stderr
    assert len(ended(user, run, "COMPLETED")) == 3
    assert answers.read_bytes() == alone.read_bytes()
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())
