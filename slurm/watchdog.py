"""What the supervisor looks at while an attempt runs: hangs, ranks that do not stop or do not end.

The job script sets HANG_TIMEOUT_S and SIGNAL_LEAD_S.
"""

import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runspec import files
from runspec.failure import fault
from slurm.child import Child
from slurm.job_log import say

# A hang is at least this many median steps, or longest saves.
SLOW_STEPS = 5
# Before two steps are done their duration is unknown, and the second may compile, too.
UNKNOWN_S = 600.0
# How long the ranks may take to write their stacks, and srun to end before it is killed. Without
# Slurm that is what started the ranks, which waits for them for 30 s.
ANSWER_S, END_S = 15.0, 45.0
# What remains of the warning's lead for ending the ranks and for the queue.
RESERVE_S = 60.0
# How long srun and what started the ranks may take to end once everything is written, and then to
# obey a TERM.
FINISH_WAIT_S, FINISH_END_S = 60.0, 5.0
# In the stack of a rank that waits for the others.
_WAITS = "torch/distributed/"


@dataclass
class Watch:
    """Finds a hang from the trainer's heartbeat and the stop file, which it is given repeatedly."""

    timeout_s: float  # the recipe's hang_timeout_s, 0 for none
    stop_s: float  # how long after the warning the ranks may take to stop
    _beat: Any = None
    _changed: float = 0.0
    _asked: float | None = None

    def look(self, beat: Any, asked: bool, now: float) -> tuple[str, str] | None:
        """Return a fault's type and message, None if there is none.

        Args:
            beat: the content of heartbeat.json, None if it is missing or being written.
            asked: the ranks were asked to stop.
            now: a monotonic clock, in seconds.
        """
        if asked:
            self._asked = now if self._asked is None else self._asked
            message = f"the ranks did not stop within {self.stop_s:.0f} s of the warning"
            return ("NotStopped", message) if now - self._asked >= self.stop_s else None
        if beat is not None and beat != self._beat:
            self._beat, self._changed = beat, now
        last = self._beat if isinstance(self._beat, dict) else {}
        phase, still_s = last.get("phase"), now - self._changed
        if phase == "training":
            usual, usual_s = "median", last.get("median_step_s")
            limit_s = UNKNOWN_S if usual_s is None else SLOW_STEPS * usual_s
            what = "no step"
        else:
            # The duration of the start, the export, and a first save or validation is unknown:
            # ranks that hang there end by torch's own timeout.
            usual, usual_s = "longest before", (last.get("longest_s") or {}).get(phase)
            limit_s = math.inf if usual_s is None else SLOW_STEPS * usual_s
            what = f"{phase} has not ended"
        if not self.timeout_s or still_s < max(limit_s, self.timeout_s):
            return None
        compared = "" if usual_s is None else f" ({usual} {usual_s:.2f} s)"
        message = f"{what} for {still_s:.0f} s after step {last['step']}{compared}"
        if phase == "saving":
            message += (
                ": the storage hangs, or is slow; if a save may take that long, raise "
                f"hang_timeout_s ({self.timeout_s:.0f} s)"
            )
        return "Hang", message


@dataclass
class Finished:
    """Finds that the run is finished, but its processes are not: every file is written by then."""

    progress: Path
    attempt: int
    wait_s: float
    _since: float | None = None

    def look(self, now: float) -> bool:
        """Return whether that was wait_s ago; now: a monotonic clock, in seconds."""
        if self._since is None:
            wanted = {"state": "finished", "attempt": self.attempt}
            if wanted.items() <= files.peek(self.progress).items():
                self._since = now
        return self._since is not None and now - self._since >= self.wait_s


def stop_limit_s(lead_s: float) -> float:
    """Return how much of the warning's lead the ranks may use to stop."""
    return lead_s - min(RESERVE_S, lead_s / 3)


def ask_for_stacks(logs: Path) -> None:
    """Have every rank write its stacks; return once all have, or after ANSWER_S."""
    (logs / files.ASK_FOR_STACKS).touch()
    deadline = time.monotonic() + ANSWER_S
    while _silent(logs) and time.monotonic() < deadline:
        time.sleep(0.2)


