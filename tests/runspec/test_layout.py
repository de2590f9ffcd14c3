"""The one set of layout rules."""

import itertools

import pytest

from runspec.layout import Layout, LayoutError, StepFacts


def keys(tensor=None, replicate=None, shard=None, expert=None):
    given = {
        "tensor_parallel_dim": tensor,
        "data_parallel_replicate_dim": replicate,
        "data_parallel_shard_dim": shard,
        "expert_parallel_dim": expert,
    }
    return {key: value for key, value in given.items() if value is not None}


@pytest.mark.parametrize("ranks", [1, 2, 6, 8, 16])
def test_a_layout_uses_every_rank_once_or_is_refused(ranks):
    sizes = range(1, ranks + 1)
    for tensor, replicate in itertools.product(sizes, sizes):
        fits = ranks % (tensor * replicate) == 0
        if fits:
            layout = Layout.of(keys(tensor, replicate), ranks)
            assert (layout.tensor_parallel, layout.replicate) == (tensor, replicate)
            assert layout.ranks == ranks
            assert layout.data_parallel * tensor == ranks
        else:
            with pytest.raises(LayoutError):
                Layout.of(keys(tensor, replicate), ranks)


def test_what_a_recipe_leaves_out_is_one_replica_sharded_over_all():
    assert Layout.of({}, 8) == Layout(replicate=1, shard=8, tensor_parallel=1)
    assert Layout.of({"tensor_parallel_dim": None}, 8).shard == 8


def test_all_that_is_left_may_be_replicas():
    assert Layout.of(keys(tensor=2, replicate=-1), 8) == Layout(4, 1, 2)
    assert Layout.of(keys(replicate=-1, shard=4), 8) == Layout(2, 4, 1)


@pytest.mark.parametrize(
    ("config", "gpus_per_node", "words"),
    [
        (keys(tensor=3), 8, "tensor_parallel_dim 3 does not divide 2 x 8 = 16 ranks"),
        (keys(tensor=16), 8, "does not divide the 8 GPUs per node"),
        (keys(replicate=3), 8, "data_parallel_replicate_dim 3"),
        (keys(replicate=2, shard=4), 8, "is not 2 x 8 = 16 ranks"),
        (keys(expert=3), 8, "expert_parallel_dim 3"),
        (keys(tensor=2, expert=3), None, "expert_parallel_dim 3"),
    ],
)
def test_a_fault_names_the_key_and_what_to_change(config, gpus_per_node, words):
    with pytest.raises(LayoutError) as refused:
        Layout.of(config, 16, gpus_per_node)
    assert words in refused.value.faults[0]
    assert ": " in refused.value.faults[0]


def test_layers_are_not_split_across_nodes_only_if_the_node_is_known():
    assert Layout.of(keys(tensor=4), 4).tensor_parallel == 4
    with pytest.raises(LayoutError):
        Layout.of(keys(tensor=4), 4, gpus_per_node=2)


def test_sizes_of_fp8_and_nf4_are_those_of_a_rank():
    """A layer of 192 inputs, which tensor parallelism splits, and one of 48 outputs."""
    linear = {(192, 64, True), (64, 48, False), (64, 1, False)}

    def faults(ranks: int, **what: bool) -> list[str]:
        found = StepFacts(tensor_parallel=ranks, linear=linear, **what).faults()
        return [fault.partition(";")[0].partition(": choose")[0] for fault in found]

    assert faults(3, quantised=True) == faults(3, fp8=True) == faults(2) == []
    assert faults(2, quantised=True) == [
        "tensor_parallel_dim 2 does not divide 3 blocks of 64 inputs"
    ]
    (fault,) = faults(2, fp8=True)
    assert fault.endswith("multiples of 16, and this model has layers of 48 split over 2 ranks")


def test_a_model_whose_sizes_do_not_divide_is_refused_by_name():
    sizes = {"num_heads": 8, "num_kv_heads": 2, "vocab_size": 1000}

    def faults(ranks: int) -> list[str]:
        return StepFacts(tensor_parallel=ranks, sizes=sizes).faults()

    assert faults(2) == []
    assert [fault.split("'s ")[1].split(":")[0] for fault in faults(4)] == ["num_kv_heads 2"]
    assert len(faults(3)) == 3
