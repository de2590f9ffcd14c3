"""Ends an attempt whose ranks hang, or do not stop in time: python -P -m slurm.watchdog PID

It also ends what does not end by itself once the run is finished, and the ranks that srun cannot
end, and asks the ranks to stop when the run has used its GPU-hours. slurm/job.sh starts it beside
each attempt, again if it dies, with RUN_DIR, LOGS, ATTEMPT, JOB_PID, HANG_TIMEOUT_S, SIGNAL_LEAD_S
and MAX_GPU_HOURS set. PID is srun, or what starts the nodes if there is no Slurm. Standard library
only.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runspec import files
from runspec.states import process_start
from slurm.history import used_up

POLL_S = 1.0
# A hang is so many median steps, or longest saves, at least.
SLOW_STEPS = 5
# Until two steps are done nobody knows how long one takes, and the second may compile, too.
UNKNOWN_S = 600.0
# So long the ranks may take to write their stacks, and srun to end before it is killed. Without
# Slurm that is torchrun, which waits for its ranks for 30 s.
ANSWER_S, END_S = 12.0, 45.0
# What srun says when a task has ended and the others have not for its --wait seconds: it has Slurm
# end them. A controller that died just after the step began does not know the step, and does not.
LEFT_BEHIND, LEFT_S = b"First task exited", 15.0
# What remains of the warning's lead for ending the ranks and for the queue.
RESERVE_S = 60.0
# Everything is written by then: srun and torchrun may take so long to end, and then to obey a TERM.
FINISH_WAIT_S, FINISH_END_S = 60.0, 5.0


@dataclass
class Watch:
    """Judges what the trainer's heartbeat and the stop file say, look by look.

    timeout_s: the recipe's hang_timeout_s, 0 for none. stop_s: how long after the warning the ranks
    may take to stop.
    """

    timeout_s: float
    stop_s: float
    _beat: Any = None
    _changed: float = 0.0
    _asked: float | None = None

    def look(self, beat: Any, asked: bool, now: float) -> dict[str, Any] | None:
        """Return the record of a fault, None while all is well.

        Args:
            beat: what heartbeat.json holds, None if there is none or it is being written.
            asked: the ranks were asked to stop.
            now: a monotonic clock, in seconds.
        """
        if asked:
            self._asked = now if self._asked is None else self._asked
            if now - self._asked >= self.stop_s:
                message = f"the ranks did not stop within {self.stop_s:.0f} s of the warning"
                return {"type": "NotStopped", "message": message}
            return None
        if beat is not None and beat != self._beat:
            self._beat, self._changed = beat, now
        known = self._beat if isinstance(self._beat, dict) else {}
        usual_s, usual, least_s = self._usual(known)
        still_s = now - self._changed
        if not self.timeout_s or least_s is None or still_s < max(least_s, self.timeout_s):
            return None
        what = "no step" if known["phase"] == "training" else f"{known['phase']} has not ended"
        told = "" if usual_s is None else f" ({usual} {usual_s:.2f} s)"
        message = f"{what} for {still_s:.0f} s after step {known['step']}{told}"
        return {"type": "Hang", "message": message}

    def _usual(self, known: dict[str, Any]) -> tuple[float | None, str, float | None]:
        """Return how long it takes usually, in words, and the limit; None where it has no limit.

        The first step compiles, and nobody knows how long a first save, a first validation, the
        start and the export may take: ranks that wait there end by torch's own time-out.
        """
        if known.get("phase") == "training":
            step_s = known.get("median_step_s")
            return step_s, "median", UNKNOWN_S if step_s is None else SLOW_STEPS * step_s
        longest_s = (known.get("longest_s") or {}).get(known.get("phase"))
        return longest_s, "longest before", None if longest_s is None else SLOW_STEPS * longest_s


@dataclass
class LeftBehind:
    """Reads in the job's log that srun waits for tasks to end.

    start: the byte at which the attempt began.
    """

    log: Path
    start: int
    _since: float | None = None

    def __post_init__(self) -> None:
        self._read = self.start

    def look(self, now: float) -> bool:
        """Return whether srun has said so LEFT_S ago; now: a monotonic clock, in seconds."""
        if self._since is None:
            try:
                with self.log.open("rb") as file:
                    file.seek(self._read)
                    text = file.read()
            except OSError:
                return False
            # A line that is being written is read again.
            whole = text.rpartition(b"\n")[0]
            self._read += len(whole)
            self._since = now if LEFT_BEHIND in whole else None
        return self._since is not None and now - self._since >= LEFT_S


@dataclass
class Finished:
    """Sees that the run is finished, but its processes are not: every file is written by then."""

    progress: Path
    attempt: int
    wait_s: float
    _since: float | None = None

    def look(self, now: float) -> bool:
        """Return whether that was wait_s ago; now: a monotonic clock, in seconds."""
        if self._since is None:
            told = files.read_json_or_none(self.progress)
            wanted = {"state": "finished", "attempt": self.attempt}
            if isinstance(told, dict) and all(told.get(key) == wanted[key] for key in wanted):
                self._since = now
        return self._since is not None and now - self._since >= self.wait_s


def stop_limit_s(lead_s: float) -> float:
    """Return how much of the warning's lead the ranks may use to stop."""
    return lead_s - min(RESERVE_S, lead_s / 3)


