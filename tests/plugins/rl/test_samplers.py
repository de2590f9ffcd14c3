"""Samplers on rollout nodes give what the GPUs that train would: without Slurm, as --local does."""

import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from plugins.rl import names
from plugins.rl.samplers import Request, RolloutError, Samplers, _Asked
from plugins.rl.slurm import samplers as processes
from runspec import files
from slurm import faults
from slurm.nodes import Nodes
from tests.launcher.kit import until
from tests.plugins.rl.test_grpo import MODULE, TP, config
from tests.trainer.forks import environment
from tests.trainer.runs import curve, finish, kill_at, metrics, start
from tests.vllm_stand_in import vllm_python
from trainer.errors import write_error_record

Answer = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]
WORLD: Any = SimpleNamespace(data_rank=0)
# What samplers read of a config.
CONFIG: Any = SimpleNamespace(rollout_timeout=600.0, rollout_engine="transformers")


@contextmanager
def servers(folder: Path, *answers: Answer) -> Iterator[None]:
    """A server in each sampler's place, which says what its function does of a request."""

    def handler(answer: Answer) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, body = answer({"path": self.path, **asked})
                with suppress(BrokenPipeError):  # nobody waits any more
                    self.send_response(status)
                    self.end_headers()
                    self.wfile.write(json.dumps(body).encode())

            def log_message(self, *arguments: Any) -> None: ...

        return Handler

    started = [ThreadingHTTPServer(("127.0.0.1", 0), handler(each)) for each in answers]
    for index, server in enumerate(started):
        threading.Thread(target=server.serve_forever).start()
        known = {"host": "127.0.0.1", "port": server.server_port, "node": f"n{index}"}
        (folder / names.SAMPLER.format(index)).write_text(json.dumps(known))
    (folder / names.SECRET).write_text("secret")
    try:
        yield
    finally:
        for server in started:
            server.shutdown()
            server.server_close()


def test_samplers_share_requests_and_one_that_dies_gives_its_own_back(tmp_path: Path) -> None:
    """Each request is asked of one sampler, and of another if that one fails."""
    got: list[list[int]] = [[], []]
    both = threading.Barrier(2)

    def answer(index: int) -> Answer:
        def call(asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            got[index].append(asked["prompts"][0][0])
            if len(got[index]) == 1:
                both.wait(60)  # each has one
            if index == 1:
                (tmp_path / names.SAMPLER.format(1)).unlink(missing_ok=True)
                return 500, {"error": "it ends"}
            return 200, {"version": "0.1.7", "tokens": asked["prompts"], "log_probs": [[0.0]]}

        return call

    with servers(tmp_path, answer(0), answer(1)):
        asked = [Request([[number]], None, 1, 8, 1.0) for number in range(6)]
        answers = Samplers(tmp_path, 2, WORLD, CONFIG).sample(asked)
    assert [each.tokens for each in answers] == [[[number]] for number in range(6)]
    assert {each.version for each in answers} == {7}
    assert sorted(got[0]) == [*range(6)] and len(got[1]) == 1


def test_a_sampler_that_does_not_answer_is_named_with_its_node(tmp_path: Path) -> None:
    """And not the node that trains, where the rank is that says so."""
    asked = _Asked([{}], 0.0)
    assert asked.take("sampler 0 on n0", "n0") == 0
    asked.give_back(0, "sampler 0 on n0", TimeoutError())
    assert asked.wait(0)
    write_error_record(tmp_path / "logs", 0, RolloutError(asked.failure, asked.node))
    (record,) = faults.on_nodes(faults.read_errors(tmp_path / "logs"), ["trains"], 1)
    said = "generating: sampler 0 on n0 did not answer within 0 s"
    assert faults.describe(record) == f"node n0: RolloutError: {said}"


def test_a_folder_that_is_deleted_in_a_run_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / names.ROLLOUT
    secret = folder / names.SECRET
    with samplers(tmp_path, 1, "exec sleep 600"):
        until((tmp_path / names.STATE).exists, 30)
        known = secret.read_text()
        shutil.rmtree(folder)
        until(lambda: secret.exists() and secret.read_text() == known, 30)
        assert (folder.stat().st_mode | secret.stat().st_mode) & 0o077 == 0


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of vLLM, as what the recipe's environment would start."""
    monkeypatch.setenv("COOKBOOK_BACKEND", str(vllm_python(tmp_path)))


@pytest.mark.parametrize(
    ("case", "sent"),
    [
        pytest.param("full", "model", marks=pytest.mark.named),
        pytest.param("lora", "adapter", marks=pytest.mark.long),
        # vLLM would not apply it, or not to this base: the merged weights are sent.
        pytest.param("qdora", "model", marks=pytest.mark.named),
    ],
)
@pytest.mark.usefixtures("vllm")
def test_vllm_generates_by_the_weights_of_each_rollout(
    tmp_path: Path, sums: Path, monkeypatch: pytest.MonkeyPatch, case: str, sent: str
) -> None:
    ranks, own = trained_alone(tmp_path, sums, case, max_steps=4, optimizer=FAST)
    path = config(tmp_path / "apart", sums, **own, rollout_engine="vllm")
    with samplers(path.parent, 1):
        monkeypatch.setenv("ROLLOUT_SAMPLERS", "1")
        finish(start(path, ranks, module=MODULE))
        written = sorted((path.parent / names.ROLLOUT).glob("weights_*"), reverse=True)
        assert (written[0] / f"{sent}.safetensors").exists() or (
            written[0] / f"{sent}_model.safetensors"
        ).exists()
    assert_as_alone(tmp_path, "apart")


LORA = {"model": {"lora_rank": 4, "quantize_base": False}, "generation_batch_size": 16}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "full": (1, {}),
    "fsdp": (2, {"batch_size": 16, "generation_batch_size": 4}),
    "tensor": (2, TP | {"generation_batch_size": 8}),
    "lora": (1, LORA),
    "qdora": (1, LORA | {"model": {"lora_rank": 4, "adapter": "dora", "quantize_base": True}}),
    "lora-fsdp": (2, LORA | {"batch_size": 16}),
}
FAST = {"_component_": "torch.optim.AdamW", "lr": 3e-3}


