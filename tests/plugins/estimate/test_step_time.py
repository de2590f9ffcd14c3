"""The predicted time of a step: what it computes, what it sends, and published speeds."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from click.testing import CliRunner

from benchmarks import speeds
from launcher import gpus, paths
from launcher import site as cluster
from launcher.cli import cookbook
from launcher.errors import RecipeFault
from launcher.recipe import load as recipes
from plugins.estimate.launcher.compute import DENSE, OTHER, Compute
from plugins.estimate.launcher.links import Links
from plugins.estimate.launcher.reached import Reached
from plugins.estimate.launcher.recipe_step import step_of
from plugins.estimate.launcher.shapes import shape_of
from plugins.estimate.launcher.step_config import StepConfig
from plugins.estimate.launcher.step_time import computing, step_time
from runspec.description import PUBLISHED
from runspec.layout import Layout
from tests.launcher.kit import Kit

H100 = gpus.by_name("h100-80")
LINKS = Links.of(H100, 8)
SHAPE = shape_of({}, PUBLISHED / "Llama-3.3-70B-Instruct")
FULL = StepConfig(
    SHAPE, "full", Layout(shard=16), batch=2, checkpointing="full", loss="linear", chunks=0
)
SPLIT = replace(FULL, layout=Layout(shard=2, tensor_parallel=8), batch=16)
LORA = replace(
    FULL,
    method="lora",
    lora_rank=16,
    lora_targets=("self_attn.q_proj", "self_attn.v_proj"),
    layout=Layout(shard=8, replicate=2),
)
STEPS = [FULL, SPLIT, LORA, replace(LORA, accumulation=3), replace(FULL, accumulation=2)]


@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_its_computing_and_what_it_waits_for(step: StepConfig):
    before = 0.0
    for gbs in (1e9, 50.0, 10.0, 3.0, 1.0):
        found = step_time(step, H100, replace(LINKS, between_gbs=gbs))
        # A slower network never helps.
        assert found.seconds >= before and 0 < found.computing_share <= 1
        whole = computing(step, H100).in_all(step)
        assert found.seconds - found.waiting_s == pytest.approx(whole)
        before = found.seconds
    unlimited = replace(LINKS, within_gbs=1e12, between_gbs=1e12)
    found = step_time(step, H100, unlimited)
    assert found.computing_share > 0.99 and found.mfu <= found.hfu < Reached.of(H100).products
    # What is recomputed takes a layer's forward pass more, or that of every second layer.
    layers, forward = 80 * step.accumulation, Compute(step, H100).layer(SHAPE.kinds[0])[0]
    least = step_time(replace(step, checkpointing="none"), H100, unlimited).seconds
    for mode, share in (("full", 1.0), ("2", 0.5)):
        again = step_time(replace(step, checkpointing=mode), H100, unlimited).seconds - least
        assert again == pytest.approx(share * layers * forward, rel=0.02)


def test_published_speeds_are_near_and_stand_in_the_docs():
    found = [*speeds.rows()]
    errors = [abs(row.error) for row in found]
    assert median(errors) < 0.1 and max(errors) < 0.3
    assert (
        "\n".join(speeds.lines())
        in (paths.REPO_ROOT / "benchmarks/results/published.md").read_text()
    )
    # The ranges that an estimate prints.
    dense = [error for row, error in zip(found, errors, strict=True) if " EP " not in row.workload]
    assert sum(error <= DENSE for error in dense) >= 0.9 * len(dense) and max(errors) < OTHER


def test_the_sites_network_is_taken_unless_one_is_typed(user: Kit, tmp_path, monkeypatch):
    # With weights sharded over two nodes a slow network takes most of the time.
    asked = ["estimate", "llama8b_full", "--nodes=2", "--json"]
    rates = [
        json.loads(user.cookbook(*asked, *options).stdout)["tokens_per_second_per_gpu"]
        for options in ([], ["--network=400"], ["--network=12.5"])
    ]
    assert rates[0] == rates[1] > 2 * rates[2]
    monkeypatch.setattr(paths, "CLUSTERS", tmp_path)
    (tmp_path / "site.yaml").write_text("network_gbits: 100\n")
    assert cluster.load("site").network_gbits == 100
    (tmp_path / "none.yaml").write_text("network_gbits: 0\n")
    with pytest.raises(RecipeFault, match="network_gbits must be a number above 0, got 0"):
        cluster.load("none")


def test_time_and_cost_of_so_many_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "CLUSTERS", tmp_path)
    (tmp_path / "site.yaml").write_text("gpu_hour_price: 2.5\ncurrency: EUR\n")
    asked = ["estimate", "llama8b_lora", "--cluster=site", "--tokens=36000000000"]
    found = json.loads(CliRunner().invoke(cookbook, [*asked, "--json"]).output)
    assert found["cost"] == pytest.approx(found["hours"] * 8 * 2.5)
    shown = CliRunner().invoke(cookbook, asked).output
    assert f"GPU-hours, {found['cost']:,.2f} EUR" in shown
    assert "36,000,000,000 tokens, as given" in shown


def test_a_replica_per_node_follows_the_number_of_nodes():
    for nodes in (1, 4):
        loaded = recipes.load("llama70b_lora", resources={"nodes": nodes})
        step = step_of(loaded.resolved(Path("/root"), "run"), nodes, 8)
        assert step.layout == Layout(replicate=nodes, shard=4, tensor_parallel=2)


def test_what_a_reference_leads_to_must_be_of_its_keys_kind():
    fault = "data_parallel_replicate_dim must be a whole number, 1 or more, or -1, got '24:00"
    with pytest.raises(RecipeFault, match=fault):
        recipes.load("llama70b_lora", ["data_parallel_replicate_dim=${resources.time}"])
