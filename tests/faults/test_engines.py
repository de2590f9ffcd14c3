"""Other trainers with tiny models through real faults on the one-host Slurm; docs/engines.md.

    COOKBOOK_ENGINES=FOLDER python -m pytest -n 0 -m named tests/faults/test_engines.py

FOLDER holds a virtual environment for each engine, by its name: trl, litgpt, axolotl, llamafactory.
Without one its tests are skipped.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from launcher import paths
from runspec import files
from tests.faults.conftest import user_of
from tests.faults.kit import attempts, lose_node
from tests.launcher.kit import Kit, command, losses, processes_of, report, until

EVERY, STEPS = 10, 60
STANDINS = Path(__file__).parent / "standins"
DATA = paths.REPO_ROOT / "configs/datasets/slurm_qa.jsonl"


@dataclass(frozen=True)
class Case:
    """An engine: its entry, what its ranks' command line holds, its parameters and keys."""

    entry: str
    program: str
    parameters: dict[str, Any]
    keys: dict[str, Any] = field(default_factory=dict)
    nodes: int = 2


_HF = {"max_steps": STEPS, "save_steps": EVERY, "logging_steps": 1, "learning_rate": 1e-3}
CASES = {
    "trl": Case(
        "trl:sft",
        "hf_trainer",
        {
            **_HF,
            "model_name_or_path": "MODEL",
            "dataset_name": "DATA/trl",
            "per_device_train_batch_size": 4,
            "max_length": 128,
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
        },
    ),
    "llamafactory": Case(
        "llamafactory:mine.yaml",
        "hf_trainer",
        {
            **_HF,
            "model_name_or_path": "MODEL",
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "full",
            "template": "empty",
            "dataset_dir": "DATA/alpaca",
            "dataset": "qa",
            "cutoff_len": 128,
            "per_device_train_batch_size": 4,
            "report_to": "none",
        },
        # On several ranks of a CPU its transformers 5.6 cannot load the optimizer ("cpu:0").
        nodes=1,
    ),
    "axolotl": Case(
        "axolotl:mine.yaml",
        "hf_trainer",
        {
            **_HF,
            "base_model": "MODEL",
            "datasets": [{"path": "DATA/alpaca/data.json", "ds_type": "json", "type": "alpaca"}],
            "dataset_prepared_path": "DATA/prepared",
            "sequence_len": 128,
            "micro_batch_size": 4,
            "gradient_accumulation_steps": 1,
            "optimizer": "adamw_torch",
            "lr_scheduler": "cosine",
            "bf16": False,
            "val_set_size": 0,
            "device_map": "cpu",
            "special_tokens": {"pad_token": "<|endoftext|>"},
        },
        {"env": {"AXOLOTL_DO_NOT_TRACK": "1"}},
        nodes=1,
    ),
    "litgpt": Case(
        "litgpt:finetune_full",
        "litgpt",
        {
            "checkpoint_dir": "DATA/litgpt",
            "precision": "32-true",
            "data": {
                "class_path": "litgpt.data.JSON",
                "init_args": {
                    "json_path": "DATA/alpaca/data.json",
                    "val_split_fraction": 0.1,
                    "num_workers": 0,
                },
            },
            "train": {
                "save_interval": EVERY,
                "log_interval": 1,
                "global_batch_size": 16,
                "micro_batch_size": 4,
                "lr_warmup_steps": 2,
                "max_steps": STEPS,
                "max_seq_length": 256,
                "epochs": 20,
            },
            "eval": {
                "interval": 1000,
                "max_iters": 1,
                "initial_validation": False,
                "final_validation": False,
            },
        },
        nodes=1,
    ),
}

