"""Packed rows and the validation loss are the same in every layout."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.runs import ROOT, curve, lora_model, metrics, train, write_config
from trainer.data.tokenised import TokenisedDataset

# fp32 on the CPU: only the order of summation differs, which Adam enlarges from step to step, most
# at the third with its gradient of norm 32. How much depends on the CPU: 3e-5 and 1e-4 were seen.
LOSS_TOLERANCE = 1e-4
FIRST_NORM_TOLERANCE = 5e-6
NORM_TOLERANCE = 4e-4
WEIGHT_TOLERANCE = 5e-4
# Odd, so that tensor parallelism must lengthen the rows.
ROW = 95
LORA = lora_model()
# Runs by name: ranks, the run that it must equal, changes to the config.
RUNS: dict[str, tuple[int, str | None, dict]] = {
    "full": (1, None, {}),
    "accumulated": (1, "full", {"batch_size": 1, "gradient_accumulation_steps": 4}),
    "lora": (1, None, {"model": LORA}),
    "full-dp2": (2, "full", {"batch_size": 2, "num_workers": 1}),
    "full-tp2": (2, "full", {"tensor_parallel_dim": 2}),
    "lora-tp2": (
        2,
        "lora",
        {"model": LORA, "tensor_parallel_dim": 2, "enable_activation_checkpointing": True},
    ),
    "full-tp2-dp2": (
        4,
        "full",
        {
            "tensor_parallel_dim": 2,
            "batch_size": 2,
            "enable_activation_checkpointing": True,
            "fsdp_reshard_after_forward": False,
        },
    ),
    "lora-dp4": (4, "lora", {"model": LORA, "batch_size": 1}),
}
PAIRS = [(name, reference) for name, (_, reference, _) in RUNS.items() if reference]


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, dataset: Path
) -> dict[str, Path]:
    """Every run trained in three starts; each number of ranks tokenises for itself."""
    root = tmp_path_factory.mktemp("packed")
    configs: dict[int, list[Path]] = {}
    for name, (ranks, _, changes) in RUNS.items():
        standard = {
            "row_length": ROW,
            "batch_size": 4,
            "max_steps": 7,
            "save_every_n_steps": 4,
            "dataset_val": {
                "data_files": str(ROOT / "configs/datasets/slurm_qa.jsonl"),
                "split": "train[:13]",
                "packed": "full" in name,
            },
            "run_val_every_n_steps": 2,
            "batch_size_val": 3,
            "data_cache_dir": str(root / f"cache-{ranks}"),
        }
        path = write_config(root / name, model_folder, dataset, **standard | changes)
        configs.setdefault(ranks, []).append(path)
    for ranks, paths in configs.items():
        train(*paths, ranks=ranks)
    return {name: root / name for name in RUNS}


@pytest.mark.long
@pytest.mark.parametrize(("name", "reference"), PAIRS, ids=[name for name, _ in PAIRS])
def test_curve_and_validation_equal_the_single_process(
    name: str, reference: str, folders: dict[str, Path]
) -> None:
    wanted, own = metrics(folders[reference]), metrics(folders[name])
    assert len(own) == 7
    for line, own_line in zip(wanted, own, strict=True):
        assert own_line["loss"] == pytest.approx(line["loss"], abs=LOSS_TOLERANCE)
        tolerance = FIRST_NORM_TOLERANCE if line["step"] == 1 else NORM_TOLERANCE
        assert own_line["grad_norm"] == pytest.approx(line["grad_norm"], rel=tolerance)
        assert own_line["tokens"] == line["tokens"]
        assert ("val_loss" in own_line) == (line["step"] in (2, 4, 6, 7))
        if "val_loss" in own_line:
            assert own_line["val_loss"] == pytest.approx(line["val_loss"], abs=LOSS_TOLERANCE)
    tensors, own_tensors = (
        load_file(folders[key] / "export/model.safetensors") for key in (reference, name)
    )
    for key, tensor in tensors.items():
        torch.testing.assert_close(own_tensors[key], tensor, rtol=0, atol=WEIGHT_TOLERANCE)


@pytest.mark.long
def test_every_number_of_ranks_makes_the_same_cache(folders: dict[str, Path]) -> None:
    root = folders["full"].parent
    caches = [sorted((root / f"cache-{ranks}").glob("*/meta.json")) for ranks in (1, 2, 4)]
    assert len(caches[0]) == 2
    for metas in zip(*caches, strict=True):
        assert len({meta.parent.name for meta in metas}) == 1
        # Each rank writes a file of tokens.
        one, *others = [TokenisedDataset(meta.parent) for meta in metas]
        for other in others:
            assert np.array_equal(other.lengths, one.lengths)
            assert np.array_equal(other.fingerprints, one.fingerprints)
            assert np.array_equal(other.documents, one.documents)
    assert curve(folders["full"])[-1][2] < curve(folders["full"])[0][2], "the loss must fall"
