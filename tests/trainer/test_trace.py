"""The traced step against the closed form."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch._dynamo.utils import counters

from launcher.recipes import recipe as recipes
from launcher.sizing.estimate import trace as ask_for_trace
from launcher.sizing.memory import StepMemory
from launcher.sizing.recipe_step import step_of
from launcher.sizing.step_config import GIB
from runspec.keys.sft import SftConfig
from tests.trainer.transformers_cases import write
from tests.trainer.transformers_runs import BY_OPERATION, EP, TP, config_of
from trainer import config as configs
from trainer.trace import Traced, estimate, trace

ROOT = Path(__file__).parents[2]
LORA = {
    "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 16,
    "lora_alpha": 32,
}
CHUNKED = "torchtune.modules.loss.CEWithChunkedOutputLoss"
PLAIN = "torch.nn.CrossEntropyLoss"


def recipe(model: str, **changes: Any) -> dict[str, Any]:
    """A config as the trainer and the launcher both read it; nothing in it has to exist."""
    _, _, builder = model.rpartition(".")
    block = {"_component_": f"torchtune.models.{model}"}
    return {
        "output_dir": "run",
        "dtype": "bf16",
        "model": block | (LORA if builder.startswith(("lora_", "qlora_")) else {}),
        "tokenizer": {"_component_": "trainer.none", "max_seq_len": 4096},
        "checkpointer": {"checkpoint_dir": "none"},
        "dataset": {"_component_": "trainer.none"},
        "batch_size": 2,
        # What the trace can run: fused and foreach kernels need real tensors.
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4, "foreach": False},
        "loss": {"_component_": CHUNKED},
        "clip_grad_norm": 1.0,
        "enable_activation_checkpointing": True,
    } | changes


def both(config: dict[str, Any], ranks: int, layers: int | None) -> tuple[StepMemory, Traced]:
    """The closed form's and the traced step's memory of a model cut to `layers` layers."""
    step = step_of(config, 1, ranks)
    if layers:
        step = replace(step, shape=step.shape.cut(layers))
    run = partial(trace, layers=layers) if layers else estimate
    return StepMemory(step), run(configs.parse(config), ranks)


def close(config: dict[str, Any], ranks: int, layers: int | None = None, within: float = 0.05):
    formula, traced = both(config, ranks, layers)
    assert formula.peak == pytest.approx(traced.peak, rel=within), (
        formula.peak_phase,
        {name: round(size / GIB, 3) for name, size in formula.terms.items()},
        {name: round(size / GIB, 3) for name, size in traced.phases.items()},
    )
    kept = formula.phases["optimizer step"]
    assert kept["weights"] + kept["rotary tables"] == pytest.approx(traced.weights, rel=0.01)


def test_lora_over_fsdp_and_tensor_parallelism_is_as_traced() -> None:
    close(recipe("llama3_2.lora_llama3_2_1b", tensor_parallel_dim=2), ranks=8, layers=3)


def test_full_over_fsdp_with_accumulation_is_as_traced() -> None:
    config = recipe("llama3_1.llama3_1_8b", gradient_accumulation_steps=2, batch_size=1)
    close(config, ranks=4, layers=2)


@pytest.mark.long
@pytest.mark.parametrize("checkpointed", [True, False], ids=["recomputed", "kept"])
@pytest.mark.parametrize(("ranks", "split"), [(1, 1), (8, 1), (8, 8), (16, 2)])
@pytest.mark.parametrize(
    "model",
    [
        "llama3_2.llama3_2_1b",
        "llama3_2.lora_llama3_2_1b",
        "llama3_1.llama3_1_8b",
        "llama3_1.lora_llama3_1_8b",
        "llama3_3.llama3_3_70b",
        "llama3_3.lora_llama3_3_70b",
    ],
)
def test_the_closed_form_is_within_5_percent(model, ranks, split, checkpointed) -> None:
    changes = {
        "tensor_parallel_dim": split,
        "enable_activation_checkpointing": checkpointed,
    }
    close(recipe(model, **changes), ranks, layers=4)


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"enable_activation_checkpointing": False, "ac_mode": "selective", "ac_option": "op"},
        {"enable_activation_checkpointing": False, "ac_mode": "selective", "ac_option": 2},
        {"master_weights": "fp32"},
        {"data_parallel_replicate_dim": 2},
        {"gradient_accumulation_steps": 4, "sync_each_micro_batch": True},
        {"loss": {"_component_": PLAIN}},
        {"loss": {"_component_": PLAIN}, "custom_sharded_layers": ["tok_embeddings", "output"]},
        {"gradient_accumulation_steps": 4},
        {"gradient_accumulation_steps": 4, "fsdp_reduce_dtype": "bf16"},
        {"fsdp_reshard_after_forward": False},
        {"dtype": "fp32"},
        {"batch_size": 1, "tokenizer": {"_component_": "trainer.none", "max_seq_len": 512}},
        {"batch_size": 1, "tokenizer": {"_component_": "trainer.none", "max_seq_len": 32768}},
        {"optimizer": {"_component_": "torch.optim.SGD", "lr": 1e-4, "foreach": False}},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_the_closed_form_follows_each_key(changes) -> None:
    close(recipe("llama3_1.llama3_1_8b", **changes), ranks=8, layers=4)


@pytest.mark.long
@pytest.mark.parametrize(
    "model",
    [
        "qwen2_5.lora_qwen2_5_7b_instruct",
        "mistral.mistral_7b",
        "phi4.lora_phi4_14b",
        "gemma2.lora_gemma2_9b",
        "llama3_1.qlora_llama3_1_8b",
    ],
)
def test_the_closed_form_knows_other_families(model) -> None:
    close(recipe(model), ranks=8, layers=4)


ALL_LORA = {"lora_rank": 16, "lora_alpha": 32}
FULL = {"activation_checkpointing": "full"}
# And twice as many rows as on average.
SPREAD = {"expert_parallel_dim": 32, "expert_imbalance": 2}
OPERATIONS = BY_OPERATION | TP


def case(folder: str, ranks: int, layers: int, often: bool, **changes: object):
    """A model of configs/shapes, cut to some layers; those of the same kinds are seldom run."""
    mark = pytest.mark.long if often else pytest.mark.named
    return pytest.param(folder, ranks, layers, changes, id=folder, marks=mark)


@pytest.mark.parametrize(
    ("folder", "ranks", "layers", "changes"),
    [
        case("Qwen3-30B-A3B", 16, 4, True, model=ALL_LORA, expert_parallel_dim=8),
        case("gpt-oss-20b-BF16", 8, 4, False, model=ALL_LORA),
        case("GLM-4.5-Air", 32, 5, False, model=ALL_LORA),
        case("DeepSeek-V3-bf16", 64, 7, True, model=ALL_LORA, **SPREAD, **FULL),
        case("Llama-4-Scout-17B-16E-Instruct", 32, 4, False, expert_parallel_dim=16),
        case("Qwen3.5-27B", 8, 4, False, model=ALL_LORA, **FULL),
        case("Qwen3.5-27B", 8, 8, True, **OPERATIONS, model=ALL_LORA, compile=True),
    ],
)
def test_the_closed_form_knows_experts(folder, ranks, layers, changes) -> None:
    """And latent and linear attention, blocks that differ, and experts over spread ranks."""
    config = recipe("llama3_2.llama3_2_1b", batch_size=1) | changes
    del config["enable_activation_checkpointing"]
    config["model"] = {"_component_": "transformers", **changes.get("model", {})}
    config["checkpointer"] = {"checkpoint_dir": folder}
    config["loss"] = {"_component_": "trainer.layers.loss.LinearCrossEntropy"}
    close(config, ranks, layers)


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "depths"),
    [("gemma2.lora_gemma2_9b", (4, 6)), ("gemma-4-31B-it", (6, 12))],
    ids=["gemma2", "gemma4"],
)
def test_a_compiled_layer_between_norms_is_within_10_percent(source, depths) -> None:
    """What the compiler keeps of them is its own choice, which the formula does not repeat."""
    builder = source if "." in source else "llama3_2.llama3_2_1b"
    config = recipe(builder, batch_size=1, enable_activation_checkpointing=False, compile=True)
    config["loss"] = {"_component_": "trainer.layers.loss.LinearCrossEntropy"}
    if builder != source:
        config["model"] = {"_component_": "transformers", **ALL_LORA}
        config["checkpointer"] = {"checkpoint_dir": source}
    shallow, deep = (both(config, 8, depth) for depth in depths)
    formula, traced = (deep[kind].peak - shallow[kind].peak for kind in range(2))
    assert formula == pytest.approx(traced, rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen3.5", BY_OPERATION), ("qwen3-moe", {}), ("phi4-mini", BY_OPERATION)],
    ids=["qwen3.5-op", "qwen3-moe", "phi4-mini-op"],
)
def test_split_blocks_compile_without_graph_breaks(
    family: str, changes: dict[str, Any], tmp_path: Path, model_folder: Path, dataset: Path
) -> None:
    """With gated norms, routers, and products whose parts the ranks exchange."""
    folder = write(family, tmp_path / family, model_folder)
    changes = changes | TP | {"compile": True}
    counters.clear()
    trace(configs.load(config_of(tmp_path, folder, dataset, **changes)), 2)
    assert counters["stats"]["unique_graphs"] >= 1
    assert dict(counters["graph_break"]) == {}


@pytest.mark.long
@pytest.mark.parametrize("packed", [False, True], ids=["single", "packed"])
@pytest.mark.parametrize("split", [1, 8])
@pytest.mark.parametrize("model", ["lora_llama3_1_8b", "qlora_llama3_1_8b"])
def test_the_closed_form_knows_dora_and_packed_rows(model, split, packed) -> None:
    changes = {
        "tensor_parallel_dim": split,
        "enable_activation_checkpointing": False,
        "dataset": {"_component_": "trainer.none", "packed": packed},
    }
    config = recipe(f"llama3_1.{model}", **changes)
    config["model"]["use_dora"] = True
    close(config, ranks=8, layers=3, within=0.02)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [8, pytest.param(16, marks=pytest.mark.named)])
def test_two_depths_tell_the_whole_model(ranks) -> None:
    config = configs.parse(recipe("llama3_2.llama3_2_1b", tensor_parallel_dim=ranks // 8))
    whole, told = trace(config, ranks), estimate(config, ranks)
    assert told.layers == whole.layers == 16
    assert abs(told.peak - whole.peak) <= 0.002 * GIB
    assert told.weights == pytest.approx(whole.weights, abs=64)


@pytest.mark.long
def test_70b_is_traced_to_its_full_depth(tmp_path) -> None:
    config = recipe("llama3_3.llama3_3_70b")
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "trainer.trace",
            str(file),
            "--ranks",
            "16",
            "--objective",
            SftConfig.objective,
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["layers"] == 80
    assert StepMemory(step_of(config, 2, 8)).peak == pytest.approx(found["peak"], rel=0.05)


def test_the_first_trace_of_a_process_is_as_the_next(tmp_path) -> None:
    """An operator that is not yet imported when a layer is prepared would be recomputed."""
    by_operation = {"enable_activation_checkpointing": False, "ac_mode": "selective"}
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump(recipe("llama3_2.llama3_2_1b", **by_operation, ac_option="op")))
    code = (
        "import sys; from pathlib import Path; from trainer import config, trace;"
        "c = config.load(Path(sys.argv[1]));"
        "assert trace.trace(c, 8, 2) == trace.trace(c, 8, 2)"
    )
    command = [sys.executable, "-c", code, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_traced_is_said() -> None:
    config = configs.parse(recipe("llama3_2.llama3_2_1b", tensor_parallel_dim=3))
    with pytest.raises(configs.ConfigError, match=r"tensor_parallel_dim 3 does not divide 8 ranks"):
        trace(config, 8)


# Each family, method and layout is in one of these; the others differ from them in sizes only.
TRACED = ("demo", "llama8b_lora", "llama70b_full", "gemma9b_qlora", "phi4_mini_lora")
# In torch's allocator (docs/estimates.md): the trace makes GELU's fp32 temporaries one by one,
# where compiled layers make none.
COUNTED = {"gemma9b_qlora": 8.45 * GIB}


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [n if n in TRACED else pytest.param(n, marks=pytest.mark.named) for n in recipes.names()],
)
def test_the_closed_form_is_near_the_trace_over_the_catalogue(name: str, tmp_path: Path) -> None:
    loaded = recipes.load(name)
    config = loaded.train_config(tmp_path, str(tmp_path / "run"))
    optimizer = {key: value for key, value in config["optimizer"].items() if key != "fused"}
    config["optimizer"] = optimizer | {"foreach": False}
    resources = loaded.resources
    content = config | {"entry": loaded.entry_name}
    step = step_of(content, resources.nodes, resources.gpus_per_node)
    # In a process of its own, as for a user: torch keeps the layouts of earlier ones in a process.
    traced = ask_for_trace(config, loaded.entry.method.objective, resources.world_size)
    found = StepMemory(step)
    assert found.peak == pytest.approx(COUNTED.get(name, traced["peak"]), rel=0.05)
    # Beside the weights the export takes one matrix, not a layer's experts: at most 4 GiB.
    export = {name: sum(terms.values()) for name, terms in found.phases.items()}["export"]
    assert export == pytest.approx(traced["phases"]["export"], rel=0.05, abs=2**27)
    assert traced["phases"]["export"] - traced["weights"] < 4 * GIB


@pytest.mark.long
def test_numbers_of_sharded_layers_are_constants_of_their_code(
    tmp_path: Path, model_folder: Path, dataset: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The heads of Gemma 4's layers differ; what changes from batch to batch is no constant."""
    folder = write("gemma4", tmp_path / "gemma4", model_folder)
    counters.clear()
    with caplog.at_level("INFO", "torch.fx.experimental.symbolic_shapes"):
        trace(configs.load(config_of(tmp_path, folder, dataset, compile=True)), 2)
    made = [line for line in caplog.messages if line.startswith("create_symbol")]
    assert counters["stats"]["unique_graphs"] >= 2
    assert [line for line in made if "L['self']" in line] == []


@pytest.mark.long
def test_dense_layers_beside_experts_over_ranks_are_compiled_by_operation(
    tmp_path: Path, model_folder: Path, dataset: Path
) -> None:
    """The first layer of DeepSeek V3 is compiled; the others, which exchange tokens, are not."""
    folder = write("deepseek-v3", tmp_path / "model", model_folder)
    counters.clear()
    changes = BY_OPERATION | EP | {"compile": True}
    trace(configs.load(config_of(tmp_path, folder, dataset, **changes)), 2)
    assert counters["stats"]["unique_graphs"] == 1