_LITGPT_MODEL = """
import sys, torch
from pathlib import Path
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import save_config
sizes = dict(n_layer=2, n_embd=128, n_head=4, n_query_groups=2, intermediate_size=256)
config = Config(name="tiny", hf_config={"org": "x", "name": "tiny"}, vocab_size=1024,
    padded_vocab_size=1024, block_size=512, rotary_percentage=1.0, parallel_residual=False,
    bias=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", **sizes)
torch.manual_seed(0)
folder = Path(sys.argv[1])
torch.save(GPT(config).state_dict(), folder / "lit_model.pth")
save_config(config, folder)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A tiny model, and the demo's questions and answers in each engine's form."""
    root = tmp_path_factory.mktemp("engines")
    made = ["-m", "trainer.demo", str(root / "model"), "--dataset", str(DATA)]
    subprocess.run([sys.executable, *made], check=True, cwd=paths.REPO_ROOT)
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    for name in ("trl", "alpaca", "litgpt"):
        (root / name).mkdir()
    pairs = [{"prompt": row["question"], "completion": row["answer"]} for row in rows]
    (root / "trl/qa.jsonl").write_text("".join(json.dumps(each) + "\n" for each in pairs))
    told = [{"instruction": r["question"], "input": "", "output": r["answer"]} for r in rows]
    (root / "alpaca/data.json").write_text(json.dumps(told))
    (root / "alpaca/dataset_info.json").write_text('{"qa": {"file_name": "data.json"}}')
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (root / "litgpt" / name).write_bytes((root / "model" / name).read_bytes())
    return root


def environment(name: str, place: Path) -> Path:
    """The virtual environment of an engine."""
    venv = Path(os.environ.get("COOKBOOK_ENGINES", "/nonexistent")) / name
    if not (venv / "bin/python").exists():
        pytest.skip(f"COOKBOOK_ENGINES has no environment {name}")
    if name == "litgpt" and not (place / "litgpt/lit_model.pth").exists():
        code = ["-c", _LITGPT_MODEL, str(place / "litgpt")]
        subprocess.run([str(venv / "bin/python"), *code], check=True)
    return venv


def standin(place: Path) -> Path:
    """A virtual environment in which a stand-in has the name of TRL."""
    venv = place / "standin"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    (own,) = Path(sys.prefix).glob("lib/python*/site-packages")
    (packages / "kit.pth").write_text(f"{own}\n{STANDINS}\n")
    # As if it were installed: else the engine's own packages would be built.
    (packages / "trl-1.16.0.dist-info").mkdir()
    return venv


def submit(user: Kit, name: str, place: Path) -> tuple[Kit, str, Path]:
    """Start a case; return its user, its job and its run."""
    case = CASES[name]
    venv = environment(name, place)
    user = Kit({**user.env, "COOKBOOK_VENV": str(venv)}, user.root)
    text = json.dumps(case.parameters).replace("MODEL", str(place / "model"))
    content = {
        "entry": case.entry,
        "resources": {"nodes": case.nodes, "gpus_per_node": 1, "cpus_per_gpu": 1, "time": "20"},
        "parameters": json.loads(text.replace("DATA", str(place))),
        **case.keys,
    }
    folder = place / name
    folder.mkdir(exist_ok=True)
    (folder / "mine.yaml").write_text(yaml.safe_dump(content["parameters"]))
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    job, run = user.submit(str(path))
    return user, job, run


def a_rank(run: Path, program: str) -> int:
    """The Python process of a rank: no shell that writes its log, no torchrun, no data worker."""
    found = [psutil.Process(pid) for pid in processes_of(run)]
    found = [
        process
        for process in found
        if program in (words := command(process.pid))
        and "python" in Path(words.partition(" ")[0]).name
        and not any(
            each in words for each in ("torch.distributed.run", "slurm.supervise", "torchrun")
        )
    ]
    pids = {process.pid for process in found}
    return [process.pid for process in found if process.ppid() not in pids][-1]


def saved(run: Path) -> int:
    return max(files.checkpoint_steps(run), default=0)


def status(run: Path) -> str:
    path = run / files.STATUS
    return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, dict[int, float]]:
    """The losses of each engine without a fault, once it has run."""
    return {}


