"""The trainer's side of samplers: weights to them, and answers from them.

Samplers are found by files in the run's folder: plugins/rl/slurm/samplers.py starts them, and
plugins/rl/sampler.py is one. A request holds all that its answer depends on, the version of the
weights included, so that any sampler answers it alike: one that dies or hangs costs the time of its
requests.
"""

import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from plugins.rl import names, transfer
from plugins.rl.recipe_keys import GrpoConfig
from plugins.serve import client
from runspec import files
from trainer.errors import TrainerError
from trainer.models.build import Model
from trainer.parallel.world import World

POLL_S = 0.2
# A request that a sampler answers with an error is asked so often in all.
TRIES = 3


class RolloutError(TrainerError):
    """The rollout nodes do not answer; a later attempt may find others.

    node: that of the sampler at fault; None if it is not one sampler's.
    """

    permanent = False

    def __init__(self, message: str, node: str | None = None) -> None:
        super().__init__(message)
        self.node = node


class Sampled(NamedTuple):
    """What was generated for a request."""

    # New tokens of each prompt, and their log-probabilities.
    tokens: list[list[int]]
    log_probs: list[list[float]]
    # Of the weights: see Answer.version.
    version: int = -1


class Request(NamedTuple):
    """A batch to generate."""

    prompts: list[list[int]]
    # Of each answer; None for the likeliest tokens.
    seeds: list[int] | None
    # Tokens of an answer at most.
    room: int
    # Tokens from this one on are never drawn.
    vocabulary: int
    temperature: float


class _Refused(Exception):
    """A sampler answered with an error."""


class Samplers:
    """The samplers as a rank knows them.

    Args:
        config: rollout_timeout says how long a transfer or a batch may take, the wait for a
            sampler included.

    count: how many there are. schedules: whether they schedule answers themselves.
    """

    def __init__(self, folder: Path, count: int, world: World, config: GrpoConfig) -> None:
        self._folder, self.count, self._world, self._config = folder, count, world, config
        # vLLM does; the other gets a batch at a time.
        self.schedules = config.rollout_engine == "vllm"
        self._limit_s = config.rollout_timeout
        self._number, self.version = 0, ""
        self._secret = (folder / names.SECRET).read_text(encoding="utf-8").strip()

    @classmethod
    def of(cls, config: GrpoConfig, world: World) -> "Samplers | None":
        """Return those of the job; None if it has none."""
        count = int(os.environ.get("ROLLOUT_SAMPLERS") or 0)
        if not count:
            return None
        return world.on_all(lambda: cls(config.output_dir / names.ROLLOUT, count, world, config))

    def send(self, model: Model, rollout: int) -> None:
        """Write the present weights, and have the samplers load them; all ranks call this.

        With an adapter these are what is trained: samplers have the base model. Requests that are
        sent from now on are for these; others may still be answered by those before.

        Args:
            rollout: whose weights they are; it is in the version.

        Raises:
            RolloutError: a sampler did not take them in time.
        """
        world, self._number = self._world, self._number + 1
        version = f"{os.environ.get('COOKBOOK_ATTEMPT', '0')}.{self._number}.{rollout}"
        in_use = transfer.path_of(self._folder, self._config, self.version)
        world.on_main(lambda: transfer.make_room(self._folder, in_use))
        path = transfer.path_of(self._folder, self._config, version)
        size = transfer.write(model, self._config, world, path)
        if self._number == 1:
            noun = f"{self.count} sampler{'s' if self.count > 1 else ''}"
            world.say(f"rollouts   {noun}, {size / 1e6:,.2f} MB of weights in each transfer")
        world.on_main(lambda: self._transfer(version))
        self.version = version

    def _transfer(self, version: str) -> None:
        """Have the samplers load the weights. One that is starting or dies loads them with its
        first request.
        """
        deadline = time.monotonic() + self._limit_s

        def ask(index: int) -> Any:
            return self._tried(index, "/weights", {"version": version}, deadline)

        with ThreadPoolExecutor(self.count) as threads:
            for index, answer in enumerate(threads.map(ask, range(self.count))):
                if isinstance(answer, TimeoutError):
                    raise RolloutError(
                        f"transfer of weights {version} to {self._named(index)}: not done within "
                        f"{self._limit_s:g} s",
                        self._node(index),
                    )

    def sample(self, requests: Sequence[Request]) -> list[Sampled]:
        """Answer each request, on as many samplers at once as there are.

        Raises:
            RolloutError: no sampler answered in time, or the requests themselves fail.
        """
        asked = _Asked([each._asdict() for each in requests], self._limit_s)
        self._ask(asked)
        return [
            Sampled(own["tokens"], own["log_probs"], int(own["version"].rpartition(".")[2]))
            for own in asked.in_order()
        ]

    def _ask(self, asked: "_Asked") -> None:
        """Have as many samplers as there are answer requests; RolloutError if they cannot."""
        first = self._world.data_rank
        for place in range(self.count):
            index = (first + place) % self.count
            threading.Thread(target=self._work, args=[asked, index], daemon=True).start()
        while not asked.wait(POLL_S):
            if failed := files.peek(self._folder / names.NO_SAMPLER):
                asked.fail(str(failed.get("message")))
        if asked.failure:
            raise RolloutError(asked.failure, asked.node)

    def _work(self, asked: "_Asked", index: int) -> None:
        """Let a sampler answer requests until there are none."""
        while not asked.is_over:
            who = (self._named(index), self._node(index)) if self._known(index) else None
            place = asked.take(*who) if who else None
            if place is None:
                time.sleep(POLL_S)
                continue
            body = {**asked.requests[place], "version": self.version}
            answer = self._tried(index, "/generate", body, asked.deadline)
            if isinstance(answer, dict):
                asked.answered(place, answer)
            else:
                asked.give_back(place, self._named(index), answer)
                time.sleep(POLL_S)

    def _known(self, index: int) -> dict[str, Any] | None:
        """Where a sampler listens; None if it does not."""
        return files.peek(self._folder / names.SAMPLER.format(index)) or None

    def _tried(self, index: int, path: str, body: dict[str, Any], deadline: float) -> Any:
        """Return a sampler's answer, or the error that there was; None if it is not ready."""
        if (known := self._known(index)) is None:
            return None
        try:
            return post(known, path, body, self._secret, deadline - time.monotonic())
        except (OSError, ValueError, _Refused) as error:
            return error

    def _node(self, index: int) -> str | None:
        return (self._known(index) or {}).get("node")

    def _named(self, index: int) -> str:
        return f"sampler {index} on {self._node(index) or 'no node'}"


