"""Distillation from a larger teacher: the same in each layout, resumed, or refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.trainer.models.transformers_cases import write
from tests.trainer.runs import assert_same_curve, finish, reopen, start, write_config
from trainer import check
from trainer.config import read_yaml
from trainer.layers import nf4
from trainer.methods.distill import Distillation, tokenizer_faults

MODULE = "trainer.train distill"
STEP = {"max_steps": 4, "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3}}
TP = {"tensor_parallel_dim": 2}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, model_folder):
    return write_teacher(tmp_path_factory.mktemp("teacher") / "wide-llama", model_folder)


def write_teacher(folder: Path, model_folder: Path, **changes: int) -> Path:
    """A Llama that is wider and deeper than the student, its vocabulary padded by 32 tokens."""
    sizes = {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 48}
    return write("llama3", folder, model_folder, vocab_size=1056, **sizes | changes)


@pytest.mark.long
def test_a_run_resumes_with_the_same_teacher_only(tmp_path, model_folder, dataset, teacher):
    run = tmp_path / "run"
    path = write_config(run, model_folder, dataset, teacher=str(teacher), **STEP)
    finish(start(path, module=MODULE))
    reopen(run)
    content = yaml.safe_load(path.read_text())
    for change, why in (
        ({"beta": 1.0}, "beta"),
        ({"teacher": str(model_folder)}, "teacher_weights"),
    ):
        path.write_text(yaml.safe_dump(content | change))
        said = finish(start(path, attempt=1, module=MODULE), status=None)
        assert f"{why} may not change at resume" in said
    # Where the teacher lies does not matter.
    moved = shutil.copytree(teacher, tmp_path / "moved")
    path.write_text(yaml.safe_dump(content | {"teacher": str(moved), "max_steps": 5}))
    assert "resuming from checkpoints/step_4" in finish(start(path, attempt=2, module=MODULE))


@pytest.mark.long
def test_a_teacher_in_nf4_is_the_dequantised_one_in_each_layout(
    tmp_path, model_folder, dataset, teacher
):
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384}
    wide, dense = (write_teacher(tmp_path / n, model_folder, **sizes) for n in ("wide", "dense"))
    tensors = load_file(dense / "model.safetensors")
    for name, weight in tensors.items():
        if "proj" in name:
            tensors[name] = nf4.dequantise(nf4.quantise(weight), nf4.table(), torch.float32)
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    packed = {"teacher": str(wide), "teacher_quantize_base": True, "shuffle": False, **STEP}
    runs: dict[str, tuple[int, dict[str, Any]]] = {
        "dense": (1, packed | {"teacher": str(dense), "teacher_quantize_base": False}),
        "one": (1, packed),
        "fsdp": (2, packed | {"batch_size": 4}),
        "tensor": (2, packed | TP),
    }
    for name, (ranks, changes) in runs.items():
        path = write_config(tmp_path / "runs" / name, model_folder, dataset, **changes)
        finish(start(path, ranks, module=MODULE))
        assert_same_curve(path.parent, tmp_path / "runs/dense", 2e-5, 1e-4)
    # Blocks of 64 inputs do not fit 3 of them on 2 ranks.
    path = write_config(tmp_path / "odd", model_folder, dataset, **packed | TP)
    content = read_yaml(path) | {"teacher": str(teacher)}
    (fault,) = check.faults(content, Distillation)
    assert fault.startswith("teacher: ") and "set teacher_quantize_base=False" in fault


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path, model_folder, dataset, teacher):
    other = shutil.copytree(teacher, tmp_path / "other")
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    known = content["model"]["vocab"]
    first, second = list(known)[300:302]
    swapped = known | {first: known[second], second: known[first]}
    file.write_text(json.dumps(content | {"model": content["model"] | {"vocab": swapped}}))
    path = write_config(tmp_path / "run", model_folder, dataset, teacher=str(other))
    (fault,) = check.faults(read_yaml(path), Distillation)
    assert "has another tokenizer: token 300 is" in fault and "2 of 1,024 differ" in fault
    assert fault in finish(start(path, module=MODULE), status=None)
    # More special tokens do not matter in the teacher, and do in the student.
    more = content["model"] | {"vocab": known | {"<|new|>": 1030}}
    file.write_text(json.dumps(content | {"model": more}))
    assert tokenizer_faults(model_folder, other) == []
    (fault,) = tokenizer_faults(other, model_folder)
    assert "is missing there and '<|new|>' in" in fault
    file.unlink()
    (fault,) = tokenizer_faults(model_folder, other)
    assert "tokenizer.json is missing" in fault


def test_shares_above_one_are_refused(tmp_path, model_folder, dataset, teacher):
    wrong = {"beta": 1.5, "cross_entropy_share": 2.0, "teacher": str(teacher)}
    path = write_config(tmp_path, model_folder, dataset, **wrong)
    found = check.faults(read_yaml(path), Distillation)
    assert found == [
        "beta: must be from 0 to 1, got 1.5",
        "cross_entropy_share: must be from 0 to 1, got 2.0",
    ]