def ask_for_stacks(logs: Path) -> None:
    """Have every rank write its stacks; return once all have, or after ANSWER_S."""
    (logs / files.ASK_FOR_STACKS).touch()
    _wait(lambda: not _silent(logs), ANSWER_S)


def laggards(logs: Path) -> list[tuple[int, str, str]]:
    """Return rank, node and what is wrong with it of the ranks that hold up the others.

    A rank that does not answer is one; else those that are not waiting for the others.
    """
    silent = _silent(logs)
    if silent:
        return [(rank, node, "does not answer") for rank, node in silent]
    waiting, busy = [], []
    for rank, node, text in _stacks(logs):
        (waiting if "torch/distributed/" in text else busy).append((rank, node))
    return [(rank, node, "is not waiting for the others") for rank, node in busy if waiting]


def record(logs: Path, fault: dict[str, Any]) -> None:
    """Write the fault, with the ranks that lag, where the job script finds it."""
    found = laggards(logs)
    named = ", ".join(f"rank {rank} on {node} {what}" for rank, node, what in found[:4])
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    message = f"{fault['message']}: {named}{more}" if found else fault["message"]
    # Of one rank only: a node is blamed for it.
    rank, node, _ = found[0] if len(found) == 1 else (None, None, "")
    where = f"{files.LOGS}/{logs.name}/{files.STACKS.format('*')}"
    files.write_json(
        logs / "error_watchdog.json",
        {
            **fault,
            "rank": rank,
            "host": node,
            "time": time.time(),
            "message": f"{message}; stacks: {where}",
            "permanent": False,
        },
    )


def _stacks(logs: Path) -> list[tuple[int, str, str]]:
    """Return rank, node and stacks of every rank that has started."""
    found = []
    for path in logs.glob(files.STACKS.format("*")):
        number = path.stem.removeprefix("stack_rank_")
        first, _, stacks = path.read_text(encoding="utf-8", errors="replace").partition("\n")
        if number.isdigit() and first:
            found.append((int(number), first.split()[0], stacks))
    return sorted(found)


def _silent(logs: Path) -> list[tuple[int, str]]:
    return [(rank, node) for rank, node, text in _stacks(logs) if "most recent call" not in text]


def _wait(done: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.2)
    return True


def _end(pid: int, logs: Path, wait_s: float = END_S) -> None:
    """End srun and so the ranks: by TERM, which it passes on, else by KILL and by the nodes."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        if _wait(lambda: process_start(pid) is None, wait_s):
            return
        os.kill(pid, signal.SIGKILL)
        _wait(lambda: process_start(pid) is None, END_S)
        _have_nodes_end_ranks(logs)


def _have_nodes_end_ranks(logs: Path) -> None:
    # A filesystem that takes no file must not keep srun alive.
    with suppress(OSError):
        (logs / files.END_RANKS).touch()


def _is_used_up(run_dir: Path) -> bool:
    """Whether the run has used its GPU-hours."""
    if not os.environ.get("MAX_GPU_HOURS"):
        return False
    status = files.read_json_or_none(run_dir / files.STATUS)
    return isinstance(status, dict) and bool(used_up(run_dir, {**status, "ended": time.time()}))


def main() -> None:
    pid, script = int(sys.argv[1]), int(os.environ["JOB_PID"])
    script_start = process_start(script)
    run_dir, logs = Path(os.environ["RUN_DIR"]), Path(os.environ["LOGS"])
    stop_s = stop_limit_s(float(os.environ["SIGNAL_LEAD_S"]))
    watch = Watch(float(os.environ["HANG_TIMEOUT_S"]), stop_s)
    status = files.read_json_or_none(run_dir / files.STATUS)
    began = status.get("job_log_bytes") if isinstance(status, dict) else 0
    left_behind = LeftBehind(run_dir / files.JOB_LOG, began if isinstance(began, int) else 0)
    wait_s = float(os.environ.get("FINISH_WAIT_S", FINISH_WAIT_S))
    finished = Finished(run_dir / files.PROGRESS, int(os.environ["ATTEMPT"]), wait_s)
    asked = told = False
    while process_start(pid) is not None and process_start(script) == script_start:
        if finished.look(time.monotonic()):
            print("cookbook: the run is finished: its processes are ended", file=sys.stderr)
            _have_nodes_end_ranks(logs)
            _end(pid, logs, FINISH_END_S)
            return
        if not asked and _is_used_up(run_dir):
            asked = True
            print("cookbook: max_gpu_hours is reached: the ranks save and stop", file=sys.stderr)
            (run_dir / files.STOP).touch()
        if not told and left_behind.look(time.monotonic()):
            told = True
            print("cookbook: srun could not end the other ranks: nodes end them", file=sys.stderr)
            _have_nodes_end_ranks(logs)
        beat = files.read_json_or_none(logs / files.HEARTBEAT)
        fault = watch.look(beat, (run_dir / files.STOP).exists(), time.monotonic())
        if fault is not None:
            # A filesystem that takes no record does not keep the ranks.
            with suppress(OSError):
                ask_for_stacks(logs)
                record(logs, fault)
            print(f"cookbook: {fault['message']}: the attempt is ended", file=sys.stderr)
            _end(pid, logs)
            return
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
