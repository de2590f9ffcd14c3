"""Whole runs through the real one-host Slurm: srun, torchrun, training, faults and their ends."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.launcher.kit import FAKE_TOKEN, Kit, checkpoints, losses, ranks_of, report, until

# Small enough to end within seconds, long enough to be hit by a fault on the way.
SHORT = [
    "--recipe",
    "demo",
    "--nodes",
    "2",
    "--gpus-per-node",
    "1",
    "max_steps=60",
    "save_every_n_steps=5",
    "log_every_n_steps=1",
    "~generate",
]
QUESTION = "How do I submit the demo recipe on two nodes?"


@pytest.fixture(scope="module")
def undisturbed(kit: Kit) -> Path:
    """A short run that nothing happens to: what the disturbed ones must end like."""
    _, run = kit.submit(*SHORT)
    kit.wait(run, "COMPLETED", "FAILED", "CANCELLED")
    assert kit.status(run)["state"] == "COMPLETED", report(run)
    return run


def ends_like(run: Path, undisturbed: Path) -> None:
    assert losses(run) == losses(undisturbed)
    export = run / "export" / "model.safetensors"
    assert export.read_bytes() == (undisturbed / "export" / "model.safetensors").read_bytes()
    assert not ranks_of(run), "processes were left over"


# The main job -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(kit: Kit) -> tuple[Path, str]:
    """The demo as the README runs it, with traces; its folder and what was printed."""
    done = kit.cookbook(
        "submit", "--recipe", "demo", "--nodes", "2", "--watch", "--profile", timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    name = done.stdout.split()[1]
    return kit.root / "runs" / name, done.stdout


def test_the_demo_learns_and_answers(kit: Kit, demo) -> None:
    run, printed = demo
    curve = losses(run)
    assert curve[min(curve)] > 5 and curve[max(curve)] < 0.1
    answer = next(
        json.loads(line)["answer"]
        for line in Path("configs/datasets/slurm_qa.jsonl").read_text().splitlines()
        if json.loads(line)["question"] == QUESTION
    )
    assert QUESTION in printed and answer in printed
    for part in ("logs/latest", "tensorboard", "export", "metrics.jsonl"):
        assert str(run / part) in printed and (run / part).exists()
    log = (run / "logs" / "job.log").read_text()
    assert "attempt 0 on n1, n2" in log
    for rank in range(4):
        assert (run / "logs" / "0" / f"rank_{rank}.log").exists()
    told = json.loads((run / "attempts.jsonl").read_text())
    assert told["cause"] == "finished" and told["nodes"] == ["n1", "n2"]


def test_the_demo_model_answers_from_its_export_in_transformers(demo) -> None:
    run, _ = demo
    done = subprocess.run(
        [sys.executable, "-m", "trainer.generate", str(run / "export"), QUESTION],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "cookbook submit --recipe demo --nodes 2" in done.stdout, done.stderr


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
    merged = kit.cookbook("logs", run.name, "--rank", "0,3", "--job", "--grep", "step|attempt 0")
    lines = merged.stdout.splitlines()
    assert lines[0].startswith("job       | ") and "cookbook: attempt 0 on n1, n2" in lines[0]
    assert lines[1].startswith("n1 rank 0 | ") and len(lines) > 37
    assert "has failed" in kit.cookbook("logs", run.name, "--first-error").stderr
    missing = kit.cookbook("logs", run.name, "--rank", "9")
    assert missing.returncode == 2 and "has no rank_9.log; it has: rank_0.log" in missing.stderr


def test_the_profile_says_where_the_time_goes(kit: Kit, demo) -> None:
    run, _ = demo
    told = json.loads(kit.cookbook("profile", run.name, "--json", "--top", "99").stdout)
    # The first rank of each node is traced.
    assert [row["rank"] for row in told["ranks"]] == [0, 2]
    for row in told["ranks"]:
        parts = ("compute", "exposed_communication", "copies", "data_loading", "idle")
        assert sum(row[part] for part in parts) == pytest.approx(row["total"])
        assert row["compute"] > 0 and row["communication"] > 0 and row["steps"] == 2
    assert "aten::mm" in [used["name"] for used in told["ranks"][0]["operators"]]
    # torch's own summary of the same steps.
    summary = (run / "profile" / "summary_rank_0.txt").read_text()
    counted = next(line for line in summary.splitlines() if "aten::mm " in line).split()[-1]
    (used,) = [u for u in told["ranks"][0]["operators"] if u["name"] == "aten::mm"]
    assert used["count"] == int(counted)


def test_a_finished_run_is_neither_resumed_nor_cancelled_nor_trained_again(
    kit: Kit, slurm, demo
) -> None:
    run, _ = demo
    resumed = kit.cookbook("resume", run.name)
    assert resumed.returncode == 2 and "is finished" in resumed.stderr
    assert "has ended already: COMPLETED" in kit.cookbook("cancel", run.name).stdout
    before = (run / "metrics.jsonl").read_bytes()
    assert slurm.run(["sbatch", "--wait", str(run / "job.sbatch")]).returncode == 0
    assert "finished already" in (run / "logs" / "job.log").read_text()
    assert (run / "metrics.jsonl").read_bytes() == before
    assert kit.status(run)["state"] == "COMPLETED"


def test_provenance_tells_what_made_the_run(demo) -> None:
    run, _ = demo
    made = json.loads((run / "provenance.json").read_text())
    assert len(made["kit"]["commit"]) == 40
    assert made["overrides"] == [] and made["command"][-1] == "--profile"
    assert any(package.startswith("torch==2.") for package in made["packages"])
    assert made["slurm"] and len(made["config_sha256"]) == 64


def test_no_token_gets_out(kit: Kit, demo) -> None:
    run, printed = demo
    assert FAKE_TOKEN not in printed
    for path in run.rglob("*"):
        if path.is_file():
            assert FAKE_TOKEN.encode() not in path.read_bytes(), path


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
        (only,) = [name for name in tags if run.name in name]
        assert {"loss", "lr", "grad_norm"} <= {tag.rpartition("/")[2] for tag in tags[only]}
        until(lambda: (get("/data/plugin/pytorch_profiler/runs") or {}).get("runs"), 60)
        listening = subprocess.run(["cat", "/proc/net/tcp"], capture_output=True, text=True).stdout
        assert f"0100007F:{port:04X}" in listening and f"00000000:{port:04X}" not in listening
    finally:
        server.send_signal(signal.SIGINT)
        output, _ = server.communicate(timeout=30)
    assert f"ssh -N -L {port}:127.0.0.1:{port} " in output
    assert server.returncode == 0


def processes_of_node(node: str, job: str, state: Path) -> list[int]:
    """What dies with a node: its slurmd, the job's tasks on it and the slurmstepd above them."""
    victims = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environ = (process / "environ").read_bytes().split(b"\0")
            command = (process / "cmdline").read_text().replace("\0", " ")
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if f"{state}/slurm.conf -N {node}" in command:
            victims.add(int(process.name))
        if {f"SLURMD_NODENAME={node}".encode(), f"SLURM_JOB_ID={job}".encode()} <= set(environ):
            victims.add(int(process.name))
            if "slurmstepd" in Path(f"/proc/{parent}/cmdline").read_text():
                victims.add(parent)
    assert len(victims) >= 4, "slurmd, slurmstepd, torchrun and a rank"
    return sorted(victims)


