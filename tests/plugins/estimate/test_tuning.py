"""cookbook estimate --tune: faster settings of the same step, and what the recipes ship."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from launcher.errors import UsageFault
from launcher.recipe import load as recipes
from plugins.estimate.launcher.estimate import Estimate
from plugins.estimate.launcher.recipe_step import step_of
from plugins.estimate.launcher.search import Prediction, settings
from plugins.estimate.launcher.text import lines
from plugins.estimate.launcher.tuning import SHOWN, Tuning
from tests.launcher.kit import Kit


def estimated(
    name: str, *overrides: str, kind: str = "h100-80", mfu: float | None = None, **resources: int
) -> Estimate:
    return Estimate.of(recipes.load(name, overrides, resources), Path("/x"), kind, mfu=mfu)


def tuned(name: str, *overrides: str, **more: Any) -> Tuning:
    return Tuning(estimated(name, *overrides, **more).predictor)


def by_vllm(*overrides: str) -> Estimate:
    return estimated("qwen3_8b_grpo_lora", "rollout_engine=vllm", *overrides)


def mfu_while_computing(found: Prediction) -> float:
    return found.time.mfu / found.time.computing_share


def test_no_setting_that_check_refuses_is_looked_at() -> None:
    """Each move alone is sound: what the rules refuse is a combination."""
    given = ["enable_fp8_training=true"]
    config = recipes.load("llama8b_full", given).train_config(Path("/none"), "/none/run")
    step = step_of(config, 1, 8)
    layouts = [(1, 1), (2, 1)]
    methods = [{"method": method} for method in ("full", "lora")]
    found = [*settings(step, method=methods, layout=layouts)]
    assert [(each.method, each.layout.tensor_parallel) for each in found] == [
        ("full", 1),
        ("full", 2),
    ]


def test_faster_settings_fit_and_keep_the_rows_of_a_step():
    found = tuned("llama70b_lora", "activation_checkpointing=full", nodes=2)
    rates = [each.rate for each in found.faster]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 1.3 * found.own.rate
    for each in found.faster:
        assert each.step.rows_per_step == found.own.step.rows_per_step
        assert each.fits and each.peak_gib <= found.predictor.gpu.usable_gib
        assert each.step.layout.ranks == 16


def test_what_a_setting_changes_gives_its_figures():
    asked = ["activation_checkpointing=full"]
    found = tuned("llama8b_full", *asked, nodes=1)
    for each in found.faster[:3]:
        again = tuned("llama8b_full", *asked, *found.changes(each).split(), nodes=1)
        assert again.own.peak_gib == pytest.approx(each.peak_gib)
        assert again.own.rate == pytest.approx(each.rate)
        assert again.own.time.hfu == pytest.approx(each.time.hfu)
        assert again.changes(again.own) == ""


def test_a_measured_mfu_is_of_the_recipes_own_step_and_sets_the_pace_of_all():
    """All layers recomputed: 4 FLOPs for every 3 in layers, none more in the output layer."""
    asked = ["activation_checkpointing=full"]
    found = tuned("llama8b_full", *asked, nodes=1, mfu=0.3)
    usual = tuned("llama8b_full", *asked, nodes=1)
    assert usual.predictor.pace == 1 and mfu_while_computing(found.own) == pytest.approx(0.3)
    assert found.predictor.pace == pytest.approx(mfu_while_computing(usual.own) / 0.3)
    for each in found.faster:
        slower = usual.predictor.of(each.step).rate / each.rate
        assert 1 < slower <= found.predictor.pace and each.time.mfu <= each.time.hfu
    with pytest.raises(
        UsageFault, match=r"--mfu 0\.8 is more than h100-80 can reach .* at most 0\.58"
    ):
        _ = tuned("llama8b_full", *asked, mfu=0.8).own.rate


def test_recomputing_less_is_faster_by_what_it_leaves_out():
    full, op, none = (
        tuned("llama8b_full", f"activation_checkpointing={mode}", nodes=1)
        for mode in ("full", "op", "none")
    )
    rates = [full.predictor.of(each.own.step).rate for each in (full, op, none)]
    assert rates[0] < rates[1] < rates[2]
    # A third of the FLOPs of forward and backward is a forward pass; attention's backward takes
    # longer than twice its forward.
    assert 1.25 < rates[2] / rates[0] < 4 / 3


@pytest.mark.parametrize("name", [n for n in recipes.names() if not n.startswith("demo")])
def test_recipes_ship_the_fastest_setting_that_fits_with_room_to_spare(name):
    text = recipes.find(name).read_text()
    shown = re.search(rf"cookbook estimate {name} --tune --gpu (\S+)", text)
    assert shown, "the recipe says for which GPU it is set"
    found = tuned(name, kind=shown.group(1))
    usable = found.predictor.gpu.usable_gib
    assert found.own.peak_gib <= 0.94 * usable
    roomy = [each for each in found.faster if each.peak_gib <= 0.9 * usable]
    assert [found.changes(each) for each in roomy] == []


def test_tune_is_printed_and_given_as_json(user: Kit):
    asked = ["estimate", "llama8b_full", "--tune", "activation_checkpointing=full"]
    done = user.cookbook(*asked)
    assert done.returncode == 0, done.stderr
    table = done.stdout.partition("TOKENS/S/GPU")[2].splitlines()
    assert "as the recipe has it" in table[1]
    faster = json.loads(user.cookbook(*asked, "--json").stdout)["tuning"]["faster"]
    assert len(table[2:]) == min(SHOWN, len(faster)) >= 3
    shown = [line.split()[4:] for line in table[2:]]
    assert shown == [each["overrides"].split() for each in faster[:SHOWN]]


def test_for_a_recipe_that_does_not_fit_the_fastest_that_does_is_named():
    found = tuned("qwen32b_full", nodes=1, gpus_per_node=4)
    lines = list(found.lines())
    assert not found.own.fits and found.faster[0].fits
    assert lines[4] == "the recipe does not fit; these settings do, the fastest first:"
    assert "activation_checkpointing=" in lines[5]
    nothing = tuned("qwen32b_full", nodes=1, gpus_per_node=1)
    assert nothing.faster == []
    assert list(nothing.lines())[-1].startswith("neither the recipe nor a setting near it fits")


@pytest.mark.long
def test_rollout_nodes_are_counted_and_their_split_is_tried() -> None:
    def of(*given: str) -> Estimate:
        return estimated("qwen3_8b_grpo_lora", *given)

    same, apart, more = of(), of("resources.rollout=1"), of("resources.rollout=4")
    assert "generating answers" in same.memory.phases.keys() - apart.memory.phases.keys()
    assert (same.step.gpus, apart.step.gpus, more.step.gpus) == (8, 16, 40)
    assert apart.sampler["weights"] == 2 * apart.step.shape.parameters and not same.sampler
    # As many samplers as ranks; more of them have no work, unless requests are smaller.
    seconds = [each.rollout_s["generate"] for each in (same, apart, more)]
    assert seconds[1] == seconds[2] == pytest.approx(seconds[0], rel=0.02)
    assert of("resources.rollout=4", "generation_batch_size=8").rollout_s["generate"] < seconds[2]
    # A transfer is written and read: fp32 for bf16 would be twice as much.
    full = of("resources.rollout=1", "model.lora_rank=null")
    assert full.rollout_s["transfer"] == pytest.approx(4e-9 * full.step.shape.parameters)
    assert apart.rollout_s["transfer"] < full.rollout_s["transfer"] / 90
    # The trainer waits for the answers: with all GPUs in both phases each of them is shorter.
    found = Tuning(apart.predictor)
    assert found.changes(found.faster[0]).endswith("resources.nodes=2 resources.rollout=same")
    assert found.faster[0].step.gpus == 16
    # If it goes on meanwhile, the longer phase is what a rollout takes.
    ahead = of("resources.rollout=1", "max_staleness=1", "importance_cap=2")
    took = Tuning(ahead.predictor).own.time.seconds
    phases = ahead.rollout_s
    assert took == pytest.approx(max(phases["generate"], phases["update"]) + phases["transfer"])
    assert ahead.hours < 0.6 * apart.hours


def test_vllm_gets_all_answers_at_once_and_merges_nothing() -> None:
    one, two = by_vllm("resources.rollout=1"), by_vllm("resources.rollout=2")
    assert one.step.answers_at_once == 2 * two.step.answers_at_once == one.step.answers_per_step
    assert two.rollout_s["generate"] < one.rollout_s["generate"]
    four = by_vllm("resources.rollout=1", "rollout_gpus=4")
    assert four.sampler["weights"] == one.sampler["weights"] / 4
    assert four.step.answers_at_once == 4 * one.step.answers_at_once
    assert one.sampler.keys() == {*("weights", "keys and values", "logits", "working memory")}


def test_vllm_in_turns_has_what_the_trainer_leaves() -> None:
    turns, apart = by_vllm(), by_vllm("resources.rollout=1")
    # It keeps something of each GPU while the ranks compute, and the ranks while it generates.
    assert turns.memory.peak == apart.memory.peak + turns.memory.terms["vLLM asleep"]
    state = turns.sampler["trainer's state"]
    assert 0 < state < turns.memory.peak and "generating answers" not in turns.memory.phases
    usable = turns.gpu.usable_gib * 2**30
    assert turns.vllm_share * turns.gpu.memory_gib * 2**30 + state <= usable
    text = "\n".join(lines(turns))
    assert f"vLLM gets {turns.vllm_share:.2f} of each GPU" in text
    assert "Memory per GPU while vLLM generates" in text
    assert "on the CPU of each node that generates: 122 GiB of weights" in text
    assert "that generates" not in "\n".join(lines(by_vllm("model.lora_rank=null")))
    # A share of one's own: the sum is of the whole of it; one that holds no answer does not fit.
    half = by_vllm("rollout_gpu_memory_utilization=0.5")
    whole = 0.5 * half.gpu.memory_gib * 2**30
    assert sum(half.sampler.values()) == pytest.approx(whole + state) and half.fits
    small = by_vllm("rollout_gpu_memory_utilization=0.18")
    assert not small.fits and "room for 0 of its 32 answers" in "\n".join(lines(small))
    assert small.remedies[-1].fits
    assert small.remedies[-1].overrides == "rollout_gpu_memory_utilization=null"
    large = by_vllm("rollout_gpu_memory_utilization=0.9")
    assert not large.fits and sum(large.sampler.values()) > usable
    # Less room: the same answers take several turns.
    some = by_vllm("rollout_gpu_memory_utilization=0.22")
    assert some.fits and some.rollout_s["generate"] > 1.1 * turns.rollout_s["generate"]
    four = by_vllm("rollout_gpus=4")
    assert four.sampler["weights"] == turns.sampler["weights"] / 4
    assert turns.fits and estimated("qwen3_0_6b_grpo", "rollout_engine=vllm").fits


def test_a_reward_model_is_on_the_gpus_that_train(tmp_path: Path) -> None:
    save_file({"score.weight": torch.zeros(1, 10**6)}, tmp_path / "model.safetensors")
    judge = ["+rewards.judge.function=reward_model", f"+rewards.judge.model={tmp_path}"]
    beside, apart = (
        estimated("qwen3_8b_grpo_lora", *judge, *given) for given in ((), ("resources.rollout=1",))
    )
    assert beside.memory.terms["reward models"] == apart.memory.terms["reward models"] == 2 * 10**6
    assert "reward models" not in apart.sampler
    # A forward pass of all answers: a hundredth of what generating them takes.
    assert beside.rollout_s["score"] == pytest.approx(apart.rollout_s["score"])
    assert 0 < beside.rollout_s["score"] < beside.rollout_s["generate"] / 100
