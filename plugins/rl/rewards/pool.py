"""Scores of answers from processes of their own, which may hang, die or raise.

Such an answer has no score, and is counted; the process is replaced. The rank goes on.
"""

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
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
ROOT = Path(__file__).parents[3]


class Answer(NamedTuple):
    """What a reward function sees of an answer."""

    prompt: str
    completion: str
    tokens: list[int]
    # The columns of its prompt's sample.
    row: Mapping[str, Any]


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


def faults(rewards: Any) -> list[str]:
    """What of the key `rewards` cannot be used, a line each; no function is started."""
    if not rewards:
        return ["rewards: name at least one: +rewards.correct.function=exact_match"]
    faults = []
    for name, block in rewards.items():
        key = f"rewards.{name}"
        if not isinstance(block, dict) or not isinstance(block.get("function"), str):
            known = ", ".join(BUILT_IN)
            faults.append(f"{key}: needs a function: {known}, FILE.py:NAME or MODULE:NAME")
            continue
        function = block["function"]
        weight = block.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            faults.append(f"{key}.weight: must be a number, got {weight!r}")
        own = set(block) - {"function", "weight"}
        if function in BUILT_IN:
            if unknown := sorted(own - {*BUILT_IN[function]}):
                hint = nearest(unknown[0], BUILT_IN[function])
                faults.append(f"{key}.{unknown[0]}: {function} does not take it{hint}")
            continue
        where, colon, _ = function.rpartition(":")
        if not colon:
            hint = nearest(function, BUILT_IN)
            faults.append(
                f"{key}.function: there is no {function!r}{hint}: it is one of "
                f"{', '.join(BUILT_IN)}, FILE.py:NAME or MODULE:NAME"
            )
        elif own:
            faults.append(f"{key}.{min(own)}: a function of your own takes nothing but weight")
        elif where.endswith(".py") and not Path(where).is_file():
            faults.append(f"{key}.function: there is no file {where}")
    return faults


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
        with suppress(OSError):  # it is dead already, which is seen when it is asked
            self._connection.send(dict(rewards))

    def load(self) -> None:
        """Wait until its functions are loaded; ConfigError if they cannot be."""
        if not self._connection.poll(LOAD_LIMIT_S):
            raise ConfigError(f"rewards: loading them took over {LOAD_LIMIT_S:.0f} s")
        try:
            said = self._connection.recv()
        except (EOFError, OSError):
            said = "loading them ended the process"
        if said is not None:
            raise ConfigError(f"rewards.{said}")

    def score(self, name: str, answer: Answer, timeout_s: float) -> tuple[float | None, str, str]:
        """The score; and if there is none, of what kind that is and why."""
        try:
            self._connection.send((name, *answer))
            if not self._connection.poll(timeout_s):
                return None, "timeout", f"took over {timeout_s:g} s"
            score, said = self._connection.recv()
        except (EOFError, OSError):
            return None, "died", "its process ended"
        return (score, "", "") if said is None else (None, "raised", said)

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
        scores = [Scores({}, False) for _ in answers]
        tasks = deque((number, name) for number in range(len(answers)) for name in self._rewards)

        def work(place: int) -> list[int]:
            without = list[int]()
            while tasks:
                with suppress(IndexError):  # another thread has taken the last one
                    number, name = tasks.popleft()
                    worker = self._workers[place]
                    score, kind, said = worker.score(name, answers[number], self._timeout_s)
                    if not kind:
                        scores[number].scores[name] = score
                        continue
                    without.append(number)
                    self.messages.setdefault((name, kind), said)
                    if kind != "raised":
                        worker.close()
                        self._workers[place] = _Worker(self._rewards)
                        self._workers[place].load()
            return without

        for part in self._threads.map(work, range(len(self._workers))):
            for number in part:
                scores[number] = scores[number]._replace(failed=True)
        return scores

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()
        self._workers = []
        self._threads.shutdown(wait=False)
