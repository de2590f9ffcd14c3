"""Following a run to its end."""

import random
import time
from collections.abc import Callable

from launcher.observe.logs import Tail
from launcher.runs.directory import Run
from launcher.runs.states import State, own_state, state_of
from runspec.states import FINAL

# An end that only squeue, sacct or this host reports must last this long to be believed: Slurm may
# requeue the job, and the job may still be writing its own state.
_DOUBT_S = 10.0


def watch(run: Run, say: Callable[[str], None], poll_s: float = 1.0) -> State:
    """Say a run's states and its log lines until it has ended; return the last state."""
    tail = Tail(run)
    said, next_question, pause_s = "", 0.0, 2.0
    ended_at: float | None = None
    while True:
        now = time.monotonic()
        # The job's own file costs nothing to read; the controller is asked seldom.
        if now >= next_question or own_state(run) in FINAL:
            state = state_of(run)
            words = f"{state.word}{f' ({state.detail})' if state.detail else ''}"
            if words != said and not state.ended:
                say(f"{run.name}: {words}")
                said, pause_s = words, 2.0
            # A cluster has many watchers: ask less and less often while nothing changes.
            next_question = now + pause_s * random.uniform(0.8, 1.2)
            pause_s = 2.0 if state.ended else min(60.0, pause_s * 1.5)
        for line in tail.new_lines():
            say(line)
        ended_at = (ended_at or now) if state.ended else None
        if ended_at and (state.source == "status.json" or now - ended_at > _DOUBT_S):
            for line in tail.new_lines():
                say(line)
            return state
        time.sleep(poll_s)
