"""What ranks really send each other in a step, message by message, and the launcher's formulas."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.sizing.communication import Message, messages
from launcher.sizing.recipe_step import step_of
from tests.model_sizes import DEMO as MODEL_SIZES
from tests.trainer import forks
from tests.trainer.runs import lora_model, train, write_config
from tests.trainer.test_trace import recipe
from tests.trainer.transformers_cases import write
from trainer import config as configs
from trainer import trace

BYTES = {"double": 8, "float": 4, "c10::BFloat16": 2, "unsigned char": 1, "long int": 8}
# What c10d calls each kind, and which argument holds all of it.
SENT = {
    "_allgather_base_": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "allreduce_": ("all-reduce", 0),
}
ALL_TO_ALL = "alltoall_base_"
# Fewer bytes are the numbers of rows per expert.
SMALL = 512
# The same a level higher, where the result of a gather is not among the arguments.
FUNCTIONAL = {
    "all_gather_into_tensor": ("all-gather", None),
    "reduce_scatter_tensor": ("reduce-scatter", 0),
    "all_reduce": ("all-reduce", 0),
}
LINEAR = {"loss": {"_component_": "trainer.layers.loss.LinearCrossEntropy"}}
CHUNKED = {"loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}}
TP = {"tensor_parallel_dim": 2}
REPLICAS = {"data_parallel_replicate_dim": 2}
TWICE = {"gradient_accumulation_steps": 2}
SYNCED = TWICE | {"sync_each_micro_batch": True}
RECOMPUTED = {"enable_activation_checkpointing": True}
BY_OPERATION = {"ac_mode": "selective", "ac_option": "op"}
EVERY_SECOND = {"ac_mode": "selective", "ac_option": 2}
REPLICATED = {"data_parallel_replicate_dim": -1}
BF16 = {"dtype": "bf16"}
MASTERS = BF16 | {"master_weights": "fp32"}
LORA = {"model": lora_model(lora_dropout=0.0)}
QLORA = {"model": lora_model(lora_dropout=0.0, quantize_base=True)}
DORA = {"model": lora_model(lora_dropout=0.0, use_dora=True)}
LORA_OUTPUT = {"model": lora_model(lora_dropout=0.0, apply_lora_to_output=True)}
LAST_MATRICES = {"model": lora_model(lora_dropout=0.0, lora_attn_modules=["output_proj"])}
EP = {"expert_parallel_dim": 2}
ALL_LORA = {"model": {"lora_rank": 4, "lora_alpha": 8}}
Runs = dict[int, dict[str, dict[str, Any]]]
QUICK: Runs = {
    2: {
        "lora": LORA | BF16 | TWICE | RECOMPUTED | LINEAR,
        "full tp": TP | TWICE | RECOMPUTED | CHUNKED,
    }
}
LONG: Runs = {
    2: {
        "full": {},
        "full recomputed": RECOMPUTED | BF16 | LINEAR,
        "full kept": {"fsdp_reshard_after_forward": False},
        "full summed in bf16": BF16 | TWICE | {"fsdp_reduce_dtype": "bf16"},
        "full tp by operation": TP | BY_OPERATION,
        "full tp masters": TP | MASTERS,
        "full two replicas": REPLICAS | TWICE,
        "lora replicated": LORA | REPLICATED | BF16 | TWICE,
        "lora tp": LORA | TP | LINEAR | BF16,
        "lora tp output": LORA_OUTPUT | TP,
        "lora tp last matrices": LAST_MATRICES | TP | RECOMPUTED,
        "dora tp": DORA | TP | RECOMPUTED,
        "qlora": QLORA | BF16,
        "qlora fp32": QLORA,
    },
    4: {
        "full replicas synced": REPLICAS | SYNCED,
        "full tp fsdp": TP | TWICE | RECOMPUTED | BF16,
        "full replicas": REPLICAS | TWICE | LINEAR,
        "lora tp fsdp": LORA | TP | BF16 | RECOMPUTED | TWICE,
        "full tp fsdp synced": TP | SYNCED | BF16,
        "full tp replicas": TP | REPLICAS,
        "full tp fsdp every second": TP | EVERY_SECOND,
        "qlora tp fsdp": QLORA | TP | BF16 | RECOMPUTED | LINEAR,
        "lora replicas": LORA | REPLICAS | BF16,
        "lora tp replicated": LORA | TP | REPLICATED | LINEAR,
    },
}


def counted(folder: Path) -> Counter[tuple[str, int]]:
    """The messages of the step that the trainer's own profiler recorded: (kind, bytes)."""
    (file,) = (folder / "profile").glob("*.json")
    events = [event for event in json.loads(file.read_text())["traceEvents"] if "args" in event]
    types = list_types(events)
    found: Counter[tuple[str, int]] = Counter()
    exchanged: list[tuple[int, int]] = []
    for event in events:
        space, _, name = event.get("name", "").partition("::")
        if space == "c10d" and name == ALL_TO_ALL:
            dims, dtypes = (event["args"][key] for key in ("Input Dims", "Input type"))
            exchanged.append(tuple(math.prod(d) * BYTES[dtypes[0]] for d in dims[:2]))
        if space != "c10d" or name not in SENT:
            continue
        kind, which = SENT[name]
        dims, dtype = (event["args"][key] for key in ("Input Dims", "Input type"))
        whole, own, dtype = dims[which], dims[1 - which], dtype[which]
        if dtype == "TensorList":
            (whole,) = whole
            # gloo scatters a sum by an all-reduce.
            gathers = kind == "all-gather"
            name = "gloo:all_gather" if gathers else "gloo:all_reduce"
            dtype = types[name, str(own[0] if gathers else whole)]
        found[kind, math.prod(whole) * BYTES[dtype]] += 1
    return found + own_sizes(exchanged)


