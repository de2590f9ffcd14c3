"""Scores of answers from processes of their own, which may hang, die or raise.

Such an answer has no score, and is counted; the process is replaced. The rank goes on. So it is
with environments, which answer each turn of the policy's and score it.
"""

import os
import pickle
import signal
import subprocess
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from plugins.rl.recipe_keys import BUILT_IN, REWARD_MODEL
from runspec import files
from runspec.hints import nearest
from trainer.errors import ConfigError

# Until a user's module is imported, which may import large packages.
LOAD_LIMIT_S = 120.0
# Answers that a process has at most, and bytes of them: a socket holds more, so no sending waits.
AHEAD, AHEAD_BYTES = 8, 2**16
ROOT = Path(__file__).parents[3]


class Answer(NamedTuple):
    """What a reward function sees of an answer; row: the columns of its prompt's sample."""

    prompt: str
    completion: str
    tokens: list[int]
    row: Mapping[str, Any]


class Turn(NamedTuple):
    """What an environment is asked: the row, and the answers so far, the last of them new."""

    row: Mapping[str, Any]
    answers: list[str]
    episode: str


class Reply(NamedTuple):
    """What an environment says: the turns that follow, None if it has ended; and a score."""

    turns: list[dict[str, Any]] | None
    score: float | None


class Scores(NamedTuple):
    """Of one answer: by function its score, None if it skips it; failed: whether one has none."""

    scores: dict[str, float | None]
    failed: bool

    def total(self, weights: Mapping[str, float]) -> float | None:
        """The weighted sum; None if a function failed, or all of them skip the answer."""
        known = [weights[name] * score for name, score in self.scores.items() if score is not None]
        return None if self.failed or not known else sum(known)


def faults(rewards: Any, timeout_s: float) -> list[str]:
    """What of the key `rewards` cannot be used, a line each; no function is started."""
    if not rewards:
        return ["rewards: name at least one: +rewards.correct.function=exact_match"]
    faults = []
    if len(environments := environments_of(rewards)) > 1:
        faults.append(f"rewards: only one may have turns, not {' and '.join(environments)}")
    for name, block in rewards.items():
        key = f"rewards.{name}"
        if not isinstance(block, dict) or not isinstance(block.get("function"), str):
            known = ", ".join(BUILT_IN)
            faults.append(f"{key}: needs a function: {known}, FILE.py:NAME or MODULE:NAME")
            continue
        function = block["function"]
        if not isinstance(turns := block.get("turns", 1), int) or turns < 1:
            faults.append(f"{key}.turns: must be a number of answers, got {turns!r}")
        weight = block.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            faults.append(f"{key}.weight: must be a number, got {weight!r}")
        own = set(block) - {"function", "weight"}
        if function in BUILT_IN:
            if unknown := sorted(own - {*BUILT_IN[function]}):
                hint = nearest(unknown[0], BUILT_IN[function])
                faults.append(f"{key}.{unknown[0]}: {function} does not take it{hint}")
            if function == "code" and float(block.get("seconds") or 10) >= timeout_s:
                faults.append(
                    f"{key}.seconds: must be less than reward_timeout={timeout_s:g}, which ends "
                    "the process that starts the programs"
                )
            continue
        where, colon, _ = function.rpartition(":")
        if not colon:
            hint = nearest(function, BUILT_IN)
            faults.append(
                f"{key}.function: there is no {function!r}{hint}: it is one of "
                f"{', '.join(BUILT_IN)}, FILE.py:NAME or MODULE:NAME"
            )
        elif own - {"turns"}:
            least = min(own - {"turns"})
            faults.append(f"{key}.{least}: a function of your own takes weight, a class turns, too")
        elif where.endswith(".py") and not Path(where).is_file():
            faults.append(f"{key}.function: there is no file {where}")
    return faults


def environments_of(rewards: Mapping[str, Any]) -> dict[str, int]:
    """The rewards that are environments, and how many answers an episode of each has at most."""
    blocks = {name: block for name, block in rewards.items() if isinstance(block, dict)}
    return {name: block["turns"] for name, block in blocks.items() if block.get("turns")}


def weights_of(rewards: Mapping[str, Any]) -> dict[str, float]:
    """The weight of each function."""
    return {name: float(block.get("weight", 1.0)) for name, block in rewards.items()}


def identity(rewards: Mapping[str, Any]) -> dict[str, Any]:
    """What must stay the same at resume: the blocks, and the content of the user's files.

    A file is identified by its content, wherever it is.
    """
    blocks: dict[str, Any] = {}
    for name, block in sorted(rewards.items()):
        where, _, function = str(block["function"]).rpartition(":")
        path = Path(where) if where.endswith(".py") else None
        if where and path is None:
            with suppress(ImportError, ValueError):
                spec = find_spec(where)
                path = Path(spec.origin) if spec is not None and spec.origin else None
        sha = files.sha256(path)[:16] if path is not None and path.is_file() else ""
        own = f"{sha}:{function}" if sha else block["function"]
        blocks[name] = {**block, "function": own}
    return blocks


