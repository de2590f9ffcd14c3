"""On-policy distillation: the student's own answers in each layout, packed, resumed, or refused."""

from pathlib import Path
from typing import Any

import pytest

from launcher import gpus
from plugins.estimate.launcher.links import Links
from plugins.estimate.launcher.memory import StepMemory
from plugins.estimate.launcher.recipe_step import step_of
from plugins.estimate.launcher.step_time import step_time
from plugins.estimate.trace import trace
from plugins.rl.on_policy import OnPolicyDistillation
from plugins.rl.recipe_keys import OnPolicyConfig
from tests.plugins.estimate.test_methods import wide_content
from tests.trainer.methods.test_distill import STEP, TP
from tests.trainer.methods.test_distill import teacher as teacher
from tests.trainer.runs import (
    assert_same_curve,
    curve,
    finish,
    kill_at,
    lora_model,
    metrics,
    start,
    write_config,
)
from trainer import check
from trainer.config import parse, read_yaml

MODULE = "trainer.train plugins.rl.recipe_keys:OnPolicyConfig"


@pytest.mark.long
def test_packed_answers_have_the_loss_of_padded_ones(
    tmp_path: Path, model_folder: Path, dataset: Path, teacher: Path
) -> None:
    """All samples in one step, at a learning rate that changes nothing."""
    own = {"on_policy_share": 1.0, "max_new_tokens": 48}
    for name, more in {"padded": {}, "packed": {"row_length": 96}}.items():
        more |= {"batch_size": 44, "max_steps": 1, "teacher": str(teacher), **own}
        finish(start(write_config(tmp_path / name, model_folder, dataset, **more), module=MODULE))
    assert_same_curve(tmp_path / "packed", tmp_path / "padded", 2e-5, 1e-4)


@pytest.mark.long
def test_the_students_own_answers_are_the_same_in_each_layout_and_resumed(
    tmp_path: Path, model_folder: Path, dataset: Path, teacher: Path
) -> None:
    """In packed rows, of which longer answers need more: the batches of a step are not as many."""
    own = {"teacher": str(teacher), "on_policy_share": 0.5, "max_new_tokens": 48}
    own |= STEP | {"beta": 1.0, "cross_entropy_share": 0.0, "max_steps": 8, "shuffle": False}
    own |= {"save_every_n_steps": 2, "row_length": 96, "batch_size": 4}
    runs: dict[str, tuple[int, dict[str, Any]]] = {
        "one": (1, {}),
        "both": (4, TP | {"batch_size": 2}),
        "lora": (2, {"model": lora_model(quantize_base=True), "batch_size": 2}),
    }
    for name, (ranks, changes) in runs.items():
        path = write_config(tmp_path / name, model_folder, dataset, **own | changes)
        finish(start(path, ranks, module=MODULE))
    lines = metrics(tmp_path / "one")
    shares = [line["on_policy/steps"] for line in lines]
    assert set(shares) == {0, 1}
    for line in lines:
        wanted = line["on_policy/steps"]
        assert (line["on_policy/tokens_per_second"] is not None) == wanted
        assert not wanted or 1 <= line["on_policy/answer_tokens"] <= 48
    assert_same_curve(tmp_path / "both", tmp_path / "one", 2e-5, 1e-4)
    killed = write_config(tmp_path / "killed", model_folder, dataset, **own)
    kill_at(killed, 4, module=MODULE)
    assert "resuming from" in finish(start(killed, attempt=1, module=MODULE))
    assert curve(tmp_path / "killed") == curve(tmp_path / "one")


@pytest.mark.long
def test_what_cannot_generate_is_refused(
    tmp_path: Path, model_folder: Path, dataset: Path, teacher: Path
) -> None:
    own = {"teacher": str(teacher), "on_policy_share": 0.5}
    path = write_config(tmp_path, model_folder, dataset, **own, save_adapter_weights_only=True)
    content = read_yaml(path)
    content["model"] = {"adapter": "prompt", "num_virtual_tokens": 4}
    (fault,) = check.faults(content, OnPolicyDistillation)
    assert fault.startswith("model.adapter: answers cannot be generated over")


@pytest.mark.long
def test_the_estimate_counts_answers_that_are_generated(
    tmp_path: Path, model_folder: Path, dataset: Path
) -> None:
    content = wide_content(tmp_path, model_folder, dataset)
    content |= {"entry": "distill_on_policy", "on_policy_share": 0.0}
    own = {"on_policy_share": 0.5, "max_new_tokens": 64}
    step = step_of(content | own, 1, 2)
    phase = StepMemory(step).phases["generating answers"]
    # At least the whole student in bf16.
    assert phase["generation"] > 2 * step.shape.parameters
    student = {"_component_": "transformers"}, {"checkpoint_dir": content["teacher"]}
    for packed, ranks in ((True, 2), (False, 1)):
        traced_content = content | own | dict(zip(("model", "checkpointer"), student, strict=True))
        traced_content["dataset"] |= {"packed": packed}
        found = StepMemory(step_of(traced_content, 1, ranks))
        del traced_content["entry"]
        traced = trace(parse(traced_content, OnPolicyConfig), ranks)
        name = "generating answers"
        assert sum(found.phases[name].values()) == pytest.approx(traced.phases[name], rel=0.1)
        assert found.peak == pytest.approx(traced.peak, rel=0.1)
    gpu = gpus.by_name("h100-80")
    links = Links.of(gpu, 2)
    seconds = [
        step_time(step_of(content | each, 1, 2), gpu, links).seconds
        for each in ({}, own, own | {"on_policy_share": 1.0})
    ]
    assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0])
    # 64 tokens in half of the steps, which read all weights.
    assert seconds[1] - seconds[0] > 32 * 2 * step.shape.parameters / 3.4e12