def list_types(events: list[dict[str, Any]]) -> dict[tuple[str, str], str]:
    """The dtype of what gloo was given in lists, by its operation and shape.

    c10d's own record does not have it. A scattered sum is an all-reduce of gloo, too, whose dtype
    c10d does record: these are left out, so that a shape of both has the lists' own dtype.
    """
    given: Counter[tuple[str, str, str]] = Counter()
    scattered: Counter[tuple[str, str, str]] = Counter()
    for event in events:
        name = event.get("name", "")
        dims, dtypes = (event["args"].get(key, []) for key in ("Input Dims", "Input type"))
        if name in ("gloo:all_gather", "gloo:all_reduce"):
            given[name, str(dims[0]), dtypes[0]] += 1
        elif name == "c10d::_reduce_scatter_base_":
            scattered["gloo:all_reduce", str(dims[1]), dtypes[1]] += 1
    types: dict[tuple[str, str], str] = {}
    for name, shape, dtype in given - scattered:
        assert types.setdefault((name, shape), dtype) == dtype, (name, shape)
    return types


def own_sizes(exchanged: list[tuple[int, int]]) -> Counter[tuple[str, int]]:
    """Of what all-to-alls took and gave, the size that is this rank's own tokens'.

    That is one of the two for all of them; the other is as the router chose.
    """
    numbers = [first for first, second in exchanged if first == second and first < SMALL]
    rows = [set(pair) for pair in exchanged if pair[0] != pair[1] or pair[0] >= SMALL]
    if all(len(pair) == 1 for pair in rows):
        # Fused layers' outputs: as many leave each rank as come to it.
        numbers, rows = [first for first, _ in exchanged], []
    found = Counter({("all-to-all", size): count for size, count in Counter(numbers).items()})
    if rows:
        (own,) = set.intersection(*rows)
        found["all-to-all", own] += len(rows)
    return found


def predicted(found: list[Message]) -> Counter[tuple[str, int]]:
    total: Counter[tuple[str, int]] = Counter()
    for message in found:
        total[message.kind, round(message.size)] += message.count
    return total


def train_all(runs: Runs, root: Path, model_folder: Path, dataset: Path) -> None:
    """Four steps of each run; the third one is recorded, in which the second one is logged."""
    recorded = {"enabled": True, "ranks": [0], "steps": [3, 3], "warmup_steps": 1}
    settings = {"max_steps": 4, "batch_size": 2, "save_every_n_steps": 0, "row_length": 64}
    for ranks, changes in runs.items():
        paths = [
            write_config(root / name, model_folder, dataset, profiler=recorded, **settings | change)
            for name, change in changes.items()
        ]
        train(*paths, ranks=ranks, limit_s=600)


