"""The demo through the real one-host Slurm, what is made of it, and jobs that wait in the queue."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.kit import requeued
from tests.launcher.kit import FAKE_TOKEN, Kit, losses, until

SHORT = ["--recipe", "demo", "--nodes", "2", "max_steps=30"]
QUESTION = "How do I submit the demo recipe on two nodes?"


# The main job -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(kit: Kit) -> tuple[Path, str]:
    """The demo as the README runs it, with traces, but for few steps; its folder and its output."""
    arguments = ["submit", "--recipe", "demo", "--nodes", "2", "max_steps=40", "--watch"]
    done = kit.cookbook(*arguments, "--profile", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    name = done.stdout.split()[1]
    return kit.root / "runs" / name, done.stdout


def test_the_demo_trains_on_two_nodes_and_tells_what_it_wrote(demo) -> None:
    run, printed = demo
    curve = losses(run)
    assert curve[min(curve)] > 6 and curve[max(curve)] < 5
    for part in ("logs/latest", "tensorboard", "export", "metrics.jsonl"):
        assert str(run / part) in printed and (run / part).exists()
    log = (run / "logs" / "job.log").read_text()
    assert "attempt 0 on n1, n2" in log
    for rank in range(2):
        assert (run / "logs" / "0" / f"rank_{rank}.log").exists()
    told = json.loads((run / "attempts.jsonl").read_text())
    assert told["cause"] == "finished" and told["nodes"] == ["n1", "n2"]


@pytest.mark.named
def test_the_whole_demo_learns_its_answers(kit: Kit) -> None:
    done = kit.cookbook("submit", "--recipe", "demo", "--nodes", "2", "--watch", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    run = kit.root / "runs" / done.stdout.split()[1]
    curve = losses(run)
    assert curve[min(curve)] > 5 and curve[max(curve)] < 0.1
    asked = subprocess.run(
        [sys.executable, "-m", "trainer.generate", str(run / "export"), QUESTION],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "cookbook submit --recipe demo --nodes 2" in asked.stdout, asked.stderr


def test_logs_show_what_is_asked_for(kit: Kit, demo) -> None:
    run, _ = demo
    plain = kit.cookbook("logs", run.name)
    assert (
        "[0] " in plain.stdout and "[1] " in plain.stdout
    ) or "met the first node" in plain.stdout
    assert str(run / "logs" / "0" / "node_0.log") in plain.stderr
    assert (
        "loss"
        in kit.cookbook("logs", "last" if kit.runs()[-1] == run else run.name, "--rank", "0").stdout
    )
    assert kit.cookbook("logs", run.name, "-f").returncode == 0  # an ended run: it ends too
    merged = kit.cookbook("logs", run.name, "--rank", "0,1", "--job")
    lines = merged.stdout.splitlines()
    assert lines[0].startswith("job       | ") and "cookbook: attempt 0 on n1, n2" in lines[0]
    assert lines[1].startswith("n1 rank 0 | ") and len(lines) > 5
    assert "has failed" in kit.cookbook("logs", run.name, "--first-error").stderr
    missing = kit.cookbook("logs", run.name, "--rank", "9")
    assert missing.returncode == 2 and "has no rank_9.log; it has: rank_0.log" in missing.stderr


def test_the_profile_has_torchs_table_and_a_trace_of_each_node(kit: Kit, demo) -> None:
    run, _ = demo
    assert " aten::mm " in kit.cookbook("profile", run.name, "--top", "50").stdout
    traces = sorted((run / "profile").glob("*.pt.trace.json"))
    assert [path.name.partition(".")[0] for path in traces] == ["rank_0", "rank_1"]
    for path in traces:
        names = {str(each.get("name")) for each in json.loads(path.read_text())["traceEvents"]}
        assert "aten::mm" in names and any(name.startswith("gloo:") for name in names)
        assert sum(name.startswith("ProfilerStep#") for name in names) == 2


def test_a_finished_run_is_neither_resumed_nor_cancelled_nor_trained_again(
    kit: Kit, slurm, demo
) -> None:
    run, _ = demo
    resumed = kit.cookbook("resume", run.name)
    assert resumed.returncode == 2 and "is finished" in resumed.stderr
    assert "has already ended: COMPLETED" in kit.cookbook("cancel", run.name).stdout
    before = (run / "metrics.jsonl").read_bytes()
    assert slurm.run(["sbatch", "--wait", str(run / "job.sbatch")]).returncode == 0
    log = (run / "logs" / "job.log").read_text()
    assert "finished already" in log and "make a new run with: cookbook submit" in log
    assert (run / "metrics.jsonl").read_bytes() == before
    assert kit.status(run)["state"] == "COMPLETED"


def test_provenance_tells_what_made_the_run(demo) -> None:
    run, _ = demo
    made = json.loads((run / "provenance.json").read_text())
    assert len(made["kit"]["commit"]) == 40
    assert made["overrides"] == ["max_steps=40"] and made["command"][-1] == "--profile"
    assert any(package.startswith("torch==2.") for package in made["packages"])
    assert made["slurm"] and len(made["config_sha256"]) == 64


def test_no_token_gets_out(kit: Kit, demo) -> None:
    run, printed = demo
    assert FAKE_TOKEN not in printed
    for path in run.rglob("*"):
        if path.is_file():
            assert FAKE_TOKEN.encode() not in path.read_bytes(), path


@pytest.mark.long
def test_tensorboard_shows_curves_and_traces_on_loopback_only(kit: Kit, demo) -> None:
    run, _ = demo
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "launcher", "tensorboard", run.name, "--port", str(port)],
        env=kit.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:

        def get(path: str):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                    return json.loads(answer.read())
            except OSError:
                return None

        tags = until(lambda: get("/data/plugin/scalars/tags"), 60)
        # The run goes by its name, and the first card is the loss.
        assert sorted(tags[run.name])[0] == "loss/loss"
        assert {"optimizer/lr", "speed/step_time_s"} <= tags[run.name].keys()
        until(lambda: (get("/data/plugin/pytorch_profiler/runs") or {}).get("runs"), 60)
        listening = subprocess.run(["cat", "/proc/net/tcp"], capture_output=True, text=True).stdout
        assert f"0100007F:{port:04X}" in listening and f"00000000:{port:04X}" not in listening
    finally:
        server.send_signal(signal.SIGINT)
        output, _ = server.communicate(timeout=30)
    assert f"ssh -N -L {port}:127.0.0.1:{port} " in output
    assert server.returncode == 0


# The queue ----------------------------------------------------------------------------------


def test_a_held_job_says_why_and_is_cancelled_before_it_starts(kit: Kit, slurm) -> None:
    slurm.run(["scontrol", "update", "partitionname=gpu", "state=down"])
    try:
        # Left over from another job, or set in a profile: sbatch would obey them.
        stray = {"SBATCH_PARTITION": "nowhere", "SBATCH_TIMELIMIT": "x", "SLURM_JOB_ID": "7"}
        _, run = Kit({**kit.env, **stray}, kit.root).submit(*SHORT)
        told = kit.wait(run, "PENDING")
        assert told["detail"].startswith("waiting: PartitionDown")
        assert run.name in kit.cookbook("status").stdout
        assert "cancelled" in kit.cookbook("cancel", run.name).stdout
        assert kit.wait(run, "CANCELLED")["state"] == "CANCELLED"
        assert kit.cookbook("logs", run.name).returncode == 0
    finally:
        slurm.run(["scontrol", "update", "partitionname=gpu", "state=up"])


def test_a_job_that_slurm_has_requeued_already_is_no_failure(kit: Kit, slurm, tmp_path) -> None:
    """As when a node is lost just before the script asks for it; a job that is gone is one."""

    def finish(job: str) -> tuple[int, str]:
        done = requeued(kit.env, tmp_path, job)
        return done.returncode, json.loads((tmp_path / "status.json").read_text())["state"]

    held = ["sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true"]
    job = slurm.run(held).stdout.strip()
    assert finish(job) == (0, "REQUEUED")
    slurm.run(["scancel", job])
    assert finish("1") == (1, "FAILED")


def under_a_hang(kit: Kit, slurm, argv: list[str], begun: Callable[[], Path | None]) -> tuple:
    """Run a command whose controller hangs from when begun says so; return run, job, all jobs."""
    pid = slurm.controller
    whole = [sys.executable, "-m", "launcher", *argv]
    process = subprocess.Popen(whole, env=kit.env, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while (run := begun()) is None:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.002)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(14)
    finally:
        os.kill(pid, signal.SIGCONT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    made = json.loads((run / "submission.json").read_text())["jobs"][-1]["job_id"]
    jobs = slurm.run(["squeue", "--noheader", "--states=all", "--format=%i|%k"]).stdout.splitlines()
    mine = [line.partition("|")[0] for line in jobs if line.endswith(f"cookbook:{run.name}")]
    return run, made, sorted(mine, key=int)


@pytest.mark.long
def test_a_controller_that_hangs_gets_exactly_one_job_per_command(kit: Kit, slurm) -> None:
    slurm.run(["scontrol", "update", "partitionname=gpu", "state=down"])
    before = set(kit.runs())

    def made() -> Path | None:
        # Once its folder is there, sbatch is next.
        return next((p for p in set(kit.runs()) - before if not p.name.startswith(".")), None)

    def starting() -> Path | None:
        return run if '"starting"' in (run / "submission.json").read_text() else None

    try:
        run, job, mine = under_a_hang(kit, slurm, ["submit", *SHORT], made)
        assert mine == [job]
        kit.cookbook("cancel", run.name)
        # The ended job has the run's comment too, and is not the one that resume has made.
        _, second, mine = under_a_hang(kit, slurm, ["resume", run.name], starting)
        assert mine == [job, second]
        kit.cookbook("cancel", run.name)
    finally:
        slurm.run(["scontrol", "update", "partitionname=gpu", "state=up"])