def have_nodes_end_ranks(logs: Path) -> None:
    """Have the nodes end ranks that srun may not have ended; a full disk must not end the job."""
    with suppress(OSError):
        (logs / files.END_RANKS).touch()


def laggards(logs: Path) -> list[tuple[int, str, str]]:
    """Return rank, node and symptom of the ranks that hold up the others.

    Those are the ranks that do not answer; if all do, those that do not wait for the others.
    """
    if silent := _silent(logs):
        return [(rank, node, "does not answer") for rank, node in silent]
    stacks, symptom = _stacks(logs), "is not waiting for the others"
    busy = [(rank, node, symptom) for rank, node, text in stacks if _WAITS not in text]
    return busy if len(busy) < len(stacks) else []


def record(logs: Path, kind: str, message: str) -> None:
    """Write a fault, with the ranks that hold up the others, as a record for the job script."""
    slow = laggards(logs)
    named = ", ".join(f"rank {rank} on {node} {symptom}" for rank, node, symptom in slow[:4])
    more = f" and {len(slow) - 4} more" if len(slow) > 4 else ""
    if slow:
        message += f": {named}{more}"
    # A node is named, and later left out, only if a single rank is at fault.
    rank, node, _ = slow[0] if len(slow) == 1 else (None, None, "")
    where = f"{files.LOGS}/{logs.name}/{files.STACKS.format('*')}"
    found = fault(f"{message}; stacks: {where}", kind, node, permanent=False)
    files.write_json(logs / "error_watchdog.json", {**found, "rank": rank})


def _stacks(logs: Path) -> list[tuple[int, str, str]]:
    """Return rank, node and stacks of every rank that has started."""
    ranks = []
    for path in logs.glob(files.STACKS.format("*")):
        number = path.stem.removeprefix("stack_rank_")
        first, _, stacks = path.read_text(encoding="utf-8", errors="replace").partition("\n")
        if number.isdigit() and first:
            ranks.append((int(number), first.split()[0], stacks))
    return sorted(ranks)


def _silent(logs: Path) -> list[tuple[int, str]]:
    return [(rank, node) for rank, node, text in _stacks(logs) if "most recent call" not in text]


class Watchdog:
    """Looks at a running attempt, and ends it if it hangs, or does not stop in time.

    It also ends processes that remain after the run is finished.
    """

    def __init__(self, run_dir: Path, attempt: int, child: Child) -> None:
        self._run_dir, self._child = run_dir, child
        self._logs = run_dir / files.LOGS / str(attempt)
        stop_s = stop_limit_s(float(os.environ["SIGNAL_LEAD_S"]))
        self._watch = Watch(float(os.environ["HANG_TIMEOUT_S"]), stop_s)
        wait_s = float(os.environ.get("FINISH_WAIT_S", FINISH_WAIT_S))
        self._finished = Finished(run_dir / files.PROGRESS, attempt, wait_s)

    def look(self) -> None:
        """Look once, and do what follows; OSError: a file could not be looked at or written."""
        now = time.monotonic()
        if self._finished.look(now):
            say("the run is finished: its processes are ended")
            have_nodes_end_ranks(self._logs)
            self._end(FINISH_END_S)
            return
        beat = files.peek(self._logs / files.HEARTBEAT)
        found = self._watch.look(beat or None, os.path.exists(self._run_dir / files.STOP), now)
        if found is not None:
            # The ranks are ended even if the record cannot be written.
            with suppress(OSError):
                ask_for_stacks(self._logs)
                record(self._logs, *found)
            say(f"{found[1]}: the attempt is ended")
            self._end(END_S)

    def _end(self, wait_s: float) -> None:
        """End srun and the ranks: by TERM, which srun forwards, else by KILL and by the nodes."""
        if not self._child.end(wait_s, END_S):
            have_nodes_end_ranks(self._logs)
