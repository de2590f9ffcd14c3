"""A checkpoint goes on in any layout: other numbers of ranks, tensor parallelism on or off."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.trainer.parallel.test_layouts import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.trainer.runs import (
    assert_same_curve,
    assert_same_tensors,
    curve,
    lora_model,
    progress,
    train,
    write_config,
)

SAVED, STEPS, SAMPLES = 3, 6, 8


@dataclass(frozen=True)
class Case:
    """Saved on 4 ranks, `from_tensor` of them splitting a layer; resumed on others."""

    ranks: int
    tensor: int = 1
    from_tensor: int = 1
    lora: bool = False

    @property
    def source(self) -> str:
        return f"{'lora' if self.lora else 'full'}-4-tp{self.from_tensor}"

    @property
    def name(self) -> str:
        return f"{self.source}-to-{self.ranks}-tp{self.tensor}"


CASES = [
    Case(1),
    Case(8, tensor=2),
    Case(2, from_tensor=2),
    Case(8, lora=True),
    Case(2, tensor=2, lora=True),
    Case(1, from_tensor=2, lora=True),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, model_folder, dataset):
    """The uninterrupted runs on one rank, and every case: saved at step 3, resumed to step 6."""
    root = tmp_path_factory.mktemp("reshard")

    def config(name: str, ranks: int, tensor: int, lora: bool, steps: int) -> Path:
        return write_config(
            root / name,
            model_folder,
            dataset,
            batch_size=SAMPLES * tensor // ranks,
            tensor_parallel_dim=tensor,
            max_steps=steps,
            enable_async_checkpointing=True,
            **({"model": lora_model()} if lora else {}),
        )

    sources = {case.source: case for case in CASES}
    train(
        *(config(name, 4, case.from_tensor, case.lora, SAVED) for name, case in sources.items()),
        ranks=4,
    )
    starts: dict[int, list[Path]] = {
        1: [config(f"whole-{lora}", 1, 1, lora, STEPS) for lora in (False, True)]
    }
    for case in CASES:
        folder = root / case.name
        shutil.copytree(root / case.source, folder)
        (folder / "progress.json").write_text(json.dumps(progress(folder) | {"state": "running"}))
        path = config(case.name, case.ranks, case.tensor, case.lora, STEPS)
        starts.setdefault(case.ranks, []).append(path)
    for ranks, paths in starts.items():
        output = train(*paths, ranks=ranks, attempt=1)
        resumed = sum(case.ranks == ranks for case in CASES)
        assert output.count(f"resuming from checkpoints/step_{SAVED}") == resumed, output
    return {folder.name: folder for folder in root.iterdir()}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_resumed_elsewhere_is_the_same_training(case, folders):
    whole, own = folders[f"whole-{case.lora}"], folders[case.name]
    assert len(curve(own)) == STEPS
    assert_same_curve(own, whole, LOSS_TOLERANCE, 1e-3)
    assert_same_tensors(own, whole, WEIGHT_TOLERANCE)
