"""What the tests of transformers' models share: configs, packed rows, runs in several layouts."""

from pathlib import Path
from typing import Any

import torch

from tests.trainer.models.transformers_cases import FAMILIES, reference, write
from tests.trainer.runs import Runs, write_config
from trainer.model import Documents

# Changes of a config by the name of a run; and ranks with what a layout changes of its base.
Bases, Layouts = dict[str, dict[str, Any]], dict[str, tuple[int, dict[str, Any]]]
# Two rows of two documents each, of which one is longer than LongRoPE's first length.
FIRST, LENGTH = 37, 90
TOKENS = torch.randint(5, 1024, (2, LENGTH), generator=torch.Generator().manual_seed(0))
DOCUMENTS = Documents(
    torch.cat([torch.zeros(2, FIRST), torch.ones(2, LENGTH - FIRST)], 1).int(),
    torch.tensor([0, FIRST, LENGTH, LENGTH + FIRST, 2 * LENGTH], dtype=torch.int32),
)
POSITIONS = torch.cat([torch.arange(FIRST), torch.arange(LENGTH - FIRST)]).expand(2, -1)
LORA = {"lora_rank": 4, "lora_alpha": 8}
TP, CHECKPOINTED = {"tensor_parallel_dim": 2}, {"enable_activation_checkpointing": True}
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


def runs_of(
    root: Path, sources: dict[str, Path], dataset: Path, bases: Bases, layouts: Layouts
) -> Runs:
    """Runs of four steps under `root`; a base's `family` is the model's."""

    def config(folder: Path, family: str, **changes: Any) -> Path:
        return config_of(folder, sources[family], dataset, **{"max_steps": 4} | changes)

    return Runs(root, config, bases, layouts)
