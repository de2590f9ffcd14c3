"""The trainer on the null GPU: GPU code paths and their memory on a machine without a GPU."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import null_gpu
from benchmarks.null_gpu import __main__ as command
from runspec.keys.model import TRANSFORMERS
from tests.launcher.kit import until
from tests.plugins.serve.test_virtual_tokens import answer
from tests.trainer.methods.pairs import pairs_config, write_pairs
from tests.trainer.models.transformers_cases import write
from tests.trainer.runs import lora_model, write_config
from trainer import demo

ROOT = Path(null_gpu.__path__[0]).parents[1]
DATASET = ROOT / "configs/datasets/slurm_qa.jsonl"


def run(*arguments: str) -> subprocess.CompletedProcess:
    """`python -m benchmarks.null_gpu` with these arguments."""
    line = [sys.executable, "-m", "benchmarks.null_gpu", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True)


def test_a_missing_requirement_is_reported() -> None:
    assert run().returncode == run("--help").returncode == 2
    if reason := command.missing():
        done = run(sys.executable, "-c", "raise SystemExit('not reached')")
        assert (done.returncode, done.stderr) == (1, f"error: {reason}\n")


@pytest.mark.long
@pytest.mark.skipif(command.missing() is not None, reason=str(command.missing()))
def test_the_trainer_runs_as_on_a_gpu(tmp_path: Path) -> None:
    never_stop = "max_non_finite_steps=9223372036854775807"
    options = ["--device", "cuda", "--dtype", "bf16", "--steps", "2", "--out", str(tmp_path)]
    options += ["--workload", "tiny_full", "tiny_lora", "tiny_qlora", "--budget-s", "900"]
    # Metrics are rounded to 1 MiB. Of 2 rows of 128 tokens recomputing saves less than that beside
    # the tables and workspaces of 96 MiB, of 16 rows of 256 tokens 23 MiB and more.
    options += ["--batch-size", "16", "--sequence", "256"]
    peers = [f"ours:{never_stop}", f"ours:{never_stop}:activation_checkpointing=true"]
    # The exit status is not checked: losses on the null GPU mean nothing.
    run(sys.executable, "-m", "benchmarks.train", *options, "--peers", *peers)
    for workload in json.loads((tmp_path / "train.json").read_text())["workloads"]:
        plain, recomputed = workload["rows"]
        assert plain["status"] == recomputed["status"] == "ok"
        saved = plain["peak_allocated_gib"] - recomputed["peak_allocated_gib"]
        assert saved > 16 / 1024 and recomputed["peak_allocated_gib"] > 0


PACKED = {"dtype": "bf16", "row_length": 96, "batch_size": 4}
LORA = {"model": lora_model(lora_dropout=0.0)}
OFFLOADED = {"activation_checkpointing": "full", "enable_activation_offloading": True}
QLORA = {"_component_": TRANSFORMERS, "lora_rank": 8, "lora_alpha": 16, "quantize_base": True}
PREFIX = {"adapter": "prefix", "num_virtual_tokens": 4}
# In this form it reads no norm of a parameter; torch's reads two of each.
ADAFACTOR = {
    "_component_": "transformers.optimization.Adafactor",
    "lr": 1e-3,
    "relative_step": False,
    "scale_parameter": False,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "packed": ("", PACKED | {"gradient_accumulation_steps": 2}),
    "padded": ("", {"dtype": "bf16"}),
    "compiled": ("", PACKED | LORA | {"compile": True}),
    "fp8": ("", PACKED | {"enable_fp8_training": True}),
    "offloaded": ("", PACKED | OFFLOADED),
    "soft cap": ("gemma2", PACKED),
    "experts": ("qwen3-moe", PACKED | {"router_aux_loss_coef": 0.01}),
    "experts without a kernel of torch": ("qwen3-moe", PACKED),
    "experts in NF4 with an adapter": ("qwen3-moe", PACKED | {"model": QLORA}),
    "sinks": ("gpt-oss", PACKED),
    "sinks, recomputed by operation": ("gpt-oss", PACKED | {"activation_checkpointing": "op"}),
    "linear attention": ("qwen3.5", PACKED),
    "prefix": ("", PACKED | {"model": PREFIX, "save_adapter_weights_only": True}),
    "Adafactor": ("", PACKED | {"optimizer": ADAFACTOR}),
    "KTO": ("", PACKED),
    "reward model": ("", PACKED | {"model": {"_component_": TRANSFORMERS}}),
}
# Widths that torch's grouped product and NF4 take.
EXPERTS = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 128}
# Methods that compare answers, and the form of their data.
COMPARED = {
    "KTO": ("kto", "trainer.data.preferences.UnpairedPreferenceDataset"),
    "reward model": ("reward", "trainer.data.preferences.PreferenceDataset"),
}


@pytest.fixture(scope="module")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "demo"
    demo.make(folder, DATASET, seed=0)
    return folder


@pytest.mark.long
@pytest.mark.skipif(command.missing() is not None, reason=str(command.missing()))
@pytest.mark.parametrize("name", CASES)
def test_the_host_waits_for_logged_steps_only(
    name: str, tmp_path: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And finishes: checkpoint and export, in the memory that jobs use."""
    family, changes = CASES[name]
    if family:
        sizes = EXPERTS if "experts" in name else {}
        source = write(family, tmp_path / "model", demo_model, **sizes)
        given = {"model": None, "checkpointer": {"checkpoint_dir": str(source)}}
        changes = given | changes
    settings: dict[str, Any] = {"device": "cuda", "max_steps": 9, "log_every_n_steps": 3}
    settings |= {"save_every_n_steps": 9} | changes
    method, component = COMPARED.get(name, ("sft", None))
    if component is None:
        path = write_config(tmp_path / "run", demo_model, DATASET, **settings)
    else:
        settings["run_val_every_n_steps"] = 9
        pairs = write_pairs(tmp_path / "pairs.jsonl")
        path = pairs_config(tmp_path / "run", demo_model, pairs, component, **settings)
    for key, value in (("NODE_CHECK", "no"), ("PYTORCH_ALLOC_CONF", "expandable_segments:True")):
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("NULL_GPU_CAPABILITY", "80" if "without a kernel" in name else "90")
    done = run(sys.executable, "-m", "tests.benchmarks.waits", method, str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    waits = [step[0] for step in json.loads(done.stdout.splitlines()[-1])["steps"]]
    # The first number is of the optimizer's trial. Step 3 is read when step 4 has been launched,
    # step 6 when step 7 has. Before step 3 blocks are compiled. With an optimizer that is not fused
    # each step waits for the verdict whether the gradient is finite.
    own = int(name == "Adafactor")
    assert waits[3:9] == [own + step for step in (0, 1, 0, 0, 1, 0)]
    assert (path.parent / "export/config.json").is_file()


@pytest.mark.long
@pytest.mark.skipif(command.missing() is not None, reason=str(command.missing()))
@pytest.mark.parametrize("count", ["1", "2"])
def test_a_served_model_answers_on_gpus(
    count: str, tmp_path: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is no cuDNN: its attention would make a graph for each length.

    Over two GPUs transformers spreads the layers.
    """
    monkeypatch.setenv("NULL_GPU_COUNT", count)
    socket, name = tmp_path / "engine.sock", str(demo_model)
    line = [sys.executable, "-m", "benchmarks.null_gpu", sys.executable]
    line += ["-m", "plugins.serve.transformers_backend", str(socket), name]
    line += ["--device", "auto", "--dtype", "bfloat16"]
    engine = subprocess.Popen(line, cwd=ROOT, start_new_session=True)
    try:
        until(socket.exists, 120)
        asked = {"model": name, "prompt": "What is a node?", "max_tokens": 3}
        assert asyncio.run(answer(socket, asked))["usage"]["completion_tokens"] > 0
    finally:
        os.killpg(engine.pid, signal.SIGTERM)
        engine.wait(30)
