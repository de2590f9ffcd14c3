"""The trainer's side of rollout nodes: weights to the replicas, and answers from them.

Replicas are found by files in the run's folder (slurm/rollout.py starts them, trainer/replica.py is
one). A request holds all that its answer depends on, the version of the weights included, so that
any replica answers it alike: one that dies or hangs costs the time of its requests.
"""

import http.client
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from runspec import files
from trainer.errors import RolloutError
from trainer.models.build import Model
from trainer.objectives import whole
from trainer.parallel.world import World

POLL_S = 0.2
# A request that a replica answers with an error is asked so often in all.
TRIES = 3

# New tokens of each prompt, and their log-probabilities.
Sampled = tuple[list[list[int]], list[list[float]]]


class Request(NamedTuple):
    """A batch to generate.

    seeds: of each answer; None for the likeliest tokens. room: tokens at most. vocabulary: tokens
    from this one on are never drawn.
    """

    prompts: list[list[int]]
    seeds: list[int] | None
    room: int
    vocabulary: int
    temperature: float


class _Refused(Exception):
    """A replica answered with an error."""


class Replicas:
    """The replicas as a rank knows them.

    Args:
        limit_s: how long a transfer or a batch may take, the wait for a replica included.
    """

    def __init__(self, folder: Path, count: int, world: World, limit_s: float) -> None:
        self._folder, self._count, self._world, self._limit_s = folder, count, world, limit_s
        self._number, self.version = 0, ""
        self._secret = (folder / files.ROLLOUT_SECRET).read_text(encoding="utf-8").strip()

    @classmethod
    def of(cls, run_dir: Path, world: World, limit_s: float) -> "Replicas | None":
        """Return those of the job; None if it has no rollout nodes."""
        count = int(os.environ.get("ROLLOUT_REPLICAS") or 0)
        if not count:
            return None
        return world.on_all(lambda: cls(run_dir / files.ROLLOUT, count, world, limit_s))

    def send(self, model: Model) -> None:
        """Write the present weights, and have the replicas load them; all ranks call this.

        Raises:
            RolloutError: no replica took them in time.
        """
        self._number += 1
        self.version = f"{os.environ.get('COOKBOOK_ATTEMPT', '0')}.{self._number}"
        is_main = self._world.is_main
        given: dict[str, torch.Tensor] = {}
        for name, tensor in whole.tensors(model, is_main, torch.device("cpu")):
            given[name] = tensor.contiguous()
        self._world.on_main(lambda: self._transfer(given))

    def _transfer(self, given: dict[str, torch.Tensor]) -> None:
        path = self._folder / files.WEIGHTS.format(self.version)
        temporary = path.with_name(f".{path.name}.tmp")
        save_file(given, temporary)
        os.replace(temporary, path)
        # Every answer by the version before is there.
        for old in self._folder.glob(files.WEIGHTS.format("*")):
            if old != path:
                old.unlink(missing_ok=True)
        body = {"version": self.version}
        deadline = time.monotonic() + self._limit_s
        with ThreadPoolExecutor(self._count) as threads:
            # One that is starting, or dies, loads them with its first request.
            faults = list(
                threads.map(lambda index: self._tried(index, "/weights", body, deadline), self._all)
            )
        if all(isinstance(each, TimeoutError) for each in faults):
            raise RolloutError(
                f"transfer of weights {self.version} to {self._named(0)}: not done within "
                f"{self._limit_s:.0f} s"
            )

    def sample(self, requests: Sequence[Request]) -> list[Sampled]:
        """Answer each request, on as many replicas at once as there are.

        Raises:
            RolloutError: no replica answered in time, or the requests themselves fail.
        """
        with ThreadPoolExecutor(self._count) as threads:
            return list(threads.map(self._answer, range(len(requests)), requests))

    def _answer(self, place: int, request: Request) -> Sampled:
        body = {"version": self.version, **request._asdict()}
        deadline, refused = time.monotonic() + self._limit_s, 0
        index = (self._world.data_rank + place) % self._count
        fault: Any = None
        while time.monotonic() < deadline:
            answer = self._tried(index, "/generate", body, deadline)
            if isinstance(answer, dict):
                return answer["tokens"], answer["log_probs"]
            fault = answer or fault
            refused += isinstance(answer, _Refused)
            if refused == TRIES:
                raise RolloutError(f"{self._named(index)}: {fault}")
            if failed := files.read_json_or_none(self._folder / files.NO_REPLICA):
                raise RolloutError(str(failed.get("message")))
            index = (index + 1) % self._count
            time.sleep(POLL_S)
        reason = f"the last one said: {fault}" if fault else "none is ready"
        raise RolloutError(
            f"generating: no rollout replica answered within {self._limit_s:.0f} s: {reason}"
        )

    @property
    def _all(self) -> range:
        return range(self._count)

    def _tried(self, index: int, path: str, body: dict[str, Any], deadline: float) -> Any:
        """Return a replica's answer, or the error that there was; None if it is not ready."""
        known = files.read_json_or_none(self._folder / files.REPLICA.format(index))
        if not isinstance(known, dict):
            return None
        try:
            return post(known, path, body, self._secret, deadline - time.monotonic())
        except (OSError, http.client.HTTPException, ValueError, _Refused) as error:
            return error

    def _named(self, index: int) -> str:
        known = files.read_json_or_none(self._folder / files.REPLICA.format(index)) or {}
        return f"rollout replica {index} on {known.get('node', 'no node')}"


def post(
    known: dict[str, Any],
    path: str,
    body: dict[str, Any],
    secret: str,
    timeout_s: float,
) -> Any:
    """Return the JSON that a replica answers.

    Args:
        known: its file: host and port.

    Raises:
        OSError: it cannot be reached, or not in time (TimeoutError).
    """
    connection = http.client.HTTPConnection(
        known["host"], known["port"], timeout=max(timeout_s, 0.1)
    )
    try:
        headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
    finally:
        connection.close()
    if response.status != 200:
        raise _Refused(str(answer.get("error")))
    return answer
