"""The traced step against the closed form."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo.utils import counters

from launcher.recipe import load as recipes
from plugins.estimate.launcher.estimate import trace as ask_for_trace
from plugins.estimate.launcher.memory import StepMemory
from plugins.estimate.launcher.recipe_step import step_of
from plugins.estimate.launcher.step_config import GIB
from plugins.estimate.trace import estimate, trace
from tests.trainer.models.transformers_cases import write
from tests.trainer.models.transformers_runs import BY_OPERATION, TP, config_of
from trainer import config as configs

LORA = {
    "lora_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "lora_rank": 16,
    "lora_alpha": 32,
}
CHUNKED = {
    "_component_": "trainer.layers.loss.LinearCrossEntropy",
    "num_output_chunks": 8,
}


def recipe(name: str, **changes: Any) -> dict[str, Any]:
    """A config as the trainer and the launcher both read it; nothing in it has to exist."""
    return {
        "output_dir": "run",
        "dtype": "bf16",
        "model": {},
        "tokenizer": {"_component_": "trainer.none", "max_seq_len": 4096},
        "checkpointer": {"checkpoint_dir": f"none/{name}"},
        "dataset": {"_component_": "trainer.none"},
        "batch_size": 2,
        # What the trace can run: fused and foreach kernels need real tensors.
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4, "foreach": False},
        "loss": CHUNKED,
        "clip_grad_norm": 1.0,
        "activation_checkpointing": "full",
    } | changes


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "ranks", "changes"),
    [
        ("Llama-3.2-1B-Instruct", 8, {"tensor_parallel_dim": 2, "model": LORA}),
        ("Llama-3.1-8B", 4, {"gradient_accumulation_steps": 2, "batch_size": 1}),
        ("Llama-3.1-8B", 8, {"activation_checkpointing": "op"}),
        ("Llama-3.1-8B", 8, {"master_weights": "fp32"}),
    ],
    ids=["lora, tensor parallel", "full, accumulated", "op", "fp32 weights"],
)
def test_the_closed_form_follows_what_no_recipe_of_the_catalogue_has(name, ranks, changes) -> None:
    config = recipe(name, **changes)
    step = step_of(config, 1, ranks)
    found = StepMemory(replace(step, shape=step.shape.cut(3)))
    traced = trace(configs.parse(config), ranks, layers=3)
    assert found.peak == pytest.approx(traced.peak, rel=0.1), (found.peak_phase, found.terms)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen3.5", BY_OPERATION), ("qwen3-moe", {}), ("phi4-mini", BY_OPERATION)],
    ids=["qwen3.5-op", "qwen3-moe", "phi4-mini-op"],
)
def test_split_blocks_compile_without_graph_breaks(
    family: str, changes: dict[str, Any], tmp_path: Path, model_folder: Path, dataset: Path
) -> None:
    """With gated norms, routers, and products whose parts the ranks exchange.

    A graph ends at linear attention's rule, and nowhere else.
    """
    folder = write(family, tmp_path / family, model_folder)
    changes = changes | TP | {"compile": True}
    counters.clear()
    trace(configs.load(config_of(tmp_path, folder, dataset, **changes)), 2)
    assert counters["stats"]["unique_graphs"] >= 1
    breaks = [text for text in counters["graph_break"] if "gated_delta_rule" not in text]
    assert breaks == [] and bool(counters["graph_break"]) == (family == "qwen3.5")


@pytest.mark.long
@pytest.mark.parametrize("ranks", [8, pytest.param(16, marks=pytest.mark.named)])
def test_two_depths_tell_the_whole_model(ranks) -> None:
    config = configs.parse(recipe("Llama-3.2-1B-Instruct", tensor_parallel_dim=ranks // 8))
    whole, told = trace(config, ranks), estimate(config, ranks)
    assert told.layers == whole.layers == 16
    assert abs(told.peak - whole.peak) <= 0.002 * GIB
    assert told.weights == pytest.approx(whole.weights, abs=64)


def test_what_cannot_be_traced_is_said() -> None:
    config = configs.parse(recipe("Llama-3.2-1B-Instruct", tensor_parallel_dim=3))
    with pytest.raises(configs.ConfigError, match=r"tensor_parallel_dim 3 does not divide 8 ranks"):
        trace(config, 8)


# Each family, method and layout is in one of these; the others differ from them in sizes only.
TRACED = ("demo", "llama8b_lora", "llama70b_full", "gemma9b_qlora", "phi4_mini_lora")


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [n if n in TRACED else pytest.param(n, marks=pytest.mark.named) for n in recipes.names()],
)
def test_the_closed_form_is_within_10_percent_over_the_catalogue(name: str, tmp_path: Path) -> None:
    loaded = recipes.load(name)
    config = loaded.train_config(tmp_path, str(tmp_path / "run"))
    # What the trace can run: fused and foreach kernels need real tensors.
    optimizer = {key: value for key, value in config["optimizer"].items() if key != "fused"}
    config["optimizer"] = optimizer | {"foreach": False}
    resources = loaded.resources
    content = config | {"entry": loaded.entry_name}
    found = StepMemory(step_of(content, resources.nodes, resources.gpus_per_node))
    # In a process of its own, as for a user: torch keeps the layouts of earlier ones in a process.
    traced = ask_for_trace(config, loaded.entry.method.objective, resources.world_size)
    assert found.peak == pytest.approx(traced["peak"], rel=0.1), (found.peak_phase, found.terms)
    kept = found.phases["optimizer step"]
    parts = ("weights", "rotary tables", "frozen models")
    stored = sum(kept.get(part, 0.0) for part in parts)
    assert stored == pytest.approx(traced["weights"], rel=0.1)
    # Beside the weights the export takes one matrix, not a layer's experts: at most 4 GiB.
    assert traced["phases"]["export"] - traced["weights"] < 4 * GIB
