"""benchmarks.train on a CPU: what each engine trains, and what the report says."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from benchmarks import report, train, workloads
from benchmarks.peers.engine import IGNORE_INDEX


def compare(out: Path, *arguments: str) -> tuple[dict, str]:
    """Run the command; returns the content of train.json and train.md."""
    command = ["--device", "cpu", "--out", str(out), "--budget-s", "600", *arguments]
    train.main(command)
    return json.loads((out / "train.json").read_text()), (out / "train.md").read_text()


@pytest.mark.long
def test_an_engine_is_measured_or_skipped_with_a_reason(tmp_path: Path) -> None:
    peers = ["ours", "torchtune"]
    found, page = compare(
        tmp_path,
        "--workload",
        "tinymoe_lora",
        "--peers",
        *peers,
        "--steps",
        "2",
        "--warmup-steps=2",
    )
    own, skipped = found["workloads"][0]["rows"]
    assert own["differences"] == [] and own["speedup_of_ours"] == 1
    assert skipped["status"] == "skipped" and "no builder" in skipped["reason"]
    rate = own["tokens_per_second_per_gpu"]
    assert rate * sum(s["seconds"] for s in own["steps"][2:]) == pytest.approx(512, rel=0.1)
    machine = found["machine"]
    assert machine["versions"]["torch"] == version("torch")
    assert own["share_of_matmul"] == pytest.approx(
        own["tflops_per_second_per_gpu"] / machine["matmul_tflops"]["fp32"]
    )
    assert own["mfu"] is None and own["peak_allocated_gib"] is None
    (row,) = [line for line in page.splitlines() if line.startswith("| ours")]
    assert row.endswith("| yes |")
    assert "| ours | compile off" in page and "\n- torchtune: skipped: it has no builder" in page


def test_the_same_seed_makes_the_same_weights_and_rows(tmp_path: Path) -> None:
    prepared, files = [], []
    for name in ("first", "second"):
        job = workloads.make_job(
            "tiny_lora",
            tmp_path / name,
            device="cpu",
            ranks=2,
            warmup_steps=1,
            steps=3,
            seed=5,
            documents="packed",
        )
        prepared.append(workloads.prepare(job))
        written = sorted((tmp_path / name).rglob("*.safetensors"))
        written += [job.corpus, job.model_folder / "config.json"]
        files.append([path.read_bytes() for path in written])
    assert files[0] == files[1] and prepared[0] == prepared[1]
    rows = job.rows()
    tokens, labels, positions = rows["tokens"], rows["labels"], rows["positions"]
    assert tokens.shape == (4 * 2 * 2, 128)
    first = positions == 0
    assert (labels[first] == IGNORE_INDEX).all() and first.sum() > 2 * len(tokens)
    trained = labels != IGNORE_INDEX
    assert torch.equal(labels[trained], tokens[trained])
    assert prepared[0].targets == trained.view(4, 4, 128).sum((1, 2)).tolist()
    # Every document starts with the tokenizer's BOS token; padding does not.
    starts = first & (tokens == workloads.BOS)
    assert starts.sum() == (tokens == workloads.BOS).sum()
    adapter = load_file(job.adapter_folder / "adapter_model.safetensors")
    assert len(adapter) == 2 * 2 * 7
    assert all(bool(t.any()) == ("lora_A" in name) for name, t in adapter.items())


def test_a_sharded_model_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "MAX_SHARD_BYTES", 700_000)
    workloads.write_model(tmp_path, workloads.TINY, "bf16", seed=0)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2
    shapes = {}
    for name, file in index.items():
        with safe_open(tmp_path / file, framework="pt") as opened:
            shapes[name] = tuple(opened.get_slice(name).get_shape())
    assert shapes == workloads.TINY.tensors()


def test_the_real_shapes_have_the_published_number_of_parameters() -> None:
    def count(shape: workloads.Shape) -> int:
        return sum(torch.Size(size).numel() for size in shape.tensors().values())

    assert count(workloads.LLAMA_8B) == 8_030_261_248
    assert count(workloads.LLAMA_1B) == 1_235_814_400


def test_a_different_curve_exceeds_the_tolerances(tmp_path: Path) -> None:
    job = workloads.make_job(
        "tiny_full",
        tmp_path,
        device="cpu",
        ranks=1,
        warmup_steps=1,
        steps=2,
        seed=0,
        documents="packed",
    )
    curve = [{"loss": 6.0 - step / 10, "grad_norm": 2.0} for step in range(3)]
    assert report.differences(curve, curve, job) == []
    without_norms = [{**line, "grad_norm": None} for line in curve]
    assert report.differences(without_norms, curve, job) == []
    wrong = [{**line, "loss": line["loss"] + 0.01, "grad_norm": 0.0} for line in curve]
    found = " ".join(report.differences(wrong, curve, job))
    assert "first loss by 0.01" in found and "grad norm by 100 %" in found
    assert report.differences([{**line, "loss": float("nan")} for line in curve], curve, job)


@pytest.mark.long
def test_every_engine_trains_the_same(tmp_path: Path) -> None:
    peers = ["ours", "torchtune", "transformers", "ours:activation_checkpointing=true"]
    found, page = compare(tmp_path, "--workload", "tiny_full", "--peers", *peers, "--steps=4")
    (part,) = found["workloads"]
    for row in part["rows"]:
        assert row["status"] == "ok", row
        assert row["differences"] == [], row
        assert row["speedup_of_ours"] > 0
    losses = [line["loss"] for line in part["rows"][0]["steps"]]
    assert losses[-1] < losses[0] - 0.02
    assert page.count("| yes |") == len(peers)


@pytest.mark.long
def test_qlora_and_distributed_full_fine_tuning_train_the_same(tmp_path: Path) -> None:
    for workload, options in (("tiny_qlora", []), ("tiny_full", ["--ranks", "2"])):
        peers = ["--peers", "ours", "torchtune", "--steps", "3"]
        found, _ = compare(tmp_path, "--workload", workload, *peers, *options)
        assert [row["status"] for row in found["workloads"][0]["rows"]] == ["ok", "ok"]
        assert [row["differences"] for row in found["workloads"][0]["rows"]] == [[], []]


@pytest.mark.long
def test_an_engine_that_fails_or_has_another_curve_is_reported(tmp_path: Path) -> None:
    peers = ["ours:no_such_key=1", "torchtune:dtype=fp16", "ours", "ours:optimizer.lr=0.03"]
    found, page = compare(tmp_path, "--workload", "tiny_full", "--peers", *peers, "--steps=2")
    ours, torchtune, last, other = found["workloads"][0]["rows"]
    assert ours["status"] == "failed" and "no_such_key" in ours["reason"]
    assert torchtune["status"] == "failed" and "fp16" in torchtune["reason"]
    assert any("Traceback" in line for line in torchtune["log"])
    assert last["status"] == "ok" and last["differences"] == []
    assert "- torchtune:dtype=fp16: failed: ValueError" in page
    # The learning rate of step 1 is 0, so both start from the same weights.
    assert [line["loss"] for line in other["steps"][:2]] == pytest.approx(
        [line["loss"] for line in last["steps"][:2]], abs=1e-5
    )
    assert any(fault.startswith("loss by") for fault in other["differences"])
    assert "| no |" in page
