"""What a config may hold, and one clear line for everything that is wrong with it."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from launcher.recipe import torchtune
from tests.trainer.runs import error_record, train, write_config
from trainer import config as configs
from trainer import train as training
from trainer.errors import ConfigError

FAMILIES = ("llama2", "llama3", "llama3_1", "llama3_2", "llama3_3", "mistral", "qwen2", "qwen2_5")
FAMILIES += ("gemma2", "phi3", "phi4")
RECIPES = Path(find_spec("recipes").origin).parent / "configs"
STOCK = sorted(
    path
    for family in FAMILIES
    for path in (RECIPES / family).glob("*.yaml")
    if any(method in path.name for method in ("full", "lora", "dora"))
    and not any(other in path.name for other in ("dpo", "ppo", "KD", "qat"))
)
OPEN = ("dataset.packed: set",)


@pytest.mark.parametrize("path", STOCK, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_stock_config_is_read(path):
    content = configs.read_yaml(path)
    torchtune.normalise(content)
    try:
        configs.parse(content)
    except ConfigError as error:
        # What is not supported is said so by the name of its key.
        assert all(fault.startswith(OPEN) for fault in error.faults), error


def test_the_stock_configs_are_all_there():
    assert len(STOCK) >= 90


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"bach_size": 2},
            "unknown key 'bach_size' (did you mean batch_size?)",
        ),
        ({"optimizer": None}, "optimizer is missing: it must be a block with a _component_"),
        ({"batch_size": 0}, "batch_size must be a whole number, 1 or more, got 0"),
        ({"shuffle": 1}, "shuffle must be true or false, got 1"),
        ({"clip_grad_norm": -1}, "clip_grad_norm must be a number above 0, got -1"),
        ({"dtype": "fp16"}, "dtype must be one of bf16, fp32, got 'fp16'"),
        (
            {"optimizer": {"_component_": "os.system"}},
            "optimizer._component_: 'os.system' is not allowed; it must begin with one of",
        ),
        ({"optimizer": {"lr": 3}}, "optimizer must be a block with a _component_, got"),
        (
            {"data_parallel_shard_dim": 0},
            "data_parallel_shard_dim must be a whole number, 1 or more, or -1",
        ),
        (
            {"activation_checkpointing": "op", "enable_activation_offloading": True},
            "enable_activation_offloading: moves the inputs of recomputed layers; set",
        ),
        ({"master_weights": "bf16"}, "master_weights must be fp32, got"),
        ({"profiler": {"enable": True}}, "unknown key 'profiler.enable' (did you mean enabled?)"),
        ({"profiler": {"ranks": [-1]}}, "profiler.ranks must be all, or a list of ranks"),
        ({"collate_fn": "torch.stack"}, "collate_fn must be one of torchtune.data"),
        (
            {"row_length": 0},
            "tokenizer.max_seq_len must be a whole number, 1 or more, got 0",
        ),
        (
            {"resume_from_checkpoint": True},
            "resume_from_checkpoint is refused: a run resumes automatically",
        ),
        (
            {"checkpointer": {"checkpoint_dir": "/m", "recipe_checkpoint": "recipe_state.pt"}},
            "checkpointer.recipe_checkpoint is refused: the trainer cannot read the state of",
        ),
        (
            {"checkpointer": {"model_type": "LLAMA3"}},
            "checkpointer.checkpoint_dir is missing: it must be one line of text",
        ),
        ({"activation_checkpointing": "some"}, "activation_checkpointing must be none, full, op"),
        ({"dataset_val": {"_component_": "os.system"}}, "dataset_val._component_: 'os.system' is"),
        ({"run_val_every_n_steps": 2}, "run_val_every_n_steps: needs dataset_val, such as"),
        ({"enable_activation_offloading": True}, "enable_activation_offloading: moves"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_values_are_named(changes, fault, tmp_path, model_folder, dataset):
    path = write_config(tmp_path, model_folder, dataset, **changes)
    with pytest.raises(ConfigError) as caught:
        configs.load(path)
    assert len(caught.value.faults) == 1
    assert caught.value.faults[0].startswith(fault)


def test_all_faults_are_reported_at_once(tmp_path, model_folder, dataset):
    path = write_config(tmp_path, model_folder, dataset, batch_size=0, epochs=0, device="x", oops=1)
    with pytest.raises(ConfigError) as caught:
        configs.load(path)
    assert len(caught.value.faults) == 4


def test_broken_yaml_is_named_by_line_and_column(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text("a: 1\nb: [1, 2\nc: 3\n")
    with pytest.raises(ConfigError, match=r"train\.yaml, line 3, column 2: "):
        configs.load(path)
    with pytest.raises(ConfigError, match="no such file"):
        configs.load(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"optimizer": {"_component_": "bitsandbytes.optim.Adam8bit"}},
            "bitsandbytes.optim.Adam8bit cannot be imported: No module named 'bitsandbytes'",
        ),
        ({"tokenizer": {"path": None}}, "not NoneType (null: tokenizer.path)"),
        ({"dataset": {"data_files": None}}, "dataset.data_files must name the files of source"),
        (
            {"model": {"_component_": "torch.nn.Identity"}},
            "returns a Identity, not a trainer.model.Decoder",
        ),
        (
            {"dataset": {"data_files": "/nowhere.jsonl"}},
            "dataset: torchtune.datasets.instruct_dataset refused its arguments: Unable to find",
        ),
        ({"dataset": {"column_map": {"input": "q", "output": "a"}}}, "there is no column 'q'"),
        ({"tokenizer": {"max_seq_len": 4}}, "dataset: no sample has a token to train on"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_components_that_do_not_work(changes, fault, tmp_path, model_folder, dataset, capfd):
    path = write_config(tmp_path, model_folder, dataset)
    content = yaml.safe_load(path.read_text())
    for key, block in changes.items():
        whole = isinstance(block, list) or "_component_" in block
        content[key] = block if whole else content.get(key, {}) | block
    path.write_text(yaml.safe_dump(content))
    assert_refused(path, (fault,), capfd)


def assert_refused(path: Path, faults: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    """The real entry ends with 1, one line a fault, no traceback, and a permanent record."""
    from trainer.parallel import world as distributed

    try:
        assert training.main(["sft", str(path)]) == 1
    finally:
        distributed.stop()
    text = capfd.readouterr().err
    assert text.startswith("[rank 0] error: ")
    assert "Traceback" not in text
    assert all(fault in text for fault in faults), text
    assert len(text.strip().splitlines()) == len(faults), text
    record = error_record(path.parent)
    assert record["permanent"] is True and record["type"] == "ConfigError"
    assert not (path.parent / "checkpoints").exists()


def test_a_rank_that_fails_records_its_fault(tmp_path, model_folder, dataset):
    path = write_config(tmp_path, model_folder, dataset, batch_size=0)
    output = train(path, ranks=2, attempt=7, status=1)
    # torchrun ends the other rank as soon as one has failed.
    records = list((tmp_path / "logs/7").glob("error_rank_*.json"))
    assert records
    for record in records:
        rank = json.loads(record.read_text())["rank"]
        assert record.name == f"error_rank_{rank}.json"
        assert f"[rank {rank}] error: batch_size must be" in output


@pytest.mark.parametrize(
    ("changes", "recomputed"),
    [
        ({}, None),
        ({"activation_checkpointing": "none"}, None),
        ({"activation_checkpointing": "full"}, 1),
        ({"activation_checkpointing": "op"}, "op"),
        ({"activation_checkpointing": 2}, 2),
    ],
    ids=str,
)
def test_which_layers_are_recomputed(changes, recomputed, tmp_path, model_folder, dataset):
    config = configs.load(write_config(tmp_path, model_folder, dataset, **changes))
    assert config.activation_checkpointing == recomputed


def test_a_config_holds_each_key_that_is_used_and_names_those_that_are_not(
    tmp_path, model_folder, dataset
):
    unused = {
        "optimizer_in_bwd": True,
        "metric_logger": {"_component_": "a.B"},
        "low_cpu_ram": False,
    }
    config = configs.load(write_config(tmp_path, model_folder, dataset, epochs=None, **unused))
    assert (config.epochs, config.batch_size_val, config.data_parallel_shard_dim) == (1, 8, -1)
    assert config.output_dir == tmp_path and not hasattr(config, "optimizer_in_bwd")
    assert config.notes == (
        "optimizer_in_bwd is not used: the optimizer steps after the backward pass",
        "metric_logger is not used: metrics go to metrics.jsonl and TensorBoard",
    )


@pytest.mark.parametrize(("mode", "ranks", "count"), [("op", 2, 1), ("op", 1, 0), ("full", 2, 0)])
def test_blocks_that_stay_uncompiled_are_told(tmp_path, model_folder, dataset, mode, ranks, count):
    changes = {"compile": True, "activation_checkpointing": mode, "expert_parallel_dim": ranks}
    config = configs.load(write_config(tmp_path, model_folder, dataset, **changes))
    assert len([note for note in config.notes if "are not compiled" in note]) == count
