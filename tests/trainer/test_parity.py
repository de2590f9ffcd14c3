"""Against what others wrote: torchtune's stock recipe, TensorBoard and its profiler tab."""

import re
from pathlib import Path

import pytest
import yaml

from tests.trainer.forks import run
from tests.trainer.runs import finish, lora_model, metrics, start, train, write_config


@pytest.mark.parametrize(
    ("method", "model"),
    [
        ("full", {}),
        ("lora", {"model": lora_model()}),
        pytest.param("lora", {"model": lora_model(use_dora=True)}, marks=pytest.mark.long),
    ],
    ids=["full", "lora", "dora"],
)
def test_loss_curve_equals_torchtunes_stock_recipe(method, model, tmp_path, model_folder, dataset):
    """One epoch of 11 steps of 2 x 2 samples.

    One, as the stock LoRA recipe's save on a CPU merges the adapter into the model it goes on with.
    """
    path = write_config(
        tmp_path / "ours",
        model_folder,
        dataset,
        batch_size=2,
        gradient_accumulation_steps=2,
        epochs=1,
        max_steps=None,
        shuffle=False,
        loss={"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        lr_scheduler={
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 1,
        },
        **model,
    )
    train(path)
    ours = [line["loss"] for line in metrics(tmp_path / "ours")]
    stock = stock_losses(path, tmp_path / "stock", method)
    assert len(ours) == len(stock) == 11
    assert ours == pytest.approx(stock, abs=1e-5)
    assert ours[-1] < ours[0]


def stock_losses(ours: Path, folder: Path, method: str) -> list[float]:
    """The losses that the stock recipe logs for the same config."""
    config = yaml.safe_load(ours.read_text())
    config |= {
        "output_dir": str(folder),
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
    config["checkpointer"] |= {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_files": ["model.safetensors"],
        "output_dir": str(folder),
    }
    folder.mkdir()
    path = folder / "stock.yaml"
    path.write_text(yaml.safe_dump(config))
    run("tests.trainer.stock", path, method).check_returncode()
    text = (folder / "losses.txt").read_text()
    return [float(value) for value in re.findall(r"loss:(\S+)", text)]


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
