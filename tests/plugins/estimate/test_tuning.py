"""cookbook estimate --tune: faster settings of the same step, and what the recipes ship."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from launcher.recipe import load as recipes
from plugins.estimate.launcher.estimate import Estimate
from plugins.estimate.launcher.recipe_step import step_of
from plugins.estimate.launcher.search import settings
from plugins.estimate.launcher.text import lines
from plugins.estimate.launcher.tuning import SHOWN, Tuning
from tests.launcher.kit import Kit


def estimated(name: str, *overrides: str, kind: str = "h100-80", **resources: int) -> Estimate:
    return Estimate.of(recipes.load(name, overrides, resources), Path("/x"), kind)


def tuned(name: str, *overrides: str, **more: Any) -> Tuning:
    return Tuning(estimated(name, *overrides, **more).predictor)


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
    shown = list(found.lines())
    assert not found.own.fits and found.faster[0].fits
    assert shown[4] == "the recipe does not fit; these settings do, the fastest first:"
    assert "activation_checkpointing=" in shown[5]
    nothing = tuned("qwen32b_full", nodes=1, gpus_per_node=1)
    assert nothing.faster == []
    assert list(nothing.lines())[-1].startswith("neither the recipe nor a setting near it fits")


def test_of_rollout_nodes_nothing_is_computed() -> None:
    same = estimated("qwen3_8b_grpo_lora")
    apart = estimated("qwen3_8b_grpo_lora", "resources.rollout=1")
    assert same.memory.phases.keys() - apart.memory.phases.keys() == {"generating answers"}
    assert 0.4 < same.hours_generating / same.hours < 0.6 and apart.hours_generating == 0
    said = "not computed: the rollout nodes"
    assert said in "\n".join(lines(apart)) and said not in "\n".join(lines(same))


def test_a_reward_model_is_on_the_gpus_that_train(tmp_path: Path) -> None:
    save_file({"score.weight": torch.zeros(1, 10**6)}, tmp_path / "model.safetensors")
    judge = ["+rewards.judge.function=reward_model", f"+rewards.judge.model={tmp_path}"]
    found = estimated("qwen3_8b_grpo_lora", *judge)
    assert found.memory.terms["reward models"] == 2 * 10**6
