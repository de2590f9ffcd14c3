"""A teacher's log-probabilities, written once and read: resumed, in each layout, or refused."""

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from runspec.keys.distill import TeachConfig
from tests.trainer.methods.test_distill import teacher as teacher
from tests.trainer.runs import (
    assert_same_curve,
    finish,
    kill_at,
    kill_rank,
    metrics,
    start,
    write_config,
)
from trainer import check
from trainer.config import read_yaml
from trainer.data.teacher import KeptTeacher, parts_of, record
from trainer.data.tokenised import TokenisedDataset
from trainer.errors import ConfigError
from trainer.methods.distill import Distillation
from trainer.methods.teach import Teaching

MODULE = "trainer.train teach"
STEP = {"max_steps": 4, "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3}}
PACKED = {"row_length": 96, "batch_size": 4}
KEPT = {"teacher_log_probs": "kept"}


@pytest.fixture(scope="module")
def many(tmp_path_factory, dataset):
    """The samples of `dataset` and variants of them: enough for several parts."""
    path = tmp_path_factory.mktemp("many") / "many.jsonl"
    lines = [json.loads(line) for line in dataset.read_text().splitlines()]
    variants = ({**line, "question": f"{line['question']} {n}"} for n in range(9) for line in lines)
    path.write_text("".join(json.dumps(each) + "\n" for each in variants))
    return path


def files(root: Path) -> dict[str, bytes]:
    """What is kept under a folder of runs, by name."""
    (folder,) = (root / ".data_cache").glob("*/teacher_*")
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def root(tmp_path_factory, model_folder, many, teacher):
    """A folder of runs in which the teacher's pass is done, in a packed and batched way."""
    folder = tmp_path_factory.mktemp("teach")
    more = PACKED | {"teacher": str(teacher)}
    said = finish(start(write_config(folder / "teach", model_folder, many, **more), module=MODULE))
    assert "260 bytes per token" in said and "tokens compared" in said and "% less" in said
    assert json.loads((folder / "teach/progress.json").read_text())["state"] == "finished"
    return folder


def test_it_keeps_so_many_bytes_per_token(root):
    kept = files(root)
    parts = [content for name, content in kept.items() if name.endswith(".bin")]
    assert record(32).itemsize == 260 and len(parts) > 2
    records = np.frombuffer(b"".join(parts), record(32))
    mass = np.exp(records["log_probs"]).sum(1) + np.exp(records["tail"])
    np.testing.assert_allclose(mass, 1, rtol=1e-5)
    assert (np.diff(records["log_probs"], axis=1) <= 0).all() and records["ids"].max() < 1024
    meta = json.loads(kept["meta.json"])
    count, tail, whole, over = meta["compared"]
    assert 0 < tail < count and 0 < over < whole
    content = read_yaml(root / "teach/train.yaml")
    assert [*TeachConfig.key_notes(content)] == []
    (note,) = TeachConfig.key_notes(content | {"teacher_top_k": 38})
    assert "38 keeps 308 bytes" in note and "up to 37 it is at most 300" in note


@pytest.mark.long
def test_ranks_write_the_same(root, tmp_path, model_folder, many, teacher):
    """Two replicas of two ranks that split the layers."""
    more = PACKED | {"teacher": str(teacher), "tensor_parallel_dim": 2}
    path = write_config(tmp_path / "teach", model_folder, many, **more)
    finish(start(path, 4, module=MODULE))
    own, wanted = files(tmp_path), files(root)
    assert own.keys() == wanted.keys()
    for name, content in own.items():
        if name.endswith(".bin"):
            first, second = (np.frombuffer(each, record(32)) for each in (content, wanted[name]))
            for column in ("log_probs", "tail"):
                np.testing.assert_allclose(first[column], second[column], atol=2e-5)
            assert (first["ids"] == second["ids"]).mean() > 0.999


def test_a_killed_pass_goes_on_by_part_and_writes_the_same(
    root, tmp_path, model_folder, many, teacher
):
    more = PACKED | {"teacher": str(teacher)}
    path = write_config(tmp_path / "teach", model_folder, many, **more)
    (path.parent / ".stop").touch()
    assert "asked to stop" in finish(start(path, module=MODULE))
    assert json.loads((path.parent / "progress.json").read_text())["state"] == "stopped"
    process = start(path, module=MODULE)
    while not list((tmp_path / ".data_cache").glob("*/teacher_*/part_00000.json")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.002)
    kill_rank(process, 0)
    finish(process, status=None)
    (folder,) = (tmp_path / ".data_cache").glob("*/teacher_*")
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("part_*.bin")}
    assert before and not (folder / "meta.json").is_file()
    said = finish(start(path, attempt=1, module=MODULE))
    assert files(tmp_path) == files(root)
    assert (folder / "part_00000.bin").stat().st_mtime_ns == before["part_00000.bin"], said