def assert_same(sent: Counter[tuple[str, int]], formula: list[Message], linear: bool) -> None:
    """Every message has the predicted size and number, but those of the linear loss.

    It sends sums for trained positions only, and the formula takes all of them to be trained.
    """
    if not linear:
        assert sent == predicted(formula)
        return
    loss = predicted([message for message in formula if message.what == "loss"])
    rest = predicted([message for message in formula if message.what != "loss"])
    assert not rest - sent
    assert (sent - rest).total() == loss.total()
    assert 0 <= volume(sent - rest) <= volume(loss)


def volume(sent: Counter[tuple[str, int]]) -> int:
    return sum(size * count for (_, size), count in sent.items())


def assert_as_predicted(folder: Path, ranks: int) -> None:
    config = yaml.safe_load((folder / "train.yaml").read_text())
    formula = messages(step_of(config, 1, ranks))
    assert_same(counted(folder), formula, config.get("loss") == LINEAR["loss"])


EXPERTS: Runs = {
    2: {
        "full ep": EP | TWICE,
        "lora ep recomputed": EP | ALL_LORA | BF16 | RECOMPUTED | LINEAR,
        "full ep every second": EP | EVERY_SECOND,
    },
    4: {"full ep fsdp": EP | BF16 | RECOMPUTED, "full ep tp": EP | TP},
}


# Of families whose split does what Llama's does not: fused layers, norms over all heads without
# others in front, sinks and biases, latent attention and layers without experts, linear attention.
FAMILIES: dict[str, dict[str, Any]] = {
    "phi4-mini": TP | ALL_LORA | BF16,
    "olmo3": TP | BY_OPERATION,
    "gpt-oss": TP | ALL_LORA | RECOMPUTED,
    "deepseek-v3": TP | RECOMPUTED,
    "qwen3.5": TP | RECOMPUTED,
    "qwen3-next": TP | ALL_LORA | BF16,
}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, dataset: Path) -> Path:
    root = tmp_path_factory.mktemp("sent_families")
    runs: Runs = {2: {}}
    for family, change in FAMILIES.items():
        # Not as many experts as the numbers that every step sums.
        sizes = {"num_local_experts": 6} if family == "gpt-oss" else {}
        source = write(family, root / "models" / family, model_folder, **sizes)
        checkpointer = {"checkpoint_dir": str(source)}
        runs[2][family] = {"model": None} | change | {"checkpointer": checkpointer}
    train_all(runs, root, model_folder, dataset)
    return root


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, dataset: Path) -> Path:
    root = tmp_path_factory.mktemp("sent_experts")
    source = write("qwen3-moe", root / "model", model_folder)
    checkpointer = {"checkpoint_dir": str(source)}
    runs = {
        ranks: {n: {"model": None} | c | {"checkpointer": checkpointer} for n, c in names.items()}
        for ranks, names in EXPERTS.items()
    }
    train_all(runs, root, source, dataset)
    return root


def cases(runs: Runs) -> list[Any]:
    return [pytest.param(name, ranks, id=name) for ranks, names in runs.items() for name in names]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, dataset: Path) -> Path:
    root = tmp_path_factory.mktemp("sent")
    train_all(QUICK, root, model_folder, dataset)
    return root


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, dataset: Path) -> Path:
    root = tmp_path_factory.mktemp("sent_long")
    train_all(LONG, root, model_folder, dataset)
    return root


@pytest.mark.parametrize(("name", "ranks"), cases(QUICK))
def test_a_step_sends_what_is_predicted(name: str, ranks: int, quick: Path) -> None:
    assert_as_predicted(quick / name, ranks)


def test_lora_gathers_the_tables_once_and_nothing_but_blocks_for_backward(quick: Path) -> None:
    """Two micro-steps: the root, the embedding, the output head; three blocks, each pass."""
    sent = counted(quick / "lora")
    sizes = {size: count for (kind, size), count in sent.items() if kind == "all-gather"}
    root, table = 2 * MODEL_SIZES["embed_dim"], 2 * 1024 * MODEL_SIZES["embed_dim"]
    assert (sizes.pop(root), sizes.pop(table)) == (2, 4)
    assert list(sizes.values()) == [2 * 2 * MODEL_SIZES["num_layers"]]


@pytest.mark.long
@pytest.mark.parametrize(("name", "ranks"), cases(LONG))
def test_a_step_of_every_layout_sends_what_is_predicted(name: str, ranks: int, long: Path) -> None:
    assert_as_predicted(long / name, ranks)


