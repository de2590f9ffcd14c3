"""Preference tuning here and by TRL: the same curves, and the time per pair.

    python -m benchmarks.preference curves --python TRL_ENVIRONMENT/bin/python
    python -m benchmarks.preference speed [--python TRL_ENVIRONMENT/bin/python] [--sigma 0.8]

`curves` writes tests/trainer/trl_curves.json, which the tests compare ours with. `speed` trains on
pairs whose lengths are log-normal, padded and packed, on one thread; without --python ours only.
Both use the demo's model on the CPU.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import save_file

ROOT = Path(__file__).parents[1]
CURVES = ROOT / "tests/trainer/trl_curves.json"
PAIRS = ("dpo", "length_normalized", "ipo", "orpo", "simpo")
STEPS, BATCH, RATE, RANK = 20, 8, 3e-4, 4
# For the speed: pairs, and the longest document in tokens.
COUNT, LONGEST = 256, 256
# Rows of a packed step: about as many pairs as a padded step has.
ROWS = 5
DATASETS = "trainer.data.preferences."


def write_pairs(path: Path, count: int = 16) -> Path:
    """Pairs of short texts; their answers begin by a space, so that tokens do not span it."""
    rows = [
        {
            "prompt": f"Is node {i} up?",
            "chosen": " Yes, it is " + "very " * (i % 5) + "fast.",
            "rejected": " No" + ", really" * (i % 3) + ".",
        }
        for i in range(count)
    ]
    return _write(path, rows)


def write_labelled(path: Path, count: int = BATCH) -> Path:
    """Answers with labels, as many as a batch has: TRL rotates answers within a batch."""
    rows = [
        {
            "prompt": f"Is node {i} up?",
            "completion": (" Yes, " if i % 2 else " No, ") + "really " * (i % 4) + "so.",
            "label": bool(i % 2),
        }
        for i in range(count)
    ]
    return _write(path, rows)


def write_long_pairs(path: Path, count: int, mean: float, sigma: float) -> Path:
    """Pairs whose lengths in words are log-normal, from a seed."""
    random = np.random.default_rng(0)

    def text() -> str:
        words = max(1, int(random.lognormal(mean, sigma)))
        return " " + " ".join(f"node{random.integers(100)}" for _ in range(words))

    rows = [
        {"prompt": f"Which{text()}?", "chosen": text(), "rejected": text()} for _ in range(count)
    ]
    return _write(path, rows)


def write_chats(path: Path, count: int = 16) -> Path:
    """Questions and answers, as messages for TRL and as columns for us."""
    rows = []
    for i in range(count):
        asked, answer = f"Is node {i} up?", "Yes, it is " + "very " * (i % 5) + "fast."
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        rows.append({"messages": turns, "question": asked, "answer": answer})
    return _write(path, rows)


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def make_model(folder: Path) -> Path:
    """The demo's model, whose tokenizer has no chat template, so that texts stay texts."""
    from trainer import demo

    demo.make(folder, ROOT / "configs/datasets/slurm_qa.jsonl", seed=0)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def make_chat_models(folder: Path) -> tuple[Path, Path]:
    """A student and a teacher of the demo's model, with its chat template."""
    from trainer import demo

    made = folder / "student", folder / "teacher"
    for seed, each in enumerate(made):
        demo.make(each, ROOT / "configs/datasets/slurm_qa.jsonl", seed=seed)
    return made