def test_the_kept_whole_vocabulary_is_the_online_teacher(
    tmp_path, model_folder, dataset, many, teacher
):
    """In training and in validation."""
    shared = STEP | PACKED | {"teacher": str(teacher), "teacher_top_k": 2000, "temperature": 1.5}
    shared |= {"dataset_val": {"data_files": str(many), "split": "train[:20]"}}
    online, teach, own = (
        write_config(tmp_path / name, model_folder, dataset, **shared | more)
        for name, more in {"online": {}, "teach": {}, "kept": KEPT}.items()
    )
    finish(start(online, module="trainer.train distill"))
    finish(start(teach, module=MODULE))
    assert "teacher    frozen" not in finish(start(own, module="trainer.train distill"))
    assert_same_curve(tmp_path / "kept", tmp_path / "online", 1e-5, 1e-4)
    for first, second in zip(metrics(tmp_path / "kept"), metrics(tmp_path / "online"), strict=True):
        assert first["kd_loss"] == pytest.approx(second["kd_loss"], abs=1e-5)
        assert first.get("val_kd_loss") == pytest.approx(second.get("val_kd_loss"), abs=1e-5)
        assert first["top1_agreement"] == second["top1_agreement"]


@pytest.mark.long
def test_a_killed_distillation_on_two_ranks_equals_an_uninterrupted_one_on_one(
    root, model_folder, many, teacher
):
    changes = STEP | KEPT | PACKED | {"max_steps": 12, "save_every_n_steps": 2}
    changes |= {"teacher": str(teacher)}
    one, two = (
        write_config(root / name, model_folder, many, **changes | more)
        for name, more in {"one": {}, "two": {"batch_size": 2}}.items()
    )
    finish(start(one, module="trainer.train distill"))
    kill_at(two, 4, ranks=2, module="trainer.train distill")
    said = finish(start(two, 2, attempt=1, module="trainer.train distill"))
    assert "resuming from checkpoints/step_" in said
    assert_same_curve(root / "two", root / "one", 2e-5, 1e-4)


def test_what_is_missing_or_does_not_match_is_refused(root, tmp_path, model_folder, many, teacher):
    changes = KEPT | PACKED | {"teacher": str(teacher)}
    assert not check.faults(
        read_yaml(write_config(root / "ok", model_folder, many, **changes)), Distillation
    )
    for other in ({"teacher_top_k": 16}, {"temperature": 2.0}, {"dtype": "bf16"}):
        path = write_config(root / "other", model_folder, many, **changes | other)
        (fault,) = check.faults(read_yaml(path), Distillation)
        assert "cookbook submit --recipe RECIPE entry=teach" in fault and "there is no" in fault
        # The teacher's own pass is not refused for what it is to write.
        assert not check.faults(read_yaml(path), Teaching)
    said = finish(start(path, module="trainer.train distill"), status=1)
    assert fault in said and "Traceback" not in said
    path = write_config(root / "beta", model_folder, many, **changes | {"beta": 0.5})
    (fault,) = check.faults(read_yaml(path), Distillation)
    assert fault.startswith("beta: 0.5 needs the teacher's whole distribution")
    # A part in which a bit has changed is seen when it is read; one that was cut short at once.
    shutil.copytree(root / ".data_cache", tmp_path / ".data_cache")
    (part,) = (tmp_path / ".data_cache").glob("*/teacher_*/part_00001.bin")
    whole, tokens = part.read_bytes(), TokenisedDataset(part.parent.parent)
    part.write_bytes(whole[:7] + bytes([whole[7] ^ 1]) + whole[8:])
    read = KeptTeacher(part.parent, tokens.lengths, tokens.targets)
    first = parts_of(tokens.lengths, tokens.targets)[1].begin
    assert len(read.of(np.arange(first)).tail) == tokens.targets[:first].sum()
    with pytest.raises(ConfigError, match=f"{part} is damaged: delete {part.parent}, and"):
        read.of(np.array([first - 1, first]))
    part.write_bytes(whole[:-4])
    path = write_config(tmp_path / "cut", model_folder, many, **changes)
    said = finish(start(path, module="trainer.train distill"), status=1)
    assert f"{part} is damaged" in said