class _Asked:
    """Requests that samplers share: each takes the next one.

    failure: why they cannot be answered; "" if they can. node: of the sampler whose fault that is,
    None if it is not one sampler's.

    Args:
        limit_s: for all of them.
    """

    def __init__(self, requests: Sequence[dict[str, Any]], limit_s: float) -> None:
        self.requests, self._limit_s = requests, limit_s
        self.deadline = time.monotonic() + limit_s
        self.answers: dict[int, Any] = {}
        self.failure = ""
        self.node: str | None = None
        # Who is at a request or was too slow, by its place: the sampler's name and node.
        self._at: dict[int, tuple[str, str | None]] = {}
        self._waiting = deque(range(len(requests)))
        self._refused: Counter[int] = Counter()
        self._fault = "none is ready"
        self._changed = threading.Condition()

    @property
    def is_over(self) -> bool:
        """Whether all are answered, or cannot be."""
        return bool(self.failure) or len(self.answers) == len(self.requests)

    def in_order(self) -> list[Any]:
        """The answers, in the order of the requests."""
        return [self.answers[place] for place in range(len(self.requests))]

    def wait(self, seconds: float) -> bool:
        """Wait for the end for so long; return whether it has come."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_over, seconds)
        if not self.is_over and time.monotonic() >= self.deadline:
            late = dict(self._at.values())
            who = ", ".join(sorted(late)) or "no sampler"
            said = f"generating: {who} did not answer within {self._limit_s:g} s"
            self.fail(said if late else f"{said}: {self._fault}", [*late.values()])
        return self.is_over

    def fail(self, message: str, nodes: Sequence[str | None] = ()) -> None:
        """End it with this message; the fault of a node, if these are one."""
        with self._changed:
            if not self.failure:
                self.failure = message
                self.node = nodes[0] if len({*nodes}) == 1 else None
            self._changed.notify_all()

    def take(self, name: str, node: str | None) -> int | None:
        """The place of a request that nobody answers, for this sampler; None without any."""
        with self._changed:
            if not self._waiting:
                return None
            self._at[self._waiting[0]] = name, node
            return self._waiting.popleft()

    def answered(self, place: int, answer: Any) -> None:
        """Keep an answer."""
        with self._changed:
            self.answers[place] = answer
            self._at.pop(place, None)
            self._changed.notify_all()

    def give_back(self, place: int, name: str, fault: Any) -> None:
        """Let another sampler answer a request; the end, if several have refused it."""
        with self._changed:
            self._waiting.append(place)
            if not isinstance(fault, TimeoutError):
                self._at.pop(place, None)
            if fault is not None:
                self._fault = f"{name}: {fault}"
            self._refused[place] += isinstance(fault, _Refused)
            if self._refused[place] < TRIES:
                return
        self.fail(f"{name}: {fault}")


def post(
    known: dict[str, Any],
    path: str,
    body: dict[str, Any],
    secret: str,
    timeout_s: float,
) -> Any:
    """Return the JSON that a sampler answers.

    Args:
        known: its file: host and port.

    Raises:
        OSError: it cannot be reached, or not in time (TimeoutError).
    """
    url = f"{client.at(known['host'], known['port'])}{path}"
    headers = {"Authorization": f"Bearer {secret}"}
    response = client.send(url, body, headers, timeout_s=max(timeout_s, 0.1))
    answer = json.loads(response.body)
    if response.status != 200:
        raise _Refused(str(answer.get("error")))
    return answer
