"""Scores of answers from processes of their own, which may hang, die or raise.

Such an answer has no score, and is counted; the process is replaced. The rank goes on. So it is
with environments, which answer each turn of the policy's and score it.
"""

import os
import pickle
import signal
import subprocess
import sys
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing import Pipe
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
    """What a reward function sees of an answer."""

    prompt: str
    completion: str
    tokens: list[int]
    # The columns of its prompt's sample.
    row: Mapping[str, Any]


class Turn(NamedTuple):
    """What an environment is asked."""

    # The columns of the prompt's sample.
    row: Mapping[str, Any]
    # So far, the last of them new.
    answers: list[str]
    episode: str


class Task(NamedTuple):
    """A score that is asked for."""

    # Of which answer or turn.
    number: int
    # By which reward.
    name: str


class Reply(NamedTuple):
    """What an environment says."""

    # What follows, None if the episode has ended.
    turns: list[dict[str, Any]] | None
    score: float | None


class Scores(NamedTuple):
    """Those of one answer."""

    # By function, None if it skips the answer.
    scores: dict[str, float | None]
    # Whether a function gave none.
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
    """A process that scores, for one thread of the rank."""

    def __init__(self, rewards: Mapping[str, Any]) -> None:
        self._connection, other = Pipe()
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "plugins.rl.rewards.worker", str(other.fileno())],
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        other.close()
        self._is_loaded = False
        with suppress(OSError):  # it is dead already, which is seen when it is asked
            self._connection.send(dict(rewards))

    def load(self) -> None:
        """Wait until its functions are loaded; ConfigError if they cannot be."""
        if self._is_loaded:
            return
        if not self._connection.poll(LOAD_LIMIT_S):
            raise ConfigError(f"rewards: loading them took over {LOAD_LIMIT_S:.0f} s")
        try:
            said = self._connection.recv()
        except (EOFError, OSError):
            said = "loading them ended the process"
        if said is not None:
            raise ConfigError(f"rewards.{said}")
        self._is_loaded = True

    def give(self, tasks: deque[Task], contents: Sequence[Answer | Turn], most: int) -> deque[Task]:
        """Take up to so many of the tasks and send them; several, so that it need not wait.

        Together they fit into a socket: one that hangs reads nothing.
        """
        given: deque[Task] = deque()
        size = 0
        while len(given) < most:
            try:
                task = tasks.popleft()
            except IndexError:
                break
            message = pickle.dumps((task.name, *contents[task.number]))
            size += len(message)
            if given and size > AHEAD_BYTES:
                tasks.appendleft(task)
                break
            given.append(task)
            with suppress(OSError):  # seen when it is asked
                self._connection.send_bytes(message)
        return given

    def result(self, timeout_s: float) -> tuple[Any, str, str]:
        """The result of the next task; and if it has none, of what kind that is and why."""
        try:
            if not self._connection.poll(timeout_s):
                return None, "timeout", f"took over {timeout_s:g} s"
            result, said = self._connection.recv()
        except (EOFError, OSError):
            return None, "died", "its process ended"
        return (result, "", "") if said is None else (None, "raised", said)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()


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
        # The kernel ends a process with the thread that started it: these last as long as it.
        self._threads = ThreadPoolExecutor(max(1, workers))
        self._workers = [_Worker(self._rewards) for _ in range(workers)]
        try:
            for worker in self._workers:
                worker.load()
        except BaseException:
            self.close()
            raise

    def score(self, answers: Sequence[Answer]) -> list[Scores]:
        """The scores of answers, in their order, by the functions."""
        names = [name for name, block in self._rewards.items() if not block.get("turns")]
        scores = [Scores({}, False) for _ in answers]

        def scored(task: Task, score: float | None) -> None:
            scores[task.number].scores[task.name] = score

        tasks = deque(Task(number, name) for number in range(len(answers)) for name in names)
        for index in self._run([tasks] * len(self._workers), answers, scored):
            scores[index] = scores[index]._replace(failed=True)
        return scores

    def step(self, name: str, turns: Sequence[Turn]) -> list[Reply | None]:
        """What the environment of this name says to each, in their order; None if it failed.

        The turns of an episode are one process's, in the order in which they are asked.
        """
        replies: list[Reply | None] = [None] * len(turns)

        def replied(task: Task, reply: Reply) -> None:
            replies[task.number] = reply

        queues: list[deque[Task]] = [deque() for _ in self._workers]
        for number, turn in enumerate(turns):
            queues[zlib.crc32(turn.episode.encode()) % len(queues)].append(Task(number, name))
        self._run(queues, turns, replied)
        return replies

    def _run(
        self,
        queues: Sequence[deque[Task]],
        contents: Sequence[Answer | Turn],
        done: Callable[[Task, Any], None],
    ) -> list[int]:
        """Do the tasks of each process's queue, which may be one for all; what failed."""
        # As few at once as leave each process some until the end.
        most = max(1, min(AHEAD, len(contents) // (2 * max(1, len(self._workers)))))

        def work(place: int) -> list[int]:
            tasks, without = queues[place], list[int]()
            while tasks:
                worker = self._workers[place]
                worker.load()
                given = worker.give(tasks, contents, most)
                while given:
                    task = given.popleft()
                    result, kind, said = worker.result(self._timeout_s)
                    if not kind:
                        done(task, result)
                        continue
                    without.append(task.number)
                    self.failed(task.name, kind, said)
                    if kind != "raised":
                        tasks.extendleft(reversed(given))
                        worker.close()
                        self._workers[place] = _Worker(self._rewards)
                        break
            return without

        return [index for part in self._threads.map(work, range(len(queues))) for index in part]

    def failed(self, name: str, kind: str, said: str) -> None:
        """Keep what the first failed score of its kind said."""
        self.messages.setdefault((name, kind), said)

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()
        self._workers = []
        self._threads.shutdown(wait=False)
