"""Following runs to their end: plain lines, and what the live view shows."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from launcher.look.logs import Tail
from launcher.look.text import plain
from launcher.run.directory import Run
from launcher.run.states import State, judged, own_state, state_of
from runspec.states import FINAL

# A cluster has many watchers: the controller is asked this seldom, in one question for all runs.
ASK_S = 15.0
# An end that only squeue, sacct or this host reports must last this long to be believed: Slurm may
# requeue the job, and the job may still be writing its own state. Slurm is asked once more in it.
_DOUBT_S = 17.0


class States:
    """The states of runs, asked of Slurm in the background: a controller that hangs stops nobody.

    What a job writes itself is read at every look, which costs the controller nothing.
    """

    def __init__(self) -> None:
        # By name: what Slurm said, what the job itself had said then, and when an end was seen.
        self._asked: dict[str, tuple[State, str]] = {}
        self._ended_at: dict[str, float] = {}
        self._thread: threading.Thread | None = None
        self._next = 0.0

    def look(self, run: Run) -> State | None:
        """Return a run's state now, None while nobody has said anything."""
        own = own_state(run)
        if own in FINAL and not run.starting:
            return state_of(run)  # no question to Slurm
        asked, before = self._asked.get(run.name, (None, ""))
        if own and (asked is None or own != before):
            nodes, message = run.status.get("nodes"), str(run.status.get("message") or "")
            on = f"on {', '.join(map(str, nodes))}" if isinstance(nodes, list) else ""
            return State(own, "the job", on if own == "RUNNING" else message, job_id=run.job_id)
        return asked

    def ended(self, run: Run, state: State | None) -> bool:
        """Whether a run has ended beyond doubt."""
        now = time.monotonic()
        if state is None or not state.ended:
            self._ended_at.pop(run.name, None)
            return False
        since = self._ended_at.setdefault(run.name, now)
        return state.source == "status.json" or now - since > _DOUBT_S

    def ask(self, runs: Sequence[Run]) -> None:
        """Ask Slurm about runs in the background, unless that is going on or was done just now."""
        busy = self._thread is not None and self._thread.is_alive()
        if busy or time.monotonic() < self._next or not runs:
            return
        self._next = time.monotonic() + ASK_S * random.uniform(1.0, 1.1)
        self._thread = threading.Thread(target=self._ask, args=[list(runs)], daemon=True)
        self._thread.start()

    def followed(self, runs: Sequence[Run], poll_s: float) -> Iterator[dict[str, State | None]]:
        """Yield what is known of runs, by their names, again and again until all have ended."""
        while True:
            known = {run.name: self.look(run) for run in runs}
            yield known
            left = [run for run in runs if not self.ended(run, known[run.name])]
            if not left:
                return
            self.ask(left)
            time.sleep(poll_s)

    def _ask(self, runs: Sequence[Run]) -> None:
        before = {run.name: own_state(run) for run in runs}
        for run, state in judged(runs):
            self._asked[run.name] = (state, before[run.name])


def watch_all(runs: Sequence[Run], say: Callable[[str], None], poll_s: float = 1.0) -> list[State]:
    """Say the states of runs and their log lines until all have ended; return the last states.

    Of several runs each line begins with the run that it is of.
    """
    tails = {run.name: Tail(run) for run in runs}
    said: dict[str, str] = {}

    def show(run: Run) -> None:
        mark = f"{run.name} | " if len(runs) > 1 else ""
        for line in tails[run.name].new_lines():
            shown = line.rstrip("\r").rpartition("\r")[2]  # of a progress bar its last state
            say(plain(f"{mark}{shown}"))

    for known in States().followed(runs, poll_s):
        for run in runs:
            state = known[run.name]
            if state is not None and not state.ended:
                text = f"{state.word}{f' ({state.detail})' if state.detail else ''}"
                if text != said.get(run.name):
                    say(plain(f"{run.name}: {text}"))
                    said[run.name] = text
            show(run)
    for run in runs:
        # Once more, for what was written while the states were looked at.
        show(run)
    return [state for state in known.values() if state is not None]
