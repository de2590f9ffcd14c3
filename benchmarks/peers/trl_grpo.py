"""One run of TRL's GRPOTrainer, for benchmarks.rl; needs TRL, and nothing of ours.

python -P benchmarks/peers/trl_grpo.py '{"model": ..., "data": ..., "result": ..., ...}'
"""

import json
import re
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def correct(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 if the last number of the answer is the column's."""
    numbers = [re.findall(r"\d+", text) for text in completions]
    return [
        float(bool(own) and int(own[-1]) == int(right))
        for own, right in zip(numbers, answer, strict=True)
    ]


class Clock(TrainerCallback):  # type: ignore[misc]
    """When each update ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Train by the job; the reward of each update, and the seconds of each but the first."""
    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    rows = load_dataset("json", data_files=job["data"], split="train")
    # As ours: a prompt begins by the first token, which this tokenizer does not add.
    rows = rows.map(lambda row: {"prompt": tokenizer.bos_token + row["prompt"]})
    arguments = GRPOConfig(
        output_dir=job["out"],
        per_device_train_batch_size=job["answers"],
        num_generations=job["group"],
        max_completion_length=job["new_tokens"],
        max_steps=job["updates"],
        learning_rate=job["lr"],
        lr_scheduler_type="cosine",
        warmup_steps=job["warmup"],
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch",
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        seed=job["seed"],
    )
    clock = Clock()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=correct,
        args=arguments,
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    seconds = [after - before for before, after in pairwise(clock.times)]
    return {"rewards": rewards, "seconds": seconds}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    Path(given["result"]).write_text(json.dumps(run(given)))