# Faults -------------------------------------------------------------------------------------


def test_a_killed_rank_is_named_and_costs_no_result(kit: Kit, undisturbed: Path) -> None:
    _, run = kit.submit(*SHORT)
    until(lambda: checkpoints(run), 90, lambda: report(run))
    os.kill(ranks_of(run)[1], signal.SIGKILL)
    kit.wait(run, "COMPLETED", "FAILED")
    first, second = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]
    assert first["cause"] == "killed" and first["message"].startswith("rank 1 on"), first
    assert second["cause"] == "finished"
    assert first["job_id"] == second["job_id"], "retried inside the allocation"
    told = kit.cookbook("logs", run.name, "--first-error").stdout
    assert told.startswith(f"attempt 0 of {run.name} failed: killed: rank 1 on n2: Killed"), told
    assert f"==> {run / 'logs/0/node_1.log'}, the last 30 lines <==" in told
    ends_like(run, undisturbed)


def test_the_warning_before_the_time_limit_saves_and_requeues(
    kit: Kit, slurm, undisturbed: Path
) -> None:
    job, run = kit.submit(*SHORT)
    until(
        lambda: losses(run) if (run / "metrics.jsonl").exists() else None, 90, lambda: report(run)
    )
    slurm.run(["scancel", "--batch", "--signal=USR1", job])
    kit.wait(run, "COMPLETED", "FAILED")
    first, second = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]
    assert first["cause"] == "time_limit" and first["checkpoint_step"] > 0, first
    assert (first["restart_count"], second["restart_count"]) == (0, 1)
    ends_like(run, undisturbed)


