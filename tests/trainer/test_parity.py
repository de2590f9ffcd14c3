"""Against what others wrote: torchtune's stock recipe, TensorBoard and its profiler tab."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from launcher.errors import CookbookError
from launcher.recipe.environment import Environment
from launcher.run import built
from plugins.engines.launcher.torchtune import ENGINE
from tests.trainer.forks import ROOT, environment
from tests.trainer.runs import finish, lora_model, metrics, start, train, write_config
from trainer.checkpoint import weights
from trainer.config import load
from trainer.models import build as models
from trainer.parallel.world import World

# The demo's model as torchtune builds it.
SIZES = {
    "vocab_size": 1024,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 128,
    "intermediate_dim": 512,
    "max_seq_len": 512,
    "rope_base": 10000,
    "norm_eps": 1e-5,
}


@pytest.fixture(scope="module")
def torchtune_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of the environment in which torchtune's programs run."""
    own = Environment.of({"dependencies": list(ENGINE.dependencies)})
    try:
        return built.build(own, tmp_path_factory.mktemp("root"), print) / "bin" / "python"
    except CookbookError as error:
        pytest.skip(f"torchtune's environment cannot be built: {error}")


@pytest.mark.parametrize(
    ("method", "model"),
    [
        ("full", {}),
        ("lora", {"model": lora_model()}),
        pytest.param("lora", {"model": lora_model(adapter="dora")}, marks=pytest.mark.long),
    ],
    ids=["full", "lora", "dora"],
)
def test_loss_curve_equals_torchtunes_stock_recipe(
    method, model, tmp_path, model_folder, dataset, world, torchtune_python
):
    """One epoch of 11 steps of 2 x 2 samples.

    One, as the stock LoRA recipe's save on a CPU merges the adapter into the model it goes on with.
    """
    # transformers trains no embedding of the padding token, which begins texts of the demo.
    source = shutil.copytree(model_folder, tmp_path / "model")
    known = json.loads((source / "config.json").read_text()) | {"pad_token_id": None}
    (source / "config.json").write_text(json.dumps(known))
    path = write_config(
        tmp_path / "ours",
        source,
        dataset,
        batch_size=2,
        gradient_accumulation_steps=2,
        epochs=1,
        max_steps=None,
        shuffle=False,
        loss={"_component_": "trainer.layers.loss.LinearCrossEntropy"},
        lr_scheduler={
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 1,
        },
        **model,
    )
    train(path)
    ours = [line["loss"] for line in metrics(tmp_path / "ours")]
    stock = stock_losses(torchtune_python, path, tmp_path / "stock", world)
    assert len(ours) == len(stock) == 11
    assert ours == pytest.approx(stock, abs=1e-5)
    assert ours[-1] < ours[0]


def stock_losses(python: Path, ours: Path, folder: Path, world: World) -> list[float]:
    """The losses that the stock recipe logs for the same config."""
    folder.mkdir()
    config = yaml.safe_load(ours.read_text())
    config |= {
        "output_dir": str(folder),
        "model": stock_model(config["model"]),
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "resume_from_checkpoint": False,
        "save_adapter_weights_only": False,
        "optimizer_in_bwd": False,
        "max_steps_per_epoch": None,
        "compile": False,
        "log_every_n_steps": 1,
        "enable_activation_checkpointing": False,
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": str(folder),
            "filename": "losses.txt",
        },
    }
    config["tokenizer"]["_component_"] = "tests.trainer.stock.Tokenizer"
    config["checkpointer"] |= {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_files": ["model.safetensors"],
        "model_type": "LLAMA3",
        "output_dir": str(folder),
    }
    method = "full"
    module = models.build(load(ours), world).module
    if module.adapter is not None:
        method = "lora"
        adapter, _ = module.adapter.to_peft(module, weights.hub_tensors(module), torch.float32)
        save_file(adapter, folder / "adapter_model.safetensors")
    path = folder / "stock.yaml"
    path.write_text(yaml.safe_dump(config))
    subprocess.run(
        [python, "-m", "tests.trainer.stock", path, method, folder],
        cwd=ROOT,
        env=environment(),
        check=True,
    )
    text = (folder / "losses.txt").read_text()
    return [float(value) for value in re.findall(r"loss:(\S+)", text)]


def stock_model(block: dict[str, Any]) -> dict[str, Any]:
    """torchtune's builder for a `model` block."""
    if not block:
        return {"_component_": "torchtune.models.llama3.llama3", **SIZES}
    return {
        "_component_": "torchtune.models.llama3.lora_llama3",
        "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
        "apply_lora_to_mlp": True,
        "lora_rank": block["lora_rank"],
        "lora_alpha": block["lora_alpha"],
        "use_dora": block.get("adapter") == "dora",
        **SIZES,
    }


@pytest.mark.long
def test_tensorboard_shows_what_metrics_jsonl_holds(tmp_path, model_folder, dataset):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # By `python -m`, as the imports of forked ranks are not those of a job: they may not warn.
    path = write_config(tmp_path, model_folder, dataset, max_steps=3, log_every_n_steps=2)
    assert "arning" not in finish(start(path, fresh=True))
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    tags = board.Tags()["scalars"]
    # Groups come in the order of the alphabet, and every value is in one.
    assert sorted(tags)[0] == "loss/loss"
    assert {tag.partition("/")[0] for tag in tags} == {
        "loss",
        "memory",
        "optimizer",
        "progress",
        "speed",
    }
    for tag in tags:
        name = tag.partition("/")[2]
        shown = [(event.step, event.value) for event in board.Scalars(tag)]
        assert shown == [(line["step"], pytest.approx(line[name])) for line in lines]
    assert {"tokens_per_second_per_gpu", "grad_norm"} <= {tag.partition("/")[2] for tag in tags}