def trained_alone(folder: Path, model: Path, case: str, **own: Any) -> tuple[int, dict[str, Any]]:
    """Train a case without samplers, in `same`; return its ranks and its keys."""
    ranks, changes = CASES[case]
    own = {"updates_per_rollout": 1} | changes | own
    finish(start(config(folder / "same", model, **own), ranks, module=MODULE))
    return ranks, own


def assert_as_alone(folder: Path, name: str) -> int:
    """Compare a run with the one without samplers; return the number of their steps."""
    one, other = (metrics(folder / each) for each in (name, "same"))
    for line, same in zip(one, other, strict=True):
        # By older weights, or another softmax, they would differ by far more.
        assert abs(line["kl/sampler"]) < 1e-5
        assert line["reward"] == same["reward"]
        assert line["loss"] == pytest.approx(same["loss"], abs=1e-4)
    return len(one)


@contextmanager
def samplers(run: Path, count: int, script: str = "") -> Iterator[None]:
    """So many samplers of a run, as its job script starts them."""
    script = script or f"exec {sys.executable} -m plugins.rl.sampler {run}/train.yaml"
    logs = run / "logs" / "0"
    logs.mkdir(parents=True, exist_ok=True)
    (run / files.LATEST_LOGS).symlink_to("0")
    monkeypatch = pytest.MonkeyPatch()
    for name, value in environment(RUN_DIR=str(run), RANKS_PER_NODE="1").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ROLLOUT_SCRIPT", script)
    started = processes.SamplerProcesses(run)
    started.begin(0, cast(Nodes, SimpleNamespace(rollout_hosts=["here"] * count)), [])
    try:
        yield
    finally:
        started.end()
        monkeypatch.undo()


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(name, marks=pytest.mark.long) for name in ("fsdp", "lora-fsdp")),
        *(pytest.param(name, marks=pytest.mark.named) for name in ("tensor", "lora", "qdora")),
    ],
)
def test_two_samplers_give_the_losses_of_none(
    tmp_path: Path, sums: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    ranks, own = trained_alone(tmp_path, sums, case, max_steps=3)
    path = config(tmp_path / "apart", sums, **own)
    with samplers(path.parent, 2):
        monkeypatch.setenv("ROLLOUT_SAMPLERS", "2")
        finish(start(path, ranks, module=MODULE))
    assert curve(path.parent) == curve(tmp_path / "same")


@pytest.mark.parametrize(
    ("most", "at_once", "updates"),
    [
        pytest.param(1, 32, 1, marks=pytest.mark.long),
        # Several updates, so that the sampler has the time to be as far ahead as it may.
        pytest.param(2, 32, 4, marks=pytest.mark.long),
        pytest.param(3, 32, 4, marks=pytest.mark.named),
        # Small requests: those of a rollout are answered by several weights.
        pytest.param(2, 4, 1, marks=pytest.mark.named),
    ],
)
def test_samplers_work_ahead_within_the_bound(
    tmp_path: Path,
    sums: Path,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    at_once: int,
    updates: int,
) -> None:
    steps, own = 12 * updates, {"max_staleness": most, "importance_cap": 2.0}
    own |= {"generation_batch_size": at_once, "updates_per_rollout": updates, "max_steps": steps}
    path = config(tmp_path / "ahead", sums, **own)
    with samplers(path.parent, 1):
        monkeypatch.setenv("ROLLOUT_SAMPLERS", "1")
        kill_at(path, steps // 2, module=MODULE)
        output = finish(start(path, attempt=1, module=MODULE))
    first = int(output.partition("checkpoints/step_")[2].split()[0].rstrip(",;:"))
    lines = metrics(path.parent)
    assert [line["step"] for line in lines] == [*range(1, steps + 1)]
    for part in (lines[:first], lines[first:]):
        # Only the rollouts at a start are by the present weights; others began before the last.
        rollouts = [line for line in part if "staleness" in line]
        ages = [line["staleness/most"] for line in rollouts]
        assert ages[0] == 0 and max(ages) == most, ages
        assert all(1 <= age <= min(most, n) for n, age in enumerate(ages[1:], 1)), ages
        assert all(line["staleness"] <= line["staleness/most"] for line in rollouts)
    assert "staleness 0.00" in output
    # The sampler's probabilities are those of the weights that it had.
    newest = [line["kl/sampler"] for line in lines if "staleness" in line]
    assert abs(newest[0]) < 1e-6 < newest[3]