def test_a_cancelled_run_ends_and_goes_on_when_asked(kit: Kit, slurm, undisturbed: Path) -> None:
    job, run = kit.submit(*SHORT)
    until(lambda: checkpoints(run), 90, lambda: report(run))
    assert "cancelled" in kit.cookbook("cancel", job).stdout
    assert kit.wait(run, "CANCELLED")["state"] == "CANCELLED"
    until(lambda: not ranks_of(run), 30)
    resumed = kit.cookbook("resume", run.name)
    assert resumed.returncode == 0, resumed.stderr
    again = kit.cookbook("resume", run.name)
    assert again.returncode == 2 and "follow it with" in again.stderr
    kit.wait(run, "COMPLETED", "FAILED")
    ends_like(run, undisturbed)


@pytest.mark.long
def test_a_job_submitted_by_hand_does_the_same(kit: Kit, slurm, undisturbed: Path) -> None:
    job, run = kit.submit(*SHORT, "--name", "by-hand")
    slurm.run(["scontrol", "hold", job])
    slurm.run(["scancel", job])
    until(lambda: not ranks_of(run), 30)
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    by_hand = slurm.run(["sbatch", "--wait", str(run / "job.sbatch")], timeout=180)
    assert by_hand.returncode == 0, report(run)
    assert kit.status(run)["state"] == "COMPLETED"
    ends_like(run, undisturbed)


def test_without_slurm_the_same_script_runs_here(user: Kit, kit: Kit, undisturbed: Path) -> None:
    shutil.copytree(kit.root / "models", user.root / "models")
    done = user.cookbook("submit", *SHORT, "--local", "--watch")
    assert done.returncode == 0, done.stdout + done.stderr
    run = user.runs()[0]
    ends_like(run, undisturbed)
    _, second = user.submit(*SHORT, "--local")
    until(lambda: checkpoints(second), 90, lambda: report(second))
    assert "cancelled" in user.cookbook("cancel", second.name).stdout
    assert user.status(second)["state"] == "CANCELLED"
    until(lambda: not ranks_of(second), 30)


def test_a_lost_node_costs_no_result(kit: Kit, new_cluster, undisturbed: Path) -> None:
    with new_cluster("loss", "--requeue-delay", "5", "--set", "SlurmdTimeout=6") as cluster:
        user = Kit({**kit.env, **cluster.env}, kit.root)
        job, run = user.submit(*SHORT)
        until(lambda: checkpoints(run), 90, lambda: report(run))
        for pid in processes_of_node("n2", job, cluster.state):
            os.kill(pid, signal.SIGKILL)
        # sinfo goes on saying "mixed*" for a while when it is asked often.
        node = ["scontrol", "show", "node", "n2"]
        until(lambda: "State=DOWN" in cluster.run(node).stdout, 60, lambda: report(run))
        # The node comes back: up starts daemons that have died.
        place = ["--name", cluster.name, "--state", str(cluster.root)]
        shape = ["--requeue-delay", "5", "--set", "SlurmdTimeout=6"]
        back = cluster.run(["bash", "slurm/dev-cluster/cluster.sh", "up", *place, *shape])
        assert back.returncode == 0, back.stderr
        user.wait(run, "COMPLETED", "FAILED")
        told = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]
        assert told[-1]["cause"] == "finished" and len(told) > 1, report(run)
        ends_like(run, undisturbed)


