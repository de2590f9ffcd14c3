"""cookbook estimate --scaling: times that follow from messages and links, and what is chosen."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from benchmarks import speeds
from launcher import paths
from launcher import site as cluster
from launcher.errors import RecipeFault
from launcher.recipes import recipe as recipes
from launcher.sizing import gpus
from launcher.sizing import step_time as times
from launcher.sizing.activations import recomputed_elements
from launcher.sizing.communication import Message, messages
from launcher.sizing.compute import DENSE, OTHER, Compute, Reached, grouped_by
from launcher.sizing.model import shape_of
from launcher.sizing.recipe_step import step_of
from launcher.sizing.step_config import StepConfig
from launcher.sizing.step_time import Links, step_time
from runspec.layout import Layout
from tests.launcher.kit import Kit

GOLDEN = Path(__file__).parent / "golden"
H100 = gpus.by_name("h100-80")
LINKS = Links.of(H100, 8)
UNLIMITED = replace(LINKS, within_gbs=1e12, between_gbs=1e12)
SHAPE = shape_of({"_component_": "torchtune.models.llama3_3.llama3_3_70b"}, None)
FULL = StepConfig(
    SHAPE, "full", Layout(shard=16), batch=2, checkpointing="full", loss="linear", chunks=0
)
SPLIT = replace(FULL, layout=Layout(shard=2, tensor_parallel=8), batch=16)
LORA = replace(
    FULL,
    method="lora",
    lora_rank=16,
    lora_targets=("attn.q_proj", "attn.v_proj"),
    layout=Layout(shard=8, replicate=2),
)
STEPS = [FULL, SPLIT, LORA, replace(LORA, accumulation=3), replace(FULL, accumulation=2)]


@pytest.mark.parametrize(
    ("step", "group", "ranks"),
    [
        (FULL, "shard", 8),
        (SPLIT, "tensor", 8),
        (SPLIT, "shard", 1),
        (LORA, "shard", 8),
        (LORA, "replicate", 1),
        (replace(FULL, layout=Layout(shard=8, tensor_parallel=2)), "shard", 4),
        (replace(FULL, layout=Layout(tensor_parallel=16)), "tensor", 8),
        (replace(FULL, layout=Layout(shard=4, replicate=4)), "replicate", 2),
        (FULL, "all", 8),
    ],
)
def test_how_many_ranks_of_a_group_share_a_node(step: StepConfig, group: str, ranks: int):
    assert LINKS.ranks_per_node(step.layout, group) == ranks


@pytest.mark.parametrize(
    ("step", "group", "ranks", "gbs", "latency_us"),
    [
        # Seven hops of NVLink; eight GPUs leave their node together; one alone has its own link.
        (SPLIT, "tensor", 8, 450, 8.4 + 7 * 3.4),
        (FULL, "shard", 16, 400, 8.4 + 14 * 3.4 + 9.6),
        (SPLIT, "shard", 2, 50, 8.4 + 9.6),
    ],
)
def test_a_large_message_takes_a_rings_time(step, group, ranks, gbs, latency_us):
    message = Message("weights", "all-gather", group, ranks, 2e9, 3, "forward")
    seconds = 2e9 * (ranks - 1) / ranks / (times.REACHED * gbs * 1e9) + latency_us / 1e6
    assert LINKS.seconds(step.layout, message) == pytest.approx(seconds)
    assert message.sent == pytest.approx(3 * 2e9 * (ranks - 1) / ranks)


def test_an_all_reduce_sends_a_gathers_bytes_twice():
    gather, reduce = (
        Message("gradients", kind, "shard", 16, 2e9, 1, "reduce")
        for kind in ("all-gather", "all-reduce")
    )
    assert reduce.sent == 2 * gather.sent == pytest.approx(2 * 2e9 * 15 / 16)
    once, twice = (LINKS.seconds(FULL.layout, message) for message in (gather, reduce))
    assert twice == pytest.approx(2 * once, rel=0.01)


def test_a_small_message_takes_the_latency_of_the_quickest_protocol():
    message = Message("norm", "all-reduce", "tensor", 8, 4, 1, "step")
    assert LINKS.seconds(SPLIT.layout, message) == pytest.approx((3.6 + 14 * 0.47) / 1e6, rel=1e-3)
    pcie = replace(LINKS, within_gbs=32)
    assert pcie.seconds(SPLIT.layout, message) == pytest.approx((3.6 + 14 * 1.0) / 1e6, rel=1e-3)


@pytest.mark.parametrize("step", STEPS)
def test_with_unlimited_links_a_step_is_its_computing(step: StepConfig, monkeypatch):
    monkeypatch.setattr(times, "PROTOCOLS", (times.Protocol(0, 0, 0, 0, 1.0),))
    plain = replace(step, checkpointing="none")
    found = step_time(plain, H100, UNLIMITED)
    computing = times.parts_of(plain, H100).in_all(80, step.accumulation)
    assert found.seconds == pytest.approx(computing, rel=1e-6)
    assert found.computing_share == pytest.approx(1)
    assert found.mfu == found.hfu < Reached.of(H100).products
    assert step_time(plain, H100, UNLIMITED, 2.0).seconds == pytest.approx(2 * found.seconds)
    # A layer's forward once more, or in every second one.
    layers = 80 * step.accumulation
    forward = layers * Compute(plain, H100).layer(SHAPE.kinds[0])[0]
    # What is made element by element is read and written once more, at 85 % of 3.35 TB/s.
    elements = layers * 2 * recomputed_elements(step, SHAPE.kinds[0]) / (0.85 * 3.35e12)
    for mode, more in (("full", forward), ("2", forward / 2), ("op", elements)):
        again = step_time(replace(step, checkpointing=mode), H100, UNLIMITED)
        assert again.seconds - found.seconds == pytest.approx(more, abs=1e-6)


@pytest.mark.parametrize("step", STEPS)
def test_without_computing_a_step_is_all_that_is_sent(step: StepConfig):
    """Nothing hides behind anything but what goes over another kind of link meanwhile."""
    slow = replace(LINKS, between_gbs=1.0)
    sent = sum(
        message.count * slow.seconds(step.layout, message)
        for message in messages(step)
        if not message.on_cpu
    )
    gpu = replace(H100, bf16_tflops=1e12, memory_bandwidth_gbs=1e15)
    at_once = Reached.of(H100)._replace(launch_s=0, wait_s=0)
    found = step_time(step, gpu, slow, 1.0, at_once)
    assert 0.7 * sent <= found.seconds <= sent * 1.0001


@pytest.mark.parametrize("step", STEPS)
def test_a_slower_network_never_helps_and_parts_add_up(step: StepConfig):
    before = 0.0
    for gbs in (1000.0, 50.0, 10.0, 3.0, 1.0):
        found = step_time(step, H100, replace(LINKS, between_gbs=gbs))
        assert found.seconds >= before and found.sharding_s >= 0 and found.tensor_parallel_s >= 0
        computing = found.seconds - found.sharding_s - found.tensor_parallel_s
        assert found.computing_share == pytest.approx(computing / found.seconds)
        before = found.seconds


def test_published_speeds_are_near_and_the_page_has_them():
    found = [*speeds.rows()]
    errors = [abs(row.error) for row in found]
    assert median(errors) < 0.1 and max(errors) < 0.3
    page = (paths.REPO_ROOT / "benchmarks/results/published.md").read_text()
    assert "\n".join(speeds.lines()) in page
    # The ranges that an estimate prints.
    dense = [error for row, error in zip(found, errors, strict=True) if " EP " not in row.workload]
    assert sum(error <= DENSE for error in dense) >= 0.9 * len(dense) and max(errors) < OTHER


def test_each_term_of_the_computing_has_its_reason():
    a100, compute = gpus.by_name("a100-80"), Compute(FULL, H100)
    # A narrow product waits for memory: the same FLOPs in two halves take longer.
    assert 2 * compute._product(8192, 4096, 512) > 1.05 * compute._product(8192, 4096, 1024)
    attention = SHAPE.kinds[0].attention
    short, long = (
        Compute(replace(FULL, length=n, batch=8192 // n), H100)._attention(attention, False)
        for n in (1024, 8192)
    )
    assert 5 < long / short < 8
    made = recipes.load("qwen3_30b_a3b_full").resolved(Path("/root"), "run")
    experts = step_of(made, 1, 8)
    block = experts.shape.kinds[0]
    steps = (replace(experts, element_bytes=4), experts, experts)
    kinds = list(map(grouped_by, steps, (a100, a100, H100)))
    assert kinds == ["a loop", "a loop", "torch"]
    looped, older, native = (
        Compute(step, gpu).forward_terms(block)["grouped"]
        for step, gpu in zip(steps, (a100, a100, H100), strict=True)
    )
    assert older > native and looped > 2 * Reached.of(a100).wait_s
    made = recipes.load("qwen3_5_35b_a3b_lora").resolved(Path("/root"), "run")
    linear = Compute(step_of(made, 1, 8), H100)
    kinds = [linear.forward_terms(each) for each in linear.step.shape.kinds]
    slow = next(terms for terms in kinds if "linear attention" in terms)
    fast = next(terms for terms in kinds if "attention" in terms)
    assert slow["linear attention"] > 5 * fast["attention"]
    # NF4 is unpacked in each pass; what is not compiled reads and writes more.
    packed = Compute(replace(LORA, method="qlora"), H100)
    assert packed.layer(SHAPE.kinds[0])[0] > Compute(LORA, H100).layer(SHAPE.kinds[0])[0]
    assert Compute(replace(FULL, compiled=True), H100).layer(SHAPE.kinds[0]) < compute.layer(
        SHAPE.kinds[0]
    )


def test_what_is_printed(user: Kit):
    done = user.cookbook("estimate", "llama70b_lora", "--scaling", "--network=100")
    assert done.returncode == 0, done.stderr
    wanted = (GOLDEN / "estimate_scaling.txt").read_text()
    assert done.stdout[done.stdout.index("Messages of one step") :] == wanted


def test_the_choice_fits_and_is_about_the_fastest(user: Kit):
    done = user.cookbook("estimate", "llama70b_full", "--scaling", "--network=25", "--json")
    found = json.loads(done.stdout)["scaling"]
    assert found["links"]["between_gbs"] == pytest.approx(25 / 8)
    assert found["sent_bytes"] == pytest.approx(sum(m["sent"] for m in found["messages"]))
    for nodes, overrides in found["choice"].items():
        fitting = [c for c in found["compared"] if c["nodes"] == int(nodes) and c["fits"]]
        rates = {c["overrides"]: c["tokens_per_second_per_gpu"] for c in fitting}
        assert rates[overrides] >= 0.99 * max(rates.values())
    # Where the network is slow, layers split within a node leave less to send over it.
    assert not found["choice"]["2"].startswith("tensor_parallel_dim=1 ")
    # What is printed as overrides gives the figure that stands beside it.
    own = user.cookbook(
        "estimate", "llama70b_full", *found["choice"]["2"].split(), "--scaling", "--network=25"
    )
    rate = next(c for c in found["compared"] if c["overrides"] == found["choice"]["2"])
    assert f"{rate['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU: " in own.stdout


def test_the_sites_network_is_taken_unless_one_is_typed(user: Kit, tmp_path, monkeypatch):
    gbits = {
        tuple(options): json.loads(
            user.cookbook("estimate", "demo", "--scaling", "--json", *options).stdout
        )["scaling"]["links"]["between_gbs"]
        * 8
        for options in ([], ["--network=12.5"], ["--gpu=a100-80"])
    }
    assert gbits == {(): 400, ("--network=12.5",): 12.5, ("--gpu=a100-80",): 200}
    monkeypatch.setattr(paths, "CLUSTERS", tmp_path)
    (tmp_path / "site.yaml").write_text("network_gbits: 100\n")
    assert cluster.load("site").network_gbits == 100
    (tmp_path / "none.yaml").write_text("network_gbits: 0\n")
    with pytest.raises(RecipeFault, match="network_gbits must be a number above 0, got 0"):
        cluster.load("none")


def test_a_replica_per_node_follows_the_number_of_nodes():
    for nodes in (1, 4):
        loaded = recipes.load("llama70b_lora", resources={"nodes": nodes})
        step = step_of(loaded.resolved(Path("/root"), "run"), nodes, 8)
        assert step.layout == Layout(replicate=nodes, shard=4, tensor_parallel=2)


def test_what_a_reference_leads_to_must_be_of_its_keys_kind():
    fault = "data_parallel_replicate_dim must be a whole number, 1 or more, or -1, got '24:00"
    with pytest.raises(RecipeFault, match=fault):
        recipes.load("llama70b_lora", ["data_parallel_replicate_dim=${resources.time}"])
