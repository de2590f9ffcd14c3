"""What a step costs the CPU: it waits for no device, and compiles no layer again."""

import time
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.runs import ROOT, lora_model, metrics, write_config
from trainer.config import load
from trainer.loop import Trainer
from trainer.methods.sft import SupervisedFineTuning
from trainer.parallel import world as distributed

RUNS: dict[str, dict[str, Any]] = {
    "full": {
        "gradient_accumulation_steps": 2,
        "batch_size": 2,
        "activation_checkpointing": "op",
    },
    "lora-not-packed": {"model": lora_model(lora_dropout=0.1), "row_length": None},
    "qlora": {"model": lora_model(quantize_base=True), "activation_checkpointing": "full"},
    "masters": {"master_weights": "fp32", "dtype": "bf16"},
}
# Each step is logged, and each fourth saved. The loader of the data asks for a seed at its start;
# one rank waits for nothing else, also where it saves.
WAITS = {0}


class Waits(TorchDispatchMode):
    """Notes each operator whose result the CPU must know before it can go on, by step."""

    # FlexAttention is one.
    supports_higher_order_operators = True

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self._trainer = trainer
        self.found: set[tuple[int, str]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_value = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        if by_value & set(func.tags) and not _by_numbers(func, args):
            # The last step that was made, also while its own figures are being logged.
            self.found.add((self._trainer.state.step, str(func)))
        return func(*args, **(kwargs or {}))


def _by_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """An index of numbers has a shape that is known; one by a mask has not."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(index is None or index.dtype != torch.bool for index in args[1])


@pytest.fixture(scope="module")
def world():
    yield distributed.start("auto")
    distributed.stop()


@pytest.fixture(params=RUNS)
def trainer(request, tmp_path, model_folder, dataset, world):
    settings = {"row_length": 96, "batch_size": 4, "device": "auto", "max_steps": 8}
    settings |= {"log_every_n_steps": 1, "save_every_n_steps": 4} | RUNS[request.param]
    return Trainer(
        load(write_config(tmp_path, model_folder, dataset, **settings)),
        world,
        0,
        SupervisedFineTuning,
    )


def test_no_step_waits(trainer):
    with Waits(trainer) as waits:
        assert trainer.train()
    assert {step for step, _ in waits.found} == WAITS, sorted(waits.found)
    assert [line["step"] for line in metrics(trainer.config.output_dir)] == [*range(1, 9)]


def test_a_step_on_a_cpu_has_its_own_time(tmp_path, model_folder, dataset, world):
    """Though it is logged after the next one, and the last one at once."""
    if world.device.type != "cpu":
        pytest.skip("a GPU works while the CPU launches the next step")

    class Slow(SupervisedFineTuning):
        def before_step(self, *given: Any) -> Any:
            time.sleep(0.2)
            return super().before_step(*given)

    settings = {"max_steps": 5, "log_every_n_steps": 1, "save_every_n_steps": 0}
    config = load(write_config(tmp_path, model_folder, dataset, **settings))
    assert Trainer(config, world, 0, Slow).train()
    times = [line["step_time_s"] for line in metrics(tmp_path)]
    assert len(times) == 5 and min(times) > 0.2, times


VALIDATED = {
    "dataset_val": {
        "data_files": str(ROOT / "configs/datasets/slurm_qa.jsonl"),
        "split": "train[:13]",
    },
    "run_val_every_n_steps": 4,
}
QLORA = {"model": lora_model(quantize_base=True, lora_dropout=0.1)}
# What a layer is compiled for: a kind of pass, a kind of input.
COMPILED: dict[str, tuple[dict[str, Any], int]] = {
    # The first layer behind a frozen embedding, the others, validation; the loss with gradients
    # and without.
    "qlora": (QLORA | VALIDATED | {"activation_checkpointing": "full"}, 5),
    "full": (VALIDATED | {"gradient_accumulation_steps": 2, "batch_size": 3}, 4),
    "full-by-operation": ({"activation_checkpointing": "op"}, 2),
    "dora-masters": (
        {"model": lora_model(adapter="dora"), "master_weights": "fp32", "dtype": "bf16"},
        3,
    ),
    # One length, all lengths.
    "full-not-packed": ({"row_length": None}, 3),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "qlora" else pytest.mark.long) for n in COMPILED]
)
def test_layers_are_compiled_whole_and_once(
    name, tmp_path, model_folder, dataset, world, monkeypatch
):
    """Two epochs, whose last batches are short, of rows with different documents."""
    # It differs from the usual one in what it makes of the code, not in what is compiled.
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
    changes, codes = COMPILED[name]
    settings = {"row_length": 96, "batch_size": 5, "device": "auto", "max_steps": 12}
    settings |= {"compile": True, "save_every_n_steps": 0} | changes
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    config = load(write_config(tmp_path, model_folder, dataset, **settings))
    trainer = Trainer(config, world, 0, SupervisedFineTuning)
    rows, steps = len(trainer.batches.rows), trainer.batches.steps_per_epoch
    assert rows % trainer.batches.samples_per_step and steps < 12
    assert trainer.train()
    assert dict(counters["graph_break"]) == {}
    assert counters["stats"]["unique_graphs"] == codes


def test_a_node_without_a_compiler_trains_without_it(
    tmp_path, model_folder, dataset, world, monkeypatch, capsys
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    settings = {"device": "auto", "max_steps": 2, "compile": True, "save_every_n_steps": 0}
    trainer = Trainer(
        load(write_config(tmp_path, model_folder, dataset, **settings)),
        world,
        0,
        SupervisedFineTuning,
    )
    compiler = "gcc" if torch.cuda.is_available() else "g++"
    told = f"note: not compiled, as the node of rank 0 lacks a C compiler ({compiler})"
    assert told in capsys.readouterr().out
    assert not trainer.config.compile and trainer.train()
