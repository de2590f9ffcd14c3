"""cookbook estimate --tune: faster settings of the same step, and what the recipes ship."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launcher import recipe as recipes
from launcher.estimate import Report
from launcher.tuning import CHECKPOINTING, SHOWN, Tuning
from tests.launcher.kit import Kit


def tuned(name: str, *overrides: str, kind: str = "h100-80", nodes: int = 1) -> Tuning:
    report = Report.of(recipes.load(name, overrides, {"nodes": nodes}), Path("/x"), kind)
    return Tuning(report)


def test_faster_settings_fit_and_keep_the_rows_of_a_step():
    found = tuned("llama70b_lora", "enable_activation_checkpointing=true", nodes=2)
    rates = [each.tokens_per_second_per_gpu for each in found.faster]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 1.3 * found.own.tokens_per_second_per_gpu
    for each in found.faster:
        assert each.plan.samples_a_step == found.own.plan.samples_a_step
        assert each.peak_gib <= found.report.device.usable_gib
        assert each.plan.ranks == 16


def test_what_a_setting_changes_gives_its_figures():
    asked = ["enable_activation_checkpointing=true", "ac_mode=null"]
    for each in tuned("llama8b_full", *asked).faster[:3]:
        again = tuned("llama8b_full", *asked, *each.overrides.split()).own
        assert again.peak_gib == pytest.approx(each.peak_gib)
        assert again.tokens_per_second_per_gpu == pytest.approx(each.tokens_per_second_per_gpu)
        assert again.overrides == ""


def test_recomputing_less_is_faster_by_what_it_leaves_out():
    full, op, none = (
        tuned("llama8b_full", *CHECKPOINTING[mode].split()).own.tokens_per_second_per_gpu
        for mode in ("full", "op", "none")
    )
    assert full < op < none
    # A third of the FLOPs of forward and backward is a forward pass.
    assert none / full == pytest.approx(4 / 3, rel=0.03)


@pytest.mark.parametrize("name", [name for name in recipes.names() if name != "demo"])
def test_recipes_ship_the_fastest_setting_that_fits_with_room_to_spare(name):
    text = recipes.find(name).read_text()
    shown = re.search(rf"cookbook estimate {name} --tune --gpu (\S+)", text)
    assert shown, "the recipe says for which GPU it is set"
    loaded = recipes.load(name)
    found = Tuning(Report.of(loaded, Path("/x"), shown.group(1)))
    usable = found.report.device.usable_gib
    assert found.own.peak_gib <= 0.94 * usable
    roomy = [each for each in found.faster if each.peak_gib <= 0.9 * usable]
    assert [each.overrides for each in roomy] == []


def test_tune_is_printed_and_given_as_json(user: Kit):
    asked = ["estimate", "llama8b_full", "--tune", "ac_mode=full"]
    done = user.cookbook(*asked)
    assert done.returncode == 0, done.stderr
    table = done.stdout.partition("TOKENS/S/GPU")[2].splitlines()
    assert "as the recipe has it" in table[1]
    faster = json.loads(user.cookbook(*asked, "--json").stdout)["tuning"]["faster"]
    assert len(faster) > SHOWN == len(table[2:])
    shown = [line.split()[2:] for line in table[2:]]
    assert shown == [each["overrides"].split() for each in faster[:SHOWN]]