@pytest.mark.long
@pytest.mark.parametrize(("name", "ranks"), cases(EXPERTS))
def test_spread_experts_send_what_is_predicted(name: str, ranks: int, experts: Path) -> None:
    assert_as_predicted(experts / name, ranks)


@pytest.mark.long
def test_the_next_layers_experts_are_on_their_way_when_the_host_waits(experts: Path) -> None:
    """Once in each pass they are gathered; the host waits for each layer's rows once."""
    folder = experts / "full ep fsdp"
    formula = messages(step_of(yaml.safe_load((folder / "train.yaml").read_text()), 1, 4))
    (size,) = {m.size for m in formula if m.what == "experts' weights"}
    (file,) = (folder / "profile").glob("*.json")
    events = [event for event in json.loads(file.read_text())["traceEvents"] if "args" in event]
    gathered, found = 0, []
    for event in sorted(events, key=lambda event: event["ts"]):
        dims = event["args"].get("Input Dims")
        if event["name"] == "c10d::_allgather_base_":
            gathered += math.prod(dims[0]) * BYTES[event["args"]["Input type"][0]] == size
        elif event["name"] == f"c10d::{ALL_TO_ALL}" and dims[0] == dims[1] and len(dims[0]) == 1:
            found.append(gathered)
    layers = len(found)
    assert found == [min(number + 2, layers) for number in range(layers)]
    assert gathered == 2 * layers


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_send_what_is_predicted_under_tensor_parallelism(
    family: str, families: Path
) -> None:
    assert_as_predicted(families / family, 2)


# The real sizes: the trainer's own step on fake tensors, by one rank of many ----------------------


class SentTracker(trace.MemoryTracker):
    """Notes the messages of the two steps that are traced, too."""

    found: Counter[tuple[str, int]]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        space, _, name = func._schema.name.partition("::")
        known = {"c10d": SENT, "_c10d_functional": FUNCTIONAL}.get(space, {})
        if result is not NotImplemented and name in known and "export" not in self._phase:
            kind, which = known[name]
            tensor = result if which is None else args[which]
            self.found[kind, (tensor[0] if isinstance(tensor, list) else tensor).nbytes] += 1
        return result


def main(arguments: list[str]) -> None:
    """Print the messages of two steps; in a process of its own, as torch keeps meshes by shape."""
    model, ranks, layers, changes = json.loads(arguments[0])
    SentTracker.found = Counter()
    trace.MemoryTracker = SentTracker
    trace.trace(configs.parse(recipe(model, **changes)), ranks, layers)
    print(json.dumps([[*message, count] for message, count in SentTracker.found.items()]))


def assert_as_traced(model: str, ranks: int, **changes: Any) -> None:
    layers = 3
    asked = json.dumps([model, ranks, layers, changes])
    done = forks.run("tests.trainer.test_communication", asked)
    assert done.returncode == 0, done.stderr
    found = Counter({(kind, size): count for kind, size, count in json.loads(done.stdout)})
    step = step_of(recipe(model, **changes), 1, ranks)
    step = replace(step, shape=step.shape.cut(layers))
    # The trace has no other ranks to agree with.
    formula = [message for message in messages(step) if not message.on_cpu]
    assert_same(found, formula + formula, changes.get("loss") == LINEAR["loss"])


def test_70b_over_512_gpus_sends_what_is_predicted() -> None:
    assert_as_traced("llama3_3.lora_llama3_3_70b", 512, **TP | LINEAR)


def _sizes() -> Iterator[Any]:
    """Every layout of one model, and one of each other; the rest, near to these, by name."""
    whole = "llama3_3.llama3_3_70b"
    others = ("llama3_3.lora_llama3_3_70b", "llama3_1.qlora_llama3_1_8b")
    others += ("qwen2_5.qwen2_5_72b_instruct", "llama3_2.lora_llama3_2_1b")
    for model, replicas, split in itertools.product((whole, *others), (1, 4), (1, 8)):
        often = model == whole or (replicas, split) == (4, 8)
        mark = pytest.mark.long if often else pytest.mark.named
        yield pytest.param(model, replicas, split, marks=mark)


@pytest.mark.parametrize(("model", "replicas", "split"), list(_sizes()))
def test_real_sizes_send_what_is_predicted(model, replicas, split) -> None:
    layout = {"tensor_parallel_dim": split, "data_parallel_replicate_dim": replicas}
    assert_as_traced(model, 64, **layout | LINEAR | TWICE)