def make_adapter(folder: Path, model: Path) -> Path:
    """A LoRA of rank 4 on q_proj and v_proj in PEFT's form, which changes nothing yet."""
    config = json.loads((model / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    outputs = {"q_proj": hidden, "v_proj": hidden * groups // heads}
    generator, tensors = torch.Generator().manual_seed(0), {}
    for layer in range(layers):
        for name, out in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            matrix = torch.randn(RANK, hidden, generator=generator) / hidden**0.5
            tensors[f"{prefix}.lora_A.weight"] = matrix
            tensors[f"{prefix}.lora_B.weight"] = torch.zeros(out, RANK)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(outputs),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def our_config(
    folder: Path, model: Path, data: Path, method: str, adapter: Path | None = None, **changes: Any
) -> Path:
    """The train.yaml of our run of a method of TRL's; returns its path."""
    own: dict[str, dict[str, Any]] = {
        "length_normalized": {"length_normalized": True},
    }
    component = "UnpairedPreferenceDataset" if method == "kto" else "PreferenceDataset"
    loss = method if method in ("ipo", "orpo", "simpo") else "dpo"
    lora = {"lora_rank": RANK, "lora_alpha": 2 * RANK, "lora_modules": ["q_proj", "v_proj"]}
    start = {} if adapter is None else {"adapter_checkpoint": str(adapter)}
    config = {
        "output_dir": str(folder),
        "device": "cpu",
        "dtype": "fp32",
        "shuffle": False,
        "model": {} if adapter is None else lora,
        "tokenizer": {
            "_component_": "trainer.data.tokenizers.hugging_face_tokenizer",
            "path": str(model),
        },
        "checkpointer": {"checkpoint_dir": str(model), **start},
        "dataset": {
            "_component_": DATASETS + component,
            "source": "json",
            "data_files": str(data),
        },
        "batch_size": BATCH,
        "max_steps": STEPS,
        "epochs": 1000,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": RATE, "weight_decay": 0.0},
        **({} if method == "kto" else {"loss": loss}),
        **own.get(method, {}),
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def our_distillation(folder: Path, student: Path, teacher: Path, data: Path, own: bool) -> Path:
    """The train.yaml of our run of TRL's GKD, on the data or on the student's own answers.

    TRL's trainer takes its temperature for the answers only, so the loss has none.
    """
    changes: dict[str, Any] = {"teacher": str(teacher), "beta": 0.5, "cross_entropy_share": 0.0}
    if own:
        changes |= {"on_policy_share": 1.0, "sampling_temperature": 1e-6}
        changes |= {"max_new_tokens": 12}
    path = our_config(folder, student, data, "kto", **changes)
    config = yaml.safe_load(path.read_text())
    config["dataset"] |= {
        "_component_": "torchtune.datasets.instruct_dataset",
        "split": "train",
        "column_map": {"input": "question", "output": "answer"},
    }
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def ours(path: Path, method: str) -> list[dict[str, Any]]:
    """Train here; the metrics of each step."""
    name = "kto" if method == "kto" else "dpo"
    # As TRL's.
    own = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "trainer.train", name, str(path)]
    subprocess.run(command, cwd=ROOT, check=True, env=own)
    lines = (path.parent / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def trl(python: str, folder: Path, **job: Any) -> dict[str, Any]:
    """Train by TRL in its own environment."""
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "result.json"
    job |= {"out": str(folder), "result": str(result)}
    script = ROOT / "benchmarks/peers/trl_preference.py"
    subprocess.run([python, "-P", str(script), json.dumps(job, default=str)], check=True)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def curves(python: str, work: Path) -> None:
    """Write the losses of TRL's trainers, full and by LoRA."""
    model = make_model(work / "model")
    adapter = make_adapter(work / "adapter", model)
    pairs, labelled = write_pairs(work / "pairs.jsonl"), write_labelled(work / "labelled.jsonl")
    versions = subprocess.run(
        [
            python,
            "-c",
            "import trl, peft, transformers as t; print(trl.__version__, t.__version__)",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    found: dict[str, Any] = {"trl": versions[0], "transformers": versions[1], "losses": {}}
    for method in (*PAIRS, "kto"):
        for kind, start in (("full", None), ("lora", adapter)):
            if kind == "lora" and method not in ("dpo", "kto", "orpo"):
                continue
            job = {"model": model, "data": labelled if method == "kto" else pairs}
            job |= {"method": method, "adapter": start, "batch_size": BATCH}
            job |= {"steps": STEPS, "lr": RATE}
            name = f"{method}-{kind}"
            found["losses"][name] = trl(python, work / name, **job)["losses"][:STEPS]
            print(name, found["losses"][name][::5], flush=True)
    student, teacher = make_chat_models(work / "chat")
    chats = write_chats(work / "chats.jsonl")
    for method in ("gkd", "gkd_own"):
        job = {"model": student, "teacher": teacher, "data": chats, "method": method}
        job |= {"batch_size": BATCH, "steps": STEPS, "lr": RATE}
        found["losses"][method] = trl(python, work / method, **job)["losses"][:STEPS]
        print(method, found["losses"][method][::5], flush=True)
    CURVES.write_text(json.dumps(found, indent=1) + "\n")


def speed(python: str | None, work: Path, rounds: int, sigma: float) -> None:
    """Print milliseconds per pair of an epoch without its first two steps."""
    model = make_model(work / "model")
    # Shorter than real answers, for the CPU. No histogram of UltraFeedback's lengths is published
    # that could be drawn from: how much packing saves depends on sigma.
    data = write_long_pairs(work / "long.jsonl", COUNT, mean=3.0, sigma=sigma)
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        if python is not None:
            job = {"model": model, "data": data, "method": "dpo", "batch_size": BATCH}
            job |= {"steps": COUNT // BATCH, "lr": RATE, "max_length": LONGEST}
            times = trl(python, work / f"trl{number}", **job)["seconds"]
            found.setdefault("TRL, padded", []).append(1000 * statistics.mean(times[1:]) / BATCH)
        for name, packed in (("ours, padded", False), ("ours, packed", True)):
            folder = work / f"{name.replace(', ', '_')}{number}"
            changes: dict[str, Any] = {"max_steps": None, "epochs": 1}
            path = our_config(folder, model, data, "dpo", **changes)
            config = yaml.safe_load(path.read_text())
            config["tokenizer"]["max_seq_len"] = 2 * LONGEST if packed else LONGEST
            config["dataset"]["packed"] = packed
            config["batch_size"] = ROWS if packed else BATCH
            path.write_text(yaml.safe_dump(config))
            rows = ours(path, "dpo")
            seconds = [row["step_time_s"] for row in rows[2:]]
            # As many pairs in each step as on average.
            per_pair = 1000 * statistics.mean(seconds) * len(rows) / COUNT
            found.setdefault(name, []).append(per_pair)
    for name, each in found.items():
        print(f"{name}: {', '.join(f'{value:.1f}' for value in each)} ms per pair")


def main(arguments: list[str]) -> int:
    """Run one of the two; exit status 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preference", description=__doc__)
    parser.add_argument("what", choices=("curves", "speed"))
    parser.add_argument("--python", help="of an environment with TRL and PEFT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sigma", type=float, default=0.8, help="spread of log-normal lengths")
    given = parser.parse_args(arguments)
    if given.what == "curves" and given.python is None:
        parser.error("curves needs --python")
    with tempfile.TemporaryDirectory() as folder:
        if given.what == "curves":
            curves(given.python, Path(folder))
        else:
            speed(given.python, Path(folder), given.rounds, given.sigma)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