# The queue ----------------------------------------------------------------------------------


def test_a_held_job_says_why_and_is_cancelled_before_it_starts(kit: Kit, slurm) -> None:
    slurm.run(["scontrol", "update", "partitionname=gpu", "state=down"])
    try:
        # Left over from another job, or set in a profile: sbatch would obey them.
        stray = {"SBATCH_PARTITION": "nowhere", "SBATCH_TIMELIMIT": "x", "SLURM_JOB_ID": "7"}
        _, run = Kit({**kit.env, **stray}, kit.root).submit(*SHORT)
        told = kit.wait(run, "PENDING")
        assert "PartitionDown" in told["detail"]
        assert run.name in kit.cookbook("status").stdout
        assert "cancelled" in kit.cookbook("cancel", run.name).stdout
        assert kit.wait(run, "CANCELLED")["state"] == "CANCELLED"
        assert kit.cookbook("logs", run.name).returncode == 0
    finally:
        slurm.run(["scontrol", "update", "partitionname=gpu", "state=up"])


def test_a_job_that_slurm_has_requeued_already_is_no_failure(kit: Kit, slurm, tmp_path) -> None:
    """As when a node is lost just before the script asks for it; a job that is gone is one."""
    (tmp_path / "status.json").write_text('{"state": "REQUEUED"}')
    env = {**kit.env, "RUN_DIR": str(tmp_path), "COOKBOOK": str(Path.cwd()), "VENV": sys.prefix}

    def finish(job: str) -> tuple[int, str]:
        code = "source slurm/job.sh; NEXT=requeue SLURM_JOB_ID=$1; finish"
        done = subprocess.run(["bash", "-c", code, "-", job], env=env, capture_output=True)
        return done.returncode, json.loads((tmp_path / "status.json").read_text())["state"]

    held = ["sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true"]
    job = slurm.run(held).stdout.strip()
    assert finish(job) == (0, "REQUEUED")
    slurm.run(["scancel", job])
    assert finish("1") == (1, "FAILED")


def test_a_controller_that_hangs_during_submit_gets_exactly_one_job(kit: Kit, slurm) -> None:
    (pid,) = [int(path.read_text()) for path in slurm.state.rglob("slurmctld.pid")]
    slurm.run(["scontrol", "update", "partitionname=gpu", "state=down"])
    submitting = subprocess.Popen(
        [sys.executable, "-m", "launcher", "submit", "--json", *SHORT],
        env=kit.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        # Once its folder is there, sbatch is next.
        before = set(kit.runs())
        (run,) = until(
            lambda: [p for p in set(kit.runs()) - before if not p.name.startswith(".")], 20
        )
        os.kill(pid, signal.SIGSTOP)
        time.sleep(14)
    finally:
        os.kill(pid, signal.SIGCONT)
    output, errors = submitting.communicate(timeout=120)
    jobs = slurm.run(["squeue", "--noheader", "--states=all", "--format=%i|%k"]).stdout.splitlines()
    mine = [line.partition("|")[0] for line in jobs if line.endswith(f"cookbook:{run.name}")]
    assert submitting.returncode == 0, errors
    assert mine == [json.loads(output)["job_id"]]
    kit.cookbook("cancel", run.name)
    slurm.run(["scontrol", "update", "partitionname=gpu", "state=up"])
