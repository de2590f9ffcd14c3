"""cookbook estimate --tune: faster settings of the same step, and what the recipes ship."""

import json
import re
from pathlib import Path

import pytest

from launcher.errors import UsageFault
from launcher.recipes import recipe as recipes
from launcher.sizing.estimate import DEFAULT_MFU, Estimate
from launcher.sizing.predictions import SHOWN, Tuning
from launcher.sizing.search import Prediction, settings
from launcher.sizing.step_config import step_of
from tests.launcher.kit import Kit


def tuned(
    name: str,
    *overrides: str,
    kind: str = "h100-80",
    nodes: int | None = None,
    mfu: float = DEFAULT_MFU,
) -> Tuning:
    recipe = recipes.load(name, overrides, {"nodes": nodes} if nodes else {})
    return Tuning(Estimate(recipe, Path("/x"), kind, mfu).predictor)


def mfu_while_computing(found: Prediction) -> float:
    return found.time.mfu / found.time.computing_share


def test_no_setting_that_check_refuses_is_looked_at() -> None:
    """Each move alone is sound: what the rules refuse is a combination."""
    given = ["enable_fp8_training=true"]
    config = recipes.load("llama8b_lora", given).train_config(Path("/none"), "/none/run")
    step = step_of(config, 1, 8)
    layouts = [(1, 1), (2, 1)]
    found = [*settings(step, method=("full", "lora", "qlora"), layout=layouts)]
    assert [(each.method, each.layout.tensor_parallel) for each in found] == [
        ("full", 1),
        ("full", 2),
        ("lora", 1),
        ("lora", 2),
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
        # The same GPU: what it reaches without recomputation is more of the peak as MFU.
        mfu = mfu_while_computing(each)
        again = tuned("llama8b_full", *asked, *found.changes(each).split(), nodes=1, mfu=mfu)
        assert again.own.peak_gib == pytest.approx(each.peak_gib)
        assert again.own.rate == pytest.approx(each.rate)
        assert again.own.time.hfu == pytest.approx(each.time.hfu)
        assert again.changes(again.own) == ""


def test_mfu_is_of_the_recipes_own_step_and_recomputation_takes_more_of_the_gpu():
    """All layers recomputed: 4 FLOPs for every 3 in layers, none more in the output layer."""
    found = tuned("llama8b_full", "activation_checkpointing=full", nodes=1, mfu=0.36)
    flops = found.own.step.flops
    assert mfu_while_computing(found.own) == pytest.approx(0.36)
    assert found.predictor.peak_share == pytest.approx(0.36 * flops.hardware / flops.model)
    assert 1.30 < flops.hardware / flops.model < 4 / 3
    for each in found.faster:
        took = each.time
        assert took.hfu / took.computing_share <= found.predictor.peak_share * (1 + 1e-9)
        assert took.mfu <= took.hfu
    with pytest.raises(
        UsageFault, match=r"--mfu 0\.8 is more than h100-80 can reach .* at most 0\.76"
    ):
        tuned("llama8b_full", "activation_checkpointing=full", mfu=0.8)


def test_recomputing_less_is_faster_by_what_it_leaves_out():
    full, op, none = (
        tuned("llama8b_full", f"activation_checkpointing={mode}", nodes=1)
        for mode in ("full", "op", "none")
    )
    rates = [full.predictor.of(each.own.step).rate for each in (full, op, none)]
    assert rates[0] < rates[1] < rates[2]
    # A third of the FLOPs of forward and backward is a forward pass.
    assert rates[2] / rates[0] == pytest.approx(4 / 3, rel=0.03)


@pytest.mark.parametrize("name", [name for name in recipes.names() if name != "demo"])
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
    assert len(faster) > SHOWN == len(table[2:])
    shown = [line.split()[4:] for line in table[2:]]
    assert shown == [each["overrides"].split() for each in faster[:SHOWN]]


def test_for_a_recipe_that_does_not_fit_the_fastest_that_does_is_named():
    recipe = recipes.load("qwen32b_full", resources={"nodes": 1, "gpus_per_node": 4})
    found = Tuning(Estimate(recipe, Path("/nowhere"), "h100-80").predictor)
    lines = list(found.lines())
    assert not found.own.fits and found.faster[0].fits
    assert lines[4] == "the recipe does not fit; these settings do, the fastest first:"
    assert "activation_checkpointing=" in lines[5]
    alone = recipes.load("qwen32b_full", resources={"nodes": 1, "gpus_per_node": 1})
    nothing = Tuning(Estimate(alone, Path("/nowhere"), "h100-80").predictor)
    assert nothing.faster == []
    assert list(nothing.lines())[-1].startswith("neither the recipe nor a setting near it fits")


def test_time_and_cost_of_so_many_tokens():
    recipe = recipes.load("llama8b_lora")
    found = Estimate(recipe, Path("/nowhere"), tokens=36 * 10**9, price=2.5, currency="EUR")
    assert found.cost == pytest.approx(found.hours * 8 * 2.5)
    text = "\n".join(found.lines())
    assert f"GPU-hours, {found.cost:,.2f} EUR" in text
    assert "36,000,000,000 tokens, as given" in text
    assert found.as_json()["cost"] == found.cost
