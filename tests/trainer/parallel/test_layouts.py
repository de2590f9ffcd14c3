"""The same training on 1, 2 and 4 ranks, with and without accumulation, is the same training."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.runs import (
    assert_same_curve,
    assert_same_tensors,
    curve,
    lora_model,
    metrics,
    train,
    write_config,
)

# fp32 on the CPU: only the order of summation differs. Adam divides by the root of tiny second
# moments in its first steps, which enlarges that difference in single weights.
LOSS_TOLERANCE = 2e-5
WEIGHT_TOLERANCE = 5e-4


@dataclass(frozen=True)
class Layout:
    ranks: int
    batch_size: int
    accumulation: int
    lora: bool = False
    replicas: int = 1

    @property
    def name(self) -> str:
        method = "lora" if self.lora else "full"
        return f"{method}-{self.ranks}x{self.batch_size}x{self.accumulation}"


LAYOUTS = [
    Layout(1, 8, 1),
    Layout(2, 1, 4),
    # In the sixth step half of the ranks have nothing to train on.
    Layout(4, 2, 1),
    Layout(4, 1, 2, replicas=2),
    Layout(1, 8, 1, lora=True),
    Layout(2, 4, 1, lora=True),
]
REFERENCES = {False: "full-1x8x1", True: "lora-1x8x1"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, model_folder, dataset):
    """Every layout trained, three starts in all; and on 4 ranks one that changes nothing."""
    root = tmp_path_factory.mktemp("layouts")
    configs: dict[int, list[Path]] = {1: [], 2: [], 4: []}
    for layout in LAYOUTS:
        configs[layout.ranks].append(
            write_config(
                root / layout.name,
                model_folder,
                dataset,
                batch_size=layout.batch_size,
                gradient_accumulation_steps=layout.accumulation,
                data_parallel_replicate_dim=layout.replicas,
                # The sixth step takes the 4 samples that are left of the 44.
                max_steps=7,
                **({"model": lora_model()} if layout.lora else {}),
            )
        )
    configs[4].append(
        write_config(
            root / "unchanged",
            model_folder,
            dataset,
            batch_size=2,
            max_steps=1,
            optimizer={"_component_": "torch.optim.AdamW", "lr": 0.0, "fused": True},
            activation_checkpointing="full",
            custom_sharded_layers=["tok_embeddings", "output"],
        )
    )
    configs[2].append(
        write_config(
            root / "lora-bf16",
            model_folder,
            dataset,
            batch_size=4,
            max_steps=7,
            dtype="bf16",
            activation_checkpointing="full",
            model=lora_model(),
        )
    )
    for ranks, paths in configs.items():
        train(*paths, ranks=ranks)
    return {path.parent.name: path.parent for paths in configs.values() for path in paths}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_curve_and_weights_equal_the_single_process(layout, folders):
    reference, own = folders[REFERENCES[layout.lora]], folders[layout.name]
    found = curve(own)
    assert len(found) == 7
    assert_same_curve(own, reference, LOSS_TOLERANCE, 1e-3)
    assert found[-1][2] < found[0][2], "the loss must fall"
    assert_same_tensors(own, reference, WEIGHT_TOLERANCE)


def test_export_round_trip_is_exact(folders, model_folder):
    before = load_file(model_folder / "model.safetensors")
    after = load_file(folders["unchanged"] / "export/model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_checkpointing_and_sharded_tables_change_nothing(folders):
    plain, changed = metrics(folders["full-1x8x1"])[0], metrics(folders["unchanged"])[0]
    assert changed["loss"] == pytest.approx(plain["loss"], abs=1e-6)
    assert changed["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)


def test_bf16_follows_fp32_and_is_exported_as_bf16(folders):
    plain, short = metrics(folders["lora-2x4x1"]), metrics(folders["lora-bf16"])
    assert [line["loss"] for line in short] == pytest.approx(
        [line["loss"] for line in plain], abs=0.05
    )
    export = folders["lora-bf16"] / "export"
    assert {t.dtype for t in load_file(export / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((export / "config.json").read_text())["dtype"] == "bfloat16"


def test_adapter_in_peft_gives_the_merged_models_logits(folders, model_folder):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    export = folders["lora-2x4x1"] / "export"
    tokens = torch.arange(40).reshape(2, 20) * 13 % 1024
    with torch.inference_mode():
        base = AutoModelForCausalLM.from_pretrained(model_folder)
        plain = base(tokens).logits
        adapted = PeftModel.from_pretrained(base, export / "adapter").eval()(tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(export)(tokens).logits
    torch.testing.assert_close(adapted, merged, rtol=0, atol=1e-5)
    assert (adapted - plain).abs().max() > 1e-3, "the adapter must have learned something"


def test_a_line_has_the_mean_loss_since_the_line_before(tmp_path, model_folder, dataset):
    for every in (1, 3):
        folder = tmp_path / str(every)
        path = write_config(
            folder, model_folder, dataset, batch_size=4, max_steps=7, log_every_n_steps=every
        )
        train(path, ranks=2)
    each, lines = metrics(tmp_path / "1"), metrics(tmp_path / "3")
    assert [line["loss_mean"] for line in each] == [pytest.approx(line["loss"]) for line in each]
    assert [line["step"] for line in lines] == [1, 3, 6, 7]
    losses = [line["loss"] for line in each]
    means = [losses[0], sum(losses[1:3]) / 2, sum(losses[3:6]) / 3, losses[6]]
    assert [line["loss_mean"] for line in lines] == pytest.approx(means)
