"""cookbook watch: the live view on a terminal, and plain lines where there is none."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from launcher.look import watch as watching
from launcher.look.live import View, sparkline
from launcher.run.directory import Run
from launcher.run.states import State
from tests.launcher.kit import Kit

NAMES = ("20260102-030405-one-0a1b", "20260102-030405-two-0a1b")


def made(root: Path, name: str) -> Run:
    run = Run(root / "runs" / name)
    (run.logs / "1").mkdir(parents=True)
    run.write("submission.json", {"recipe": "demo", "jobs": [{"job_id": "7"}]})
    record = {"attempt": 1, "nodes": ["n1"], "started": time.time() - 60}
    run.write("status.json", {"job_id": "7", "state": "RUNNING", **record})
    run.write("progress.json", {"total_steps": 100, "step": 10})
    steps = [
        {"step": k, "loss": 5 - k / 10, "step_time_s": 2.0, "tokens_per_second_per_gpu": 1234.0}
        for k in range(1, 41)
    ]
    lines = [json.dumps(step) for step in steps]
    (run.path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 41, "lo']))
    failed = {"attempt": 0, "cause": "killed", "message": "rank 1 on n1: Killed"}
    (run.path / "attempts.jsonl").write_text(json.dumps(failed) + "\n")
    (run.logs / "1/rank_0.log").write_text("bar 1%\rbar 99%\nevil \x1b[2J[bold]line\n")
    return run


_LAUNCHER = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from launcher.cli import main
main()
"""


class Terminal:
    """A command on a terminal of 100 columns, and what it has written there."""

    def __init__(self, env: dict[str, str], *arguments: str) -> None:
        master, slave = pty.openpty()
        self._master, self.text = master, ""
        self.process = subprocess.Popen(
            # Where the tests run in the background Ctrl-C is ignored, and a child inherits that.
            [sys.executable, "-c", _LAUNCHER, *arguments],
            env={**env, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)

    def until(self, words: str, limit_s: float = 30) -> float:
        """Read until the words are there; return the seconds that took."""
        began = time.monotonic()
        while words not in self.text:
            assert time.monotonic() - began < limit_s, self.text[-3000:]
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self._master, 65536).decode(errors="replace")
                except OSError:
                    break
        return time.monotonic() - began

    def end(self) -> int:
        code = self.process.wait(timeout=30)
        os.close(self._master)
        return code


def test_the_live_view_shows_runs_to_their_end_while_the_controller_hangs(tmp_path, user: Kit):
    """squeue is a program that does not answer; the runs' own files say all."""
    runs = [made(tmp_path, name) for name in NAMES]
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "squeue").write_text("#!/bin/bash\nexec sleep 20\n")
    (tools / "squeue").chmod(0o755)
    env = {**user.env, "COOKBOOK_ROOT": str(tmp_path), "PATH": f"{tools}:{user.env['PATH']}"}
    terminal = Terminal(env, "watch", *NAMES)
    terminal.until("step 40/100")
    terminal.until("bar 99%")
    shown = re.sub(r"\x1b\[[0-9;]*m", "", terminal.text)
    for words in ("about 2 min 0 s left", "loss 4.9 -> 1", "█", "1,234 tokens/s per GPU"):
        assert words in shown, shown
    assert "attempt 0 killed: rank 1 on n1: Killed" in shown and "bar 1%" not in shown
    # Neither markup nor a control character of a log is obeyed.
    assert "evil \\x1b[2J[bold]line" in shown
    with (runs[0].path / "metrics.jsonl").open("a") as metrics:
        metrics.write('ss": 0.5}\n')
    terminal.until("step 41/100", 5)
    for run in runs:
        run.write("status.json", {**run.status, "state": "COMPLETED"})
    terminal.until(f"{NAMES[1]} COMPLETED")
    assert terminal.end() == 0


def test_ctrl_c_stops_watching_and_not_the_run(tmp_path, user: Kit):
    made(tmp_path, NAMES[0])
    terminal = Terminal({**user.env, "COOKBOOK_ROOT": str(tmp_path)}, "watch", NAMES[0])
    terminal.until("step 40/100")
    terminal.process.send_signal(signal.SIGINT)
    terminal.until(f"the run continues; follow it with: cookbook watch {NAMES[0]}")
    assert terminal.end() == 130


LINE = "evil \\x1b[2J[bold]line"


def test_without_a_terminal_there_are_lines_marked_with_their_run(tmp_path):
    runs = [made(tmp_path, name) for name in NAMES]
    for run in runs:
        run.write("status.json", {**run.status, "state": "COMPLETED"})
    said: list[str] = []
    states = watching.watch_all(runs, said.append, poll_s=0.01)
    assert [state.word for state in states] == ["COMPLETED", "COMPLETED"]
    assert {f"{name} | {text}" for name in NAMES for text in ("bar 99%", LINE)} <= set(said)


def shown(view: View) -> str:
    """The text of the live view of a run that trains."""
    console = Console(width=150, file=io.StringIO())
    console.print(view.panel(State("RUNNING", "the job"), 150, 30))
    return console.file.getvalue()


def test_steps_that_are_done_again_replace_the_lost_ones(tmp_path):
    run = made(tmp_path, NAMES[0])
    view = View(run)
    assert "loss 4.9 -> 1" in shown(view)
    lines = [json.dumps({"step": step, "loss": 9.0}) for step in (1, 2)]
    (run.path / "metrics.jsonl").write_text("\n".join([*lines, "", "7", "x"]) + "\n")
    assert "loss 9 -> 1" in shown(view)


def step_line(step: int) -> str:
    return f"step {step:>3}/100  epoch  1/22  loss   3.1234  lr 3.00e-03"


def test_the_live_view_shows_the_newest_of_many_step_lines(tmp_path):
    run = made(tmp_path, NAMES[0])
    with (run.logs / "1/rank_0.log").open("a") as log:
        log.write("\n".join([*map(step_line, range(1, 60)), "saved", ""]))
    text = shown(View(run))
    assert "step  59/100" in text and "saved" in text and "step  58/" not in text


def test_the_live_view_shows_both_roles(tmp_path):
    run = made(tmp_path, NAMES[0])
    samplers = [{"sampler": n, "node": f"n{n}", "state": "ready", "restarts": n} for n in (1, 2)]
    death = {"sampler": 2, "node": "n2", "reason": "killed by SIGKILL", "time": 1.0}
    roles = {"samplers": [*samplers, {"state": "starting"}], "deaths": [death]}
    (run.path / "rollout.json").write_text(json.dumps(roles))
    told = "samplers: 2 ready, 1 starting; last one ended: 2 on n2, killed by SIGKILL"
    assert told in shown(View(run))


@pytest.mark.parametrize(
    ("values", "width", "curve"),
    [
        ([8, 7, 6, 5, 4, 3, 2, 1], 8, "█▇▆▅▄▃▂▁"),
        ([2, 2, 1, 1], 2, "█▁"),
        ([1.0], 9, "▁"),
        ([3, 3, 3], 9, "▁▁▁"),
    ],
)
def test_sparklines(values, width, curve):
    assert sparkline(values, width) == curve
