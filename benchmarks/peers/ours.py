"""This project's trainer, started as in a job: it reads train.yaml and writes metrics.jsonl."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.peers import engine
from benchmarks.peers.engine import Job

POLL_S = 0.2


def train_config(job: Job, out: Path) -> dict[str, Any]:
    """The content of train.yaml; `job.settings` are its keys, dotted for nested keys."""
    config: dict[str, Any] = {
        "output_dir": str(out),
        "data_cache_dir": str(Path(job.folder) / "data_cache"),
        "seed": job.seed,
        "shuffle": False,
        "device": job.device,
        "dtype": job.dtype,
        "model": job.model,
        "tokenizer": {
            "_component_": "trainer.data.tokenizers.hugging_face_tokenizer",
            "path": str(job.model_folder),
            "max_seq_len": job.sequence,
        },
        "checkpointer": {"checkpoint_dir": str(job.model_folder)},
        "dataset": {
            "_component_": "torchtune.datasets.text_completion_dataset",
            "source": "json",
            "data_files": str(job.corpus),
            "cache_dir": str(Path(job.folder) / "datasets"),
            "split": "train",
            "packed": True,
        },
        "batch_size": job.batch_size,
        # `run` stops it after the last measured step, before it saves a checkpoint or exports.
        "epochs": 1000,
        "max_steps": 1000 * job.total_steps,
        "optimizer": {
            "_component_": "torch.optim.AdamW",
            "lr": job.lr,
            "betas": list(engine.BETAS),
            "eps": engine.EPSILON,
            "weight_decay": engine.WEIGHT_DECAY,
        },
        "lr_scheduler": {
            "_component_": "transformers.get_constant_schedule_with_warmup",
            "num_warmup_steps": engine.LR_WARMUP_STEPS,
        },
        "loss": {"_component_": "trainer.layers.loss.LinearCrossEntropy"},
        "clip_grad_norm": engine.CLIP,
        "activation_checkpointing": "none",
        "compile": job.device == "cuda",
        "log_every_n_steps": 1,
    }
    settings = dict(job.settings)
    for key, value in settings.items():
        # All engines take true or false under this name.
        if key == "activation_checkpointing" and isinstance(value, bool):
            value = "full" if value else "none"
        *blocks, last = key.split(".")
        section = config
        for block in blocks:
            section = section.setdefault(block, {})
        section[last] = value
    return config


def run(job: Job) -> dict[str, Any]:
    """Start the trainer, kill it when all steps are logged, and read its metrics."""
    out = Path(job.out) / "run"
    out.mkdir(parents=True, exist_ok=True)
    config = train_config(job, out)
    path = out / "train.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    command = [sys.executable, "-m", "trainer.train", "sft", str(path)]
    if job.ranks > 1:
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={job.ranks}"]
        command[2:3] = [*torchrun, "--max-restarts=0", "-m", "trainer.train"]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        while len(lines := logged(out)) < job.total_steps and process.poll() is None:
            time.sleep(POLL_S)
    finally:
        # SIGKILL: after SIGTERM it would save a checkpoint first.
        engine.end(process)
    lines = logged(out)[: job.total_steps]
    if len(lines) < job.total_steps:
        return engine.failure(job, *fault(out, process.returncode))
    measured = lines[job.warmup_steps :]
    return {
        "steps": [
            {
                "step": line["step"],
                "loss": line["loss"],
                "grad_norm": line["grad_norm"],
                "seconds": line["step_time_s"] if line["step"] > 1 else None,
            }
            for line in lines
        ],
        "peak_allocated_gib": highest(measured, "peak_memory_allocated_gb"),
        "peak_reserved_gib": highest(measured, "peak_memory_reserved_gb"),
        "peak_rss_gib": highest(measured, "memory_rss_gb"),
        "settings": {
            "compile": config["compile"],
            "activation_checkpointing": config["activation_checkpointing"],
            "loss": config["loss"]["_component_"].rpartition(".")[2],
        }
        | job.settings,
    }


def logged(out: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl."""
    path = out / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def highest(lines: list[dict[str, Any]], key: str) -> float | None:
    """The highest value of a metric; None if it was not measured."""
    values = [line[key] for line in lines if line[key] is not None]
    return max(values) if values else None


def fault(out: Path, status: int | None) -> tuple[str, str]:
    """Type and message of the error that the first failed rank recorded."""
    for path in sorted(out.glob("logs/*/error_rank_*.json")):
        record = json.loads(path.read_text())
        return record["type"], record["message"].splitlines()[0]
    return "RuntimeError", f"trainer.train ended with exit status {status}"


if __name__ == "__main__":
    engine.main(run, packages=("torch", "torchtune", "torchao"), ranks="itself")
