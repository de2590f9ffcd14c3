"""One run of TRL's preference trainers, for benchmarks.preference; needs TRL, and nothing of ours.

python -P benchmarks/peers/trl_preference.py '{"model": ..., "data": ..., "method": ...}'
"""

import json
import sys
import time
from itertools import pairwise
from typing import Any

import torch
from datasets import load_dataset
from peft import PeftModel
from tokenizers.processors import TemplateProcessing
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer


class OrpoOfAnswers(ORPOTrainer):  # type: ignore[misc]
    """ORPO with the likelihood of the answers, as in its paper; TRL adds the prompts."""

    def concatenated_forward(self, *arguments: Any, **options: Any) -> Any:
        """As TRL's, with the answers' mean negative log-likelihood."""
        found = super().concatenated_forward(*arguments, **options)
        return (*found[:4], -found[0].mean(), *found[5:])


class GkdOfItsAnswers(GKDTrainer):  # type: ignore[misc]
    """GKD whose mean is over the generated tokens; TRL divides by the number of the data's."""

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        """As TRL's, which counts the tokens itself if it is given no number."""
        return super().compute_loss(*arguments, **options | {"num_items_in_batch": None})


# So cold that the likeliest token is drawn.
COLD = {"lmbda": 1.0, "temperature": 1e-6, "max_new_tokens": 12}
# By our names: trainer, config, its settings.
METHODS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "dpo": (DPOTrainer, DPOConfig, {"loss_type": ["sigmoid"]}),
    "length_normalized": (DPOTrainer, DPOConfig, {"loss_type": ["sigmoid_norm"]}),
    "ipo": (DPOTrainer, DPOConfig, {"loss_type": ["ipo"]}),
    "kto": (KTOTrainer, KTOConfig, {}),
    "orpo": (OrpoOfAnswers, ORPOConfig, {}),
    "gkd": (GKDTrainer, GKDConfig, {"lmbda": 0.0, "beta": 0.5}),
    "gkd_own": (GkdOfItsAnswers, GKDConfig, {"beta": 0.5, **COLD}),
    "simpo": (CPOTrainer, CPOConfig, {"loss_type": "simpo", "simpo_gamma": 0.5, "cpo_alpha": 0.0}),
}


def tokenizer_of(folder: str) -> Any:
    """The folder's tokenizer for plain texts, which begin by its bos token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    return tokenizer


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Train by the job; the loss of each step, and the seconds of each."""
    trainer_class, config_class, settings = METHODS[job["method"]]
    losses: list[float] = []
    times: list[float] = []

    class Recorded(trainer_class):  # type: ignore[misc, valid-type]
        def compute_loss(self, *arguments: Any, **options: Any) -> Any:
            found = super().compute_loss(*arguments, **options)
            loss = found[0] if isinstance(found, tuple) else found
            losses.append(float(loss))
            times.append(time.perf_counter())
            return found

        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    torch.set_num_threads(job.get("threads", 1))
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    if job.get("adapter"):
        model = PeftModel.from_pretrained(model, job["adapter"], is_trainable=True)
    arguments = config_class(
        output_dir=job["out"],
        per_device_train_batch_size=job["batch_size"],
        max_steps=job["steps"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=0.0,
        gradient_checkpointing=False,
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        max_length=job.get("max_length", 512),
        disable_tqdm=True,
        seed=0,
        **{"beta": 0.1, **settings},
    )
    rows = load_dataset("json", data_files=job["data"], split="train")
    teacher: dict[str, Any] = {}
    if job.get("teacher"):
        tokenizer = AutoTokenizer.from_pretrained(job["model"])
        other = AutoModelForCausalLM.from_pretrained(job["teacher"], dtype=torch.float32)
        teacher = {"teacher_model": other}
    else:
        tokenizer = tokenizer_of(job["model"])
    trainer = Recorded(
        model=model, args=arguments, train_dataset=rows, processing_class=tokenizer, **teacher
    )
    trainer.train()
    seconds = [after - before for before, after in pairwise(times)]
    return {"losses": losses, "seconds": seconds}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    found = run(given)
    with open(given["result"], "w", encoding="utf-8") as file:
        json.dump(found, file)