class _Worker:
    """A process that scores. tasks: each an answer's index and a function, the first of them under
    way. limit: when that, or the loading, must end.
    """

    def __init__(self, rewards: Mapping[str, Any]) -> None:
        self.connection, other = Pipe()
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "plugins.rl.rewards.worker", str(other.fileno())],
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        other.close()
        self.tasks: deque[tuple[int, str]] = deque()
        self._sent = 0  # bytes since it had no task
        self.limit = time.monotonic() + LOAD_LIMIT_S
        self.ready = False
        with suppress(OSError):  # it is dead already, which is seen when it is asked
            self.connection.send(dict(rewards))

    def gives(self, task: tuple[int, str], content: Answer | Turn, timeout_s: float) -> bool:
        """Send a task, unless the connection may be full: a process that hangs reads nothing."""
        message = pickle.dumps((task[1], *content))
        if not self.tasks:
            self.limit, self._sent = time.monotonic() + timeout_s, 0
        elif self._sent + len(message) > AHEAD_BYTES:
            return False
        self.tasks.append(task)
        self._sent += len(message)
        with suppress(OSError):
            self.connection.send_bytes(message)
        return True

    def taken(self, timeout_s: float) -> tuple[int, str] | None:
        """The task that has ended; the time of the next one begins."""
        self.limit = time.monotonic() + timeout_s
        return self.tasks.popleft() if self.tasks else None

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()


class Pool:
    """The processes of one rank.

    messages: what the first failed score said, by function and kind (raised, died, timeout).

    Raises:
        ConfigError: a function cannot be loaded; with its file and line.
    """

    def __init__(self, rewards: Mapping[str, Any], workers: int, timeout_s: float) -> None:
        own = {n: block for n, block in rewards.items() if block["function"] != REWARD_MODEL}
        self._rewards, self._timeout_s = own, timeout_s
        self.messages: dict[tuple[str, str], str] = {}
        self._workers = [_Worker(self._rewards) for _ in range(workers)]
        try:
            for worker in self._workers:
                if not worker.connection.poll(LOAD_LIMIT_S):
                    raise ConfigError(f"rewards: loading them took over {LOAD_LIMIT_S:.0f} s")
                self._loaded(worker)
        except BaseException:
            self.close()
            raise

    def score(self, answers: Sequence[Answer]) -> list[Scores]:
        """The scores of answers, in their order, by the functions."""
        names = [name for name, block in self._rewards.items() if not block.get("turns")]
        scores = [Scores({}, False) for _ in answers]

        def scored(task: tuple[int, str], score: float | None) -> None:
            scores[task[0]].scores[task[1]] = score

        tasks = deque((index, name) for index in range(len(answers)) for name in names)
        for index in self._run([tasks], answers, scored):
            scores[index] = scores[index]._replace(failed=True)
        return scores

    def step(self, name: str, turns: Sequence[Turn]) -> list[Reply | None]:
        """What the environment of this name says to each, in their order; None if it failed.

        The turns of an episode are one process's, in the order in which they are asked.
        """
        replies: list[Reply | None] = [None] * len(turns)

        def replied(task: tuple[int, str], reply: Reply) -> None:
            replies[task[0]] = reply

        queues: list[deque[tuple[int, str]]] = [deque() for _ in self._workers]
        for index, turn in enumerate(turns):
            queues[zlib.crc32(turn.episode.encode()) % len(queues)].append((index, name))
        self._run(queues, turns, replied)
        return replies

    def _run(
        self,
        queues: Sequence[deque[tuple[int, str]]],
        messages: Sequence[Answer | Turn],
        done: Callable[[tuple[int, str], Any], None],
    ) -> list[int]:
        """Give the tasks of each process's queue, or of one that all share; what failed."""
        waiting, without = sum(map(len, queues)), list[int]()
        # As few as leave each process some until the end.
        ahead = max(1, min(AHEAD, waiting // (2 * max(1, len(self._workers)))))

        def failed(worker: _Worker, kind: str, said: str) -> None:
            nonlocal waiting
            if (task := worker.taken(self._timeout_s)) is not None:
                index, name = task
                without.append(index)
                self.failed(name, kind, said)
                waiting -= 1

        def replace(worker: _Worker) -> None:
            place = self._workers.index(worker)
            queues[place % len(queues)].extendleft(reversed(worker.tasks))
            worker.close()
            self._workers[place] = _Worker(self._rewards)

        def receive(worker: _Worker) -> None:
            """Take what has come; EOFError or OSError if the process is gone."""
            nonlocal waiting
            if not worker.ready:
                self._loaded(worker)
                return
            while True:
                result, said = worker.connection.recv()
                if said is not None:
                    failed(worker, "raised", said)
                elif (task := worker.taken(self._timeout_s)) is not None:
                    done(task, result)
                    waiting -= 1
                if not worker.connection.poll():
                    return

        while waiting:
            for place, worker in enumerate(self._workers):
                queue = queues[place % len(queues)]
                # Given in groups, so that no process waits for its next one.
                while worker.ready and queue and len(worker.tasks) < ahead:
                    if not worker.gives(queue[0], messages[queue[0][0]], self._timeout_s):
                        break
                    queue.popleft()
            busy = [each for each in self._workers if each.tasks or not each.ready]
            limit = min(each.limit for each in busy)
            seen = wait([each.connection for each in busy], max(0.0, limit - time.monotonic()))
            for worker in busy:
                if worker.connection in seen:
                    try:
                        receive(worker)
                    except (EOFError, OSError):
                        failed(worker, "died", "its process ended")
                        replace(worker)
                elif time.monotonic() >= worker.limit:
                    failed(worker, "timeout", f"took over {self._timeout_s:g} s")
                    replace(worker)
        return without

    def _loaded(self, worker: _Worker) -> None:
        """Take the answer of a worker that loads its functions."""
        try:
            said = worker.connection.recv()
        except (EOFError, OSError):
            said = "loading them ended the process"
        if said is not None:
            raise ConfigError(f"rewards.{said}")
        worker.ready = True

    def failed(self, name: str, kind: str, said: str) -> None:
        """Keep what the first failed score of its kind said."""
        self.messages.setdefault((name, kind), said)

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()
        self._workers = []
