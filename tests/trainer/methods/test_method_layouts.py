"""Every method under tensor parallelism x FSDP, and resumed on fewer ranks."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyarrow import Table, parquet

from runspec.keys.fields import STREAM
from runspec.keys.model import TRANSFORMERS
from tests.trainer.methods.pairs import pairs_config, write_pairs
from tests.trainer.models.transformers_cases import write
from tests.trainer.runs import (
    assert_same_curve,
    finish,
    lora_model,
    metrics,
    reopen,
    start,
    write_config,
)

PAIRS = "trainer.data.preferences.PreferenceDataset"
UNPAIRED = "trainer.data.preferences.UnpairedPreferenceDataset"
SLOW = {"optimizer": {"_component_": "torch.optim.AdamW", "lr": 3e-4}}
LORA = {"model": lora_model(lora_dropout=0.0)}
SCORES = {"model": {"_component_": TRANSFORMERS, "lora_rank": 4, "lora_alpha": 8}}
# By name: method, component of data that are compared, changes to the config.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dpo-full": ("dpo", PAIRS, SLOW),
    "dpo-lora": ("dpo", PAIRS, LORA),
    "kto-lora": ("kto", UNPAIRED, LORA),
    "reward": ("reward", PAIRS, SCORES | SLOW),
    "distill": ("distill", "", SLOW | {"row_length": 96}),
    "pretrain": ("pretrain", "", SLOW | {"z_loss": 1e-3, "num_workers": 2}),
}
FIGURES = ("rewards/margins", "rewards/chosen", "logps/chosen", "kl", "rewards/max", "val_loss")
FIGURES += ("val_rewards/margins", "kd_loss", "cross_entropy", "top1_agreement", "z_loss")


def config_of(
    folder: Path, source: Path, dataset: Path, method: str, component: str, **changes: Any
) -> Path:
    """The train.yaml of a method on data of its kind, which lie beside the folder."""
    if component:
        pairs = write_pairs(folder.parent / "pairs.jsonl")
        return pairs_config(folder, source, pairs, component, **changes)
    standard = {"max_steps": 4, "save_every_n_steps": 2, "shuffle": False}
    if method == "distill":
        standard["teacher"] = str(folder.parent / "teacher")
    if method == "pretrain":
        standard |= {"row_length": 64, "epochs": None}
    path = write_config(folder, source, dataset, **standard | changes)
    if method == "pretrain":
        text = folder.parent / "text.parquet"
        texts = [f"Node {i} is {'very ' * (i % 9)}far." for i in range(96)]
        parquet.write_table(Table.from_pydict({"text": texts}), text)
        content = yaml.safe_load(path.read_text())
        sources = [{"name": "own", "data_files": str(text)}]
        content["dataset"] = {"_component_": STREAM, "sources": sources}
        path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_two_by_two_equals_one_process_and_goes_on_on_two_ranks(
    name, tmp_path, model_folder, dataset
):
    method, component, changes = CASES[name]
    if method == "distill":
        write("llama3", tmp_path / "teacher", model_folder, vocab_size=1056)
    split = {"tensor_parallel_dim": 2, "batch_size": 2}

    def run(folder: str, ranks: int, attempt: int = 0, **more: Any) -> str:
        given = {"batch_size": 4} | changes | more
        path = config_of(tmp_path / folder, model_folder, dataset, method, component, **given)
        return finish(start(path, ranks, attempt=attempt, module=f"trainer.train {method}"))

    def assert_same(folder: str) -> None:
        assert_same_curve(tmp_path / folder, tmp_path / "one", 2e-5, 1e-4)
        lines = zip(metrics(tmp_path / folder), metrics(tmp_path / "one"), strict=True)
        for own, wanted in lines:
            for figure in FIGURES:
                assert (figure in own) == (figure in wanted)
                expected = pytest.approx(wanted.get(figure, 0), rel=2e-5, abs=2e-5)
                assert own.get(figure, 0) == expected, figure

    run("one", 1)
    run("both", 4, **split)
    assert_same("both")
    # From its checkpoint of step 2, without tensor parallelism.
    shutil.copytree(tmp_path / "both", tmp_path / "fewer")
    shutil.rmtree(tmp_path / "fewer/checkpoints/step_4")
    reopen(tmp_path / "fewer")
    assert "resuming from checkpoints/step_2" in run("fewer", 2, attempt=1, batch_size=2)
    assert_same("fewer")
