"""Replicas on rollout nodes give what the GPUs that train would: without Slurm, as --local does."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import safe_open

from runspec import files
from tests.trainer.forks import environment
from tests.trainer.runs import curve, finish, kill_at, metrics, start
from tests.trainer.test_grpo import MODULE, TP, config
from trainer import demo_sums
from trainer.objectives.replicas import Replicas, Request


@contextmanager
def stand_ins(folder: Path, *waits: threading.Event) -> Iterator[list[list[int]]]:
    """A server in each replica's place, which repeats its prompts once it may; what each got."""
    got: list[list[int]] = [[] for _ in waits]

    def handler(index: int, may: threading.Event) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                got[index].append(asked["prompts"][0][0])
                may.wait()
                body = {"version": "0.1.7", "tokens": asked["prompts"], "log_probs": [[0.0]]}
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *arguments: Any) -> None: ...

        return Handler

    servers = [
        ThreadingHTTPServer(("127.0.0.1", 0), handler(index, may))
        for index, may in enumerate(waits)
    ]
    for index, server in enumerate(servers):
        threading.Thread(target=server.serve_forever).start()
        known = {"host": "127.0.0.1", "port": server.server_port}
        (folder / files.REPLICA.format(index)).write_text(json.dumps(known))
    (folder / files.ROLLOUT_SECRET).write_text("secret")
    try:
        yield got
    finally:
        for may, server in zip(waits, servers, strict=True):
            may.set()
            server.shutdown()
            server.server_close()


@pytest.mark.long
def test_a_request_that_is_late_is_asked_of_another_replica(tmp_path: Path) -> None:
    fast, slow = threading.Event(), threading.Event()
    fast.set()
    world: Any = SimpleNamespace(data_rank=0)
    with stand_ins(tmp_path, fast, slow) as got:
        asked = [Request([[number]], None, 1, 8, 1.0) for number in range(6)]
        answers = Replicas(tmp_path, 2, world, 60.0).sample(asked)
        assert not slow.is_set()
    assert [each.tokens for each in answers] == [[[number]] for number in range(6)]
    assert {each.version for each in answers} == {7}
    # The slow one has the one request that it is at, if it was there in time for any.
    assert sorted(got[0]) == [*range(6)] and len(got[1]) <= 1


LORA = {"model": {"lora_rank": 4, "quantize_base": False}, "generation_batch_size": 16}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {"batch_size": 16, "generation_batch_size": 4}),
    "tensor": (2, TP | {"generation_batch_size": 8}),
    "lora": (1, LORA),
    "qdora": (1, LORA | {"model": {"lora_rank": 4, "use_dora": True, "quantize_base": True}}),
    "lora-fsdp": (2, LORA | {"batch_size": 16}),
}


@contextmanager
def replicas(run: Path, count: int) -> Iterator[None]:
    """So many replicas of a run, as its job script starts them."""
    folder, logs = run / files.ROLLOUT, run / "logs" / "0"
    folder.mkdir()
    logs.mkdir(parents=True)
    (run / files.LATEST_LOGS).symlink_to("0")
    (folder / files.ROLLOUT_SECRET).write_text("secret")
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "slurm.rollout"],
        env=environment(
            RUN_DIR=str(run),
            JOB_PID=str(os.getpid()),
            RANKS_PER_NODE="1",
            ROLLOUT_HOSTS=",".join(["here"] * count),
            ROLLOUT_ADDRESSES="127.0.0.1",
            ROLLOUT_SCRIPT=f"exec {sys.executable} -m trainer.replica {run}/train.yaml",
        ),
    )
    try:
        yield
    finally:
        (folder / files.ROLLOUT_END).touch()
        supervisor.wait(60)


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(name, marks=pytest.mark.long) for name in ("fsdp", "lora-fsdp")),
        *(pytest.param(name, marks=pytest.mark.named) for name in ("tensor", "lora", "qdora")),
    ],
)
def test_two_replicas_give_the_losses_of_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    model, (ranks, changes) = tmp_path / "model", CASES[case]
    demo_sums.make(model, steps=10)
    own = {"max_steps": 3, "updates_per_rollout": 1} | changes
    finish(start(config(tmp_path / "same", model, **own), ranks, module=MODULE))
    path = config(tmp_path / "apart", model, **own)
    with replicas(path.parent, 2):
        monkeypatch.setenv("ROLLOUT_REPLICAS", "2")
        finish(start(path, ranks, module=MODULE))
        weights = [*(path.parent / files.ROLLOUT).glob(files.WEIGHTS.format("*"))]
        with safe_open(weights[0], framework="pt") as file:
            names = list(file.keys())
    assert curve(path.parent) == curve(tmp_path / "same")
    # Of an adapter nothing else is sent.
    for name in names:
        assert ("lora" in name or "magnitude" in name) == ("lora_rank" in str(own)), name


@pytest.mark.long
def test_replicas_work_ahead_within_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, own = tmp_path / "model", {"max_staleness": 1, "importance_cap": 2.0}
    demo_sums.make(model, steps=10)
    path = config(tmp_path / "ahead", model, updates_per_rollout=1, max_steps=8, **own)
    with replicas(path.parent, 1):
        monkeypatch.setenv("ROLLOUT_REPLICAS", "1")
        kill_at(path, 4, module=MODULE)
        output = finish(start(path, attempt=1, module=MODULE))
    first = int(output.partition("checkpoints/step_")[2].split()[0].rstrip(",;:"))
    lines = metrics(path.parent)
    assert [line["step"] for line in lines] == [*range(1, 9)]
    # Only the rollouts at a start are by the present weights; others began before the last update.
    assert lines[0]["staleness"] == lines[first]["staleness"] == 0
    assert all(line["staleness/most"] == 1 for line in (lines[1], *lines[first + 1 :]))
    # The sampler's probabilities are those of the weights that it had.
    assert abs(lines[0]["kl/sampler"]) < 1e-6 < lines[3]["kl/sampler"]