@pytest.mark.named
@pytest.mark.parametrize("fault", ["killed", "time_limit", "node"])
@pytest.mark.parametrize("name", CASES)
def test_an_engine_loses_no_more_than_its_checkpoint_interval(
    new_cluster, root, place, undisturbed, name, fault, record_property
):
    with new_cluster("engine", "--requeue-delay", "5", "--set", "SlurmdTimeout=6") as cluster:
        if name not in undisturbed:
            user, _, run = submit(user_of(cluster, root), name, place)
            ended = user.wait(run, "COMPLETED", "FAILED", "CANCELLED", timeout=400)
            assert ended["state"] == "COMPLETED", report(run)
            undisturbed[name] = losses(run)
        user, job, run = submit(user_of(cluster, root), name, place)
        until(lambda: saved(run) or "FAILED" in status(run), 240, lambda: report(run))
        assert saved(run), report(run)
        if fault == "killed":
            os.kill(a_rank(run, CASES[name].program), signal.SIGKILL)
        elif fault == "time_limit":
            cluster.run(["scancel", "--batch", "--signal=USR1", job])
        else:
            lose_node(cluster, f"n{CASES[name].nodes}", job)
            cluster.start_dead_daemons()
        told = user.wait(run, "COMPLETED", "FAILED", "CANCELLED", timeout=400)
        assert told["state"] == "COMPLETED", report(run)
        lines = attempts(run)
        assert len(lines) > 1 and lines[-1]["cause"] == "finished", report(run)
        progress = json.loads((run / "progress.json").read_text())
        assert progress["step"] >= STEPS and progress["state"] == "finished", progress
        first, logged = lines[0], losses(run)
        assert max(logged) == STEPS, "the steps are counted as the engine's own"
        assert logged.keys() == undisturbed[name].keys() == {*range(1, STEPS + 1)}
        off = max(abs(logged[each] - undisturbed[name][each]) for each in logged)
        line = f"{name} {fault}: {first['cause']} at checkpoint {first['checkpoint_step']}"
        line += f", losses differ by {off} at most"
        record_property("engine", line)
        print(line)
        assert first["checkpoint_step"] > 0, first
        assert off == 0, line
        if fault == "time_limit":
            assert first["cause"] == "time_limit", first


@pytest.mark.long
def test_a_stopped_rank_of_transformers_trainer_is_found_and_every_command_works(user, tmp_path):
    """The wrapper around transformers' own Trainer; TRL's script alone is a stand-in."""
    place = tmp_path
    user = Kit({**user.env, "COOKBOOK_VENV": str(standin(place))}, user.root)
    steps = {**_HF, "max_steps": 24, "save_steps": 8, "report_to": "none", "use_cpu": True}
    recipe = {
        "entry": "trl:sft",
        "resources": {"nodes": 2, "gpus_per_node": 1, "cpus_per_gpu": 1, "time": "20"},
        "parameters": {"model_name_or_path": "m", "dataset_name": "d", "bf16": False, **steps},
        "hang_timeout_s": 3,
        "env": {"HURRY": str(place / "hurry")},
    }
    (place / "hang.yaml").write_text(yaml.safe_dump(recipe))
    _, run = user.submit(str(place / "hang.yaml"))
    until(lambda: saved(run), 90, lambda: report(run))
    os.kill(a_rank(run, "hf_trainer"), signal.SIGSTOP)
    (place / "hurry").touch()
    told = user.wait(run, "COMPLETED", "FAILED", "CANCELLED", timeout=120)
    assert told["state"] == "COMPLETED", report(run)
    first, last = attempts(run)
    assert first["cause"] == "hang" and "does not answer" in first["message"], first
    assert first["checkpoint_step"] % 8 == 0 and last["cause"] == "finished"
    assert told["step"] == told["total_steps"] == 24 and told["tokens_per_second_per_gpu"] > 0
    assert [row["step"] for row in files.read_json_lines(run / files.METRICS)] == [*range(1, 25)]
    assert (run / files.EXPORT / "model.safetensors").is_file()
    for words, expected in (
        (["status", run.name], "tokens/s per GPU"),
        (["logs", run.name], "step 24/24  epoch"),
        (["results", run.name], "COMPLETED  24"),
        (["report", run.name, "--output", str(place / "r.html")], "r.html"),
        (["track", run.name], "imported: "),
    ):
        done = user.cookbook(*words)
        assert done.returncode == 0 and expected in done.stdout, (words, done.stdout, done.stderr)
    assert "Tokens per second per GPU" in (place / "r.html").read_text()
