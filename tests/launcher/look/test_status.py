"""cookbook status: the table, its filters, one run's story, and many runs at once."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from launcher.look.status import chosen, row, table
from launcher.look.summary import story
from launcher.look.text import plain
from launcher.run import states as judging
from launcher.run.directory import Run
from launcher.run.find import every
from launcher.run.states import judged, state_of
from tests.launcher.kit import Kit

ASKED = {"nodes": 2, "gpus_per_node": 4, "time": "01:00:00"}


def made(root: Path, name: str, state: str = "COMPLETED", recipe: str = "demo", **status) -> Run:
    """A run directory with what submit, the job and the trainer write."""
    run = Run(root / "runs" / name)
    (run.path / "logs").mkdir(parents=True)
    run.write("submission.json", {"recipe": recipe, "jobs": [{"job_id": "7"}], "asked": ASKED})
    times = {"started": 1000.0, "updated": 1130.0, "ended": 1130.0}
    record = {"job_id": "7", "attempt": 0, "nodes": ["n1", "n2"], **times, "state": state}
    run.write("status.json", record | status)
    rates = {"tokens_per_second_per_gpu": 1234.5, "mfu": 0.412}
    progress = {"step": 50, "total_steps": 100, "loss_last": 0.5, "checkpoint_step": 40}
    run.write("progress.json", {**progress, **rates, "state": "running"})
    step = {"step": 60, "loss": 0.25, "step_time_s": 2.0, "mfu": 0.5, "time": 1100.0}
    (run.path / "metrics.jsonl").write_text(f"{json.dumps(step)}\n" + '{"step": 70, "lo')
    return run


def test_a_line_says_how_a_run_stands(tmp_path):
    run = made(tmp_path, "20260102-030405-demo-0a1b", "FAILED", message="rank 1 on n2: Killed")
    found = row(run, state_of(run))
    assert (found["recipe"], found["node_count"], found["gpus_per_node"]) == ("demo", 2, 4)
    # The newest whole line of the metrics is newer than progress.json.
    steps = (found["step"], found["total_steps"])
    assert (steps, found["loss"], found["mfu"]) == ((60, 100), 0.25, 0.5)
    assert (found["used_s"], found["left_s"]) == (130.0, None)
    heading, line = table([found])
    columns = "RUN RECIPE STATE JOB SIZE STEP LOSS TOK/S/GPU MFU USED LEFT REASON"
    assert " ".join(heading.split()) == columns

    for cell in ("FAILED", "2x4", "60/100", "0.2500", "50.0 %", "2 min 10 s", "n2: Killed"):
        assert cell in line


def test_the_time_left_follows_the_newest_pace(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm to ask: the job's own word counts
    run = made(tmp_path, "20260102-030405-demo-0a1b", "RUNNING", ended=None)
    assert row(run, state_of(run))["left_s"] == 80.0


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_the_table_fits_the_terminal_and_loses_no_reason(tmp_path, width):
    message = "rank 1 on n2: Killed: killed by SIGKILL (out of memory?), and what else it said"
    run = made(tmp_path, "20260102-030405-demo-0a1b", "FAILED", message=message)
    shown = list(table([row(run, state_of(run))], width))
    assert all(len(line) <= width for line in shown), shown
    words = " ".join(" ".join(shown).split())
    assert message in words
    assert run.name in shown[1] and "FAILED" in shown[1]


def test_earlier_attempts_count_as_time_used(tmp_path):
    run = made(tmp_path, "20260102-030405-demo-0a1b", attempt=1, started=1100.0)
    lines = [
        {"attempt": 0, "started": 500.0, "ended": 900.0, "cause": "killed", "nodes": ["n1"]},
        {"attempt": 1, "started": 1100.0, "ended": 1130.0, "cause": "finished", "nodes": ["n1"]},
    ]
    (run.path / "attempts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert row(run, state_of(run))["used_s"] == 430.0
    told = "\n".join(story(run, state_of(run)))
    assert re.search(r"attempts +0  1970-01-01 00:08:20 UTC +6 min 40 s .* on n1 +killed", told)
    assert re.search(r"\n +1  1970-01-01 00:18:20 UTC +30 s .* finished", told)
    assert "time limit 01:00:00" in told and "8 GPUs" not in told and "x 4 GPUs" in told


def test_the_newest_are_listed(tmp_path):
    for k in range(30):
        state = "FAILED" if k % 10 == 0 else "COMPLETED"
        made(tmp_path, f"202601{k + 1:02}-030405-demo-0a1b", state, "other" if k % 2 else "demo")
    runs = every(tmp_path / "runs")
    days = [each["run"][6:8] for each in chosen(runs, 20)]
    assert days == [f"{day:02}" for day in range(11, 31)]
    assert len(chosen(runs)) == 30


def test_what_is_no_run_is_passed_over(tmp_path, user: Kit):
    user = Kit({**user.env, "COOKBOOK_ROOT": str(tmp_path)}, tmp_path)
    whole = made(tmp_path, "20260102-030405-demo-0a1b")
    root = tmp_path / "runs"
    (root / "20260103-030405-torn-0a1b" / "logs").mkdir(parents=True)
    (root / "20260104-030405-file-0a1b").touch()
    (root / ".tmp-20260104-030405-made-0a1b").mkdir()
    for options in ((), ("--all",)):
        done = user.cookbook("status", *options)
        assert done.returncode == 0 and len(done.stdout.splitlines()) == 2, done.stdout
        assert whole.name in done.stdout


def test_no_run_moves_the_terminal(tmp_path):
    """Messages hold what users and programs wrote, escape sequences too."""
    evil = "gone\x1b]0;owned\x07\x1b[2J\r\nnext\u202eline"
    run = made(tmp_path, "20260102-030405-demo-0a1b", "FAILED", f"r\x1b[1m{evil}", message=evil)
    state = state_of(run)
    for line in [*table([row(run, state)]), *table([row(run, state)], 60), *story(run, state)]:
        assert line.isprintable(), line
    assert plain("\x1b[31mred\x1b[0m\tand\x1b[2K") == "red\tand\\x1b[2K"


def test_a_last_word_that_comes_while_slurm_is_asked_counts(tmp_path, monkeypatch):
    run = made(tmp_path, "20260102-030405-demo-0a1b", "RUNNING", ended=None)

    class Slow:
        def states(self, jobs):
            run.write("status.json", {**run.status, "state": "COMPLETED"})
            return {job.token: judging.State("COMPLETED", "squeue", "", True) for job in jobs}

    monkeypatch.setattr(judging, "executor_of", lambda job_id: Slow())
    ((_, state),) = judged([run])
    assert (state.word, state.source, state.detail) == ("COMPLETED", "status.json", "")


def test_many_runs_are_one_question(tmp_path, slurm, kit: Kit):
    """With a real squeue in front of which a script counts the calls."""
    for k in range(300):
        state = "COMPLETED" if k % 3 else "RUNNING"
        made(tmp_path, f"20260102-{k // 60:02}{k % 60:02}00-demo-0a1b", state)
    tools, count = tmp_path / "tools", tmp_path / "count"
    tools.mkdir()
    for name in ("squeue", "sacct"):
        real = subprocess.check_output(["which", name], env=kit.env, text=True).strip()
        script = f'#!/bin/bash\necho {name} >>{count}\nexec {real} "$@"\n'
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)
    env = {**kit.env, "COOKBOOK_ROOT": str(tmp_path), "PATH": f"{tools}:{kit.env['PATH']}"}
    done = Kit(env, tmp_path).cookbook("status", "--all", "--json")
    assert len(json.loads(done.stdout)) == 300, done.stderr
    asked = count.read_text().split()
    assert asked.count("squeue") == 1 and asked.count("sacct") <= 1
