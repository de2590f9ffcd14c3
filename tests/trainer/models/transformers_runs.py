"""What the tests of transformers' models share: configs, packed rows, runs in several layouts."""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from tests.trainer.models.transformers_cases import FAMILIES, reference, write
from tests.trainer.runs import Runs, randomise_adapter, tensors, write_config
from trainer.checkpoint import export as exports
from trainer.config import TrainConfig
from trainer.model import Documents, Inputs
from trainer.parallel.world import World

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


def runs_of(
    root: Path, sources: dict[str, Path], dataset: Path, bases: Bases, layouts: Layouts
) -> Runs:
    """Runs of four steps under `root`; a base's `family` is the model's."""

    def config(folder: Path, family: str, **changes: Any) -> Path:
        return config_of(folder, sources[family], dataset, **{"max_steps": 4} | changes)

    return Runs(root, config, bases, layouts)


def assert_equals_transformers(model: Any, config: TrainConfig, world: World) -> Path:
    """Logits of whole and of packed rows are transformers', and its export is exact."""
    source, changed = config.model_folder, TOKENS.clone()
    changed[:, :FIRST] = TOKENS[:, :FIRST].flip(1)
    with torch.inference_mode():
        found = model.module(Inputs(TOKENS))
        packed = model.module(Inputs(TOKENS, DOCUMENTS, POSITIONS))
        other = model.module(Inputs(changed, DOCUMENTS, POSITIONS))
    expected = logits(source, TOKENS)
    assert expected.std() > 0.1, "logits so small would hide a difference"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    apart = logits(source, TOKENS[:, :FIRST], TOKENS[:, FIRST:])
    torch.testing.assert_close(packed, apart, rtol=0, atol=1e-5)
    assert torch.equal(other[:, FIRST:], packed[:, FIRST:]), "a document sees another one"
    assert not torch.equal(other[:, :FIRST], packed[:, :FIRST])
    folder = exports.export(model, config, world)
    torch.testing.assert_close(tensors(folder), tensors(source), rtol=0, atol=0)
    assert torch.equal(logits(folder, TOKENS), expected)
    return folder


def assert_peft_agrees(model: Any, config: TrainConfig, world: World) -> None:
    """Its adapter in PEFT and the merged folder give its logits, and the base gives others."""
    randomise_adapter(model.module)
    with torch.no_grad():
        trained = model.module(Inputs(TOKENS))
    folder = exports.export(model, config, world)
    with torch.inference_mode():
        base = reference(config.model_folder).eval()
        plain = base(TOKENS).logits
        adapted = PeftModel.from_pretrained(base, folder / "adapter").eval()(TOKENS).logits
    torch.testing.assert_close(adapted, trained, rtol=0, atol=2e-5)
    torch.testing.assert_close(logits(folder, TOKENS), trained, rtol=0, atol=2e-5)
    assert (adapted - plain).abs().max() > 1e-2, "the adapter must do something"
