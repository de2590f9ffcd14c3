"""vLLM on the GPUs of the ranks, in turns: a stand-in of it, without Slurm, as --local does."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plugins.rl.backends import memory_share
from plugins.rl.sampler import Sampler
from plugins.rl.samplers import Request, Sampled, Samplers
from runspec import files
from tests.plugins.rl.test_grpo import MODULE, config
from tests.plugins.rl.test_samplers import (
    FAST,
    WORLD,
    Answer,
    assert_as_alone,
    limited,
    samplers,
    servers,
    trained_alone,
)
from tests.trainer.runs import finish, start
from tests.vllm_stand_in import vllm_python
from trainer.errors import ConfigError, RolloutError

ASKED = Request([[1]], None, 1, 8, 1.0)._asdict()


class Engine:
    """It answers when it may, or is told to drop its answers."""

    at_once, is_well = 4, True

    def __init__(self) -> None:
        self.said: list[str] = []
        self.ends, self.dropped, self.refuses = threading.Event(), False, ""

    def load(self, version: str) -> None:
        self.said.append(f"load {version}")

    def generate(self, asked: Request) -> Sampled:
        self.said.append("generate")
        self.ends.wait()
        if self.dropped:
            raise RolloutError("dropped")
        return Sampled(asked.prompts, [[0.0]])

    def drop(self) -> None:
        self.dropped = True
        self.ends.set()

    def sleep(self) -> None:
        self.said.append("sleep")


def test_a_sampler_drops_its_answers_and_sleeps_until_there_are_other_weights() -> None:
    engine: Any = Engine()
    sampler, faults = Sampler(engine), []

    def late() -> None:
        try:
            sampler.generate("0.1.0", **ASKED)
        except RolloutError as error:
            faults.append(str(error))

    asked = threading.Thread(target=late)
    asked.start()
    while "generate" not in engine.said:
        time.sleep(0.01)
    sampler.sleep("0.1.0")
    asked.join()
    assert faults == ["dropped"] and engine.said == ["load 0.1.0", "generate", "sleep"]
    # A request that is late must not wake it up.
    with pytest.raises(RolloutError, match=r"nobody waits for answers of the weights 0\.1\.0"):
        sampler.generate("0.1.0", **ASKED)
    with pytest.raises(RolloutError, match="nobody waits"):
        sampler.weights("0.1.0")
    engine.dropped = False
    assert sampler.generate("0.2.1", **ASKED)["tokens"] == [[1]]
    # Nor may one for the rollout before put it to sleep.
    sampler.sleep("0.1.0")
    assert engine.said[3:] == ["load 0.2.1", "generate"]
    sampler.sleep("0.2.1")
    assert engine.said[5:] == ["sleep"]


def test_a_rank_waits_until_each_sampler_sleeps_or_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOUT_IN_TURNS", "yes")
    folder, asked = tmp_path / files.ROLLOUT, []
    folder.mkdir()
    world: Any = SimpleNamespace(data_rank=0, on_main=lambda task: task())

    def refuses_once(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        asked.append(body)
        return (500, {"error": "not yet"}) if len(asked) == 1 else (200, {})

    def refuses(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return 500, {"error": "vLLM refused /sleep"}

    def state(word: str) -> None:
        value = [{"sampler": 0, "node": "n0", "state": "ready"}]
        value += [{"sampler": 1, "node": "n1", "state": word}]
        files.write_json(tmp_path / files.ROLLOUT_STATE, {"samplers": value})

    answers: tuple[Answer, Answer] = (refuses_once, refuses)
    with servers(folder, *answers):
        known = Samplers(folder, 2, world, limited(0.5))
        known.version = "0.3.2"
        with pytest.raises(RolloutError, match=r"sampler 1 on n1 .* within 0\.5 s.*refused /sleep"):
            known.rest()
        assert asked == [{"path": "/sleep", "version": "0.3.2"}] * 2
        # It is being ended: its processes still have the memory.
        (folder / files.SAMPLER.format(1)).unlink()
        state("ready")
        with pytest.raises(RolloutError, match=r"sampler 1 .* training needs them: it does not"):
            known.rest()
        state("starting")
        known.rest()
    # On nodes of their own they have nothing to give up.
    monkeypatch.delenv("ROLLOUT_IN_TURNS")
    Samplers(folder, 2, WORLD, limited(1.0)).rest()


def test_vllm_takes_what_the_ranks_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(share: float | None = None) -> Any:
        return SimpleNamespace(rollout_gpu_memory_utilization=share, rollout_engine_args=None)

    monkeypatch.delenv("ROLLOUT_BESIDE_GIB", raising=False)
    memory = 80 * 2**30
    assert memory_share(of(), 0, in_turns=True) is None  # a CPU
    assert memory_share(of(), memory, in_turns=False) is None  # vLLM's own
    with pytest.raises(ConfigError, match="rollout_gpu_memory_utilization: what the trainer"):
        memory_share(of(), memory, in_turns=True)
    monkeypatch.setenv("ROLLOUT_BESIDE_GIB", "34.00")
    # A twentieth, and 2 GiB more, are reserved.
    assert memory_share(of(), memory, in_turns=True) == 0.5
    assert memory_share(of(0.3), memory, in_turns=True) == 0.3


@pytest.mark.named
@pytest.mark.parametrize("case", ["full", "lora", "qdora", "fsdp"])
def test_vllm_in_turns_gives_the_losses_of_transformers(
    tmp_path: Path, sums: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setenv("COOKBOOK_BACKEND", str(vllm_python(tmp_path)))
    ranks, own = trained_alone(tmp_path, sums, case, max_steps=6, optimizer=FAST)
    path = config(tmp_path / "turns", sums, **own, rollout_engine="vllm")
    monkeypatch.setenv("ROLLOUT_IN_TURNS", "yes")
    with samplers(path.parent, ranks):
        monkeypatch.setenv("ROLLOUT_SAMPLERS", str(ranks))
        output = finish(start(path, ranks, module=MODULE))
    assert f"{ranks} sampler{'s' * (ranks > 1)} in turns with the ranks" in output
    steps = assert_as_alone(tmp_path, "turns")
    level = 1 if case == "lora" else 2
    for index in range(ranks):
        log = (tmp_path / f"turns/logs/0/rollout_{index}.log").read_text()
        assert log.count(f"asleep at level {level}") == steps
        woken = "awake: all" if level == 1 else "awake: weights"
        assert log.count(woken) == steps - 1, "it starts awake"
