"""What the tests of transformers' models share: configs, packed rows, runs in several layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.models.transformers_cases import FAMILIES, reference, write
from tests.trainer.runs import (
    assert_same_curve,
    assert_same_tensors,
    metrics,
    train,
    write_config,
)
from trainer.model import Documents

# By name: ranks, family, the run that it must equal, changes to the config.
Runs = dict[str, tuple[int, str, str | None, dict[str, Any]]]
# Two rows of two documents each, of which one is longer than LongRoPE's first length.
FIRST, LENGTH = 37, 90
TOKENS = torch.randint(5, 1024, (2, LENGTH), generator=torch.Generator().manual_seed(0))
DOCUMENTS = Documents(
    torch.cat([torch.zeros(2, FIRST), torch.ones(2, LENGTH - FIRST)], 1).int(),
    torch.tensor([0, FIRST, LENGTH, LENGTH + FIRST, 2 * LENGTH], dtype=torch.int32),
)
POSITIONS = torch.cat([torch.arange(FIRST), torch.arange(LENGTH - FIRST)]).expand(2, -1)
LORA = {"lora_rank": 4, "lora_alpha": 8}
TP, CHECKPOINTED = {"tensor_parallel_dim": 2}, {"activation_checkpointing": "full"}
BY_OPERATION = {"activation_checkpointing": "op"}
EP = {"expert_parallel_dim": 2}
COPIES = {"data_parallel_replicate_dim": 2, "batch_size": 1}
AUXILIARY = {"router_aux_loss_coef": 0.5}
PACKED = {"row_length": 96, "batch_size": 4}
SGD = {"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1}}
FULL, ADAPTED, HALF = PACKED | SGD, PACKED | SGD | {"model": LORA}, {"batch_size": 2}


def write_sources(root: Path, tokenizer: Path) -> dict[str, Path]:
    """A model folder of each family, by its name."""
    return {name: write(name, root / name, tokenizer) for name in FAMILIES}


def config_of(folder: Path, source: Path, dataset: Path, **changes: Any) -> Path:
    """A train.yaml that names a model folder and no component."""
    checkpointer = {"checkpoint_dir": str(source)}
    return write_config(
        folder, source, dataset, **{"model": None, "checkpointer": checkpointer} | changes
    )


def logits(folder: Path, *parts: torch.Tensor) -> torch.Tensor:
    """Those of transformers, of each part by itself."""
    model = reference(folder).eval()
    with torch.inference_mode():
        return torch.cat([model(part).logits for part in parts], 1)


def train_all(folder: Path, runs: Runs, sources: dict[str, Path], dataset: Path) -> Path:
    """Train every run in a folder of its name for four steps, and return `folder`."""
    starts: dict[int, list[Path]] = {}
    for name, (ranks, family, _, changes) in runs.items():
        path = config_of(folder / name, sources[family], dataset, **{"max_steps": 4} | changes)
        starts.setdefault(ranks, []).append(path)
    with pytest.MonkeyPatch.context() as patch:
        # Not the usual compiler, whose code for CPUs takes long.
        patch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
        for ranks, paths in starts.items():
            train(*paths, ranks=ranks)
    return folder


def assert_same_training(own: Path, wanted: Path) -> None:
    """The same curve and weights, and a loss that falls."""
    assert len(metrics(own)) == 4
    assert_same_curve(own, wanted, 2e-5, 1e-4)
    assert_same_tensors(own, wanted, 5e-5)
    assert metrics(own)[-1]["loss"] < metrics(own)[0]["loss"]
