"""Unsloth's FastLanguageModel with transformers' Trainer, packed like Unsloth's own collator.

It needs other versions of transformers and datasets than this project: install it in its own
environment and select that with --python. Without a GPU it falls back to plain transformers.
"""

import sys
from dataclasses import replace
from typing import Any

import torch

from benchmarks.peers import engine, transformers
from benchmarks.peers.engine import Job


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The rows concatenated into one, with the document lengths, which Unsloth's attention uses."""
    batch = transformers.collator(flat=True)(samples)
    starts = torch.nonzero(batch["position_ids"][0] == 0).flatten()
    ends = torch.tensor([batch["position_ids"].shape[1]])
    lengths = torch.diff(torch.cat([starts, ends]))
    return batch | {"packed_seq_lengths": lengths.int()}


def model(job: Job) -> Any:
    """The model and, for LoRA and QLoRA, the job's adapter."""
    # Unsloth patches transformers, so it must be imported first.
    from unsloth import FastLanguageModel  # isort: skip
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    checkpointing = bool(job.setting("activation_checkpointing", False))
    loaded, _ = FastLanguageModel.from_pretrained(
        model_name=str(job.model_folder),
        max_seq_length=job.sequence,
        dtype=getattr(torch, engine.DTYPES[job.dtype]),
        load_in_4bit=job.method == "qlora",
        full_finetuning=job.method == "full",
        use_gradient_checkpointing="unsloth" if checkpointing else False,
    )
    if job.method == "full":
        return loaded
    loaded = FastLanguageModel.get_peft_model(
        loaded,
        r=job.lora_rank,
        lora_alpha=job.lora_alpha,
        lora_dropout=0,
        bias="none",
        target_modules=list(job.targets),
        use_gradient_checkpointing="unsloth" if checkpointing else False,
        random_state=job.seed,
    )
    set_peft_model_state_dict(loaded, load_file(job.adapter_folder / "adapter_model.safetensors"))
    return loaded


def run(job: Job) -> dict[str, Any]:
    """Train with transformers' Trainer, which Unsloth patches."""
    if job.device == "cuda" and job.dtype == "bf16":
        # As in Unsloth's own examples: it keeps an adapter in fp32 and autocasts to bf16.
        job = replace(job, settings={"bf16": True} | job.settings)
    loaded = model(job)
    # On a CPU it falls back to plain transformers, which reads position_ids.
    packed = job.device == "cuda"
    recorder, used = transformers.fit(
        job, loaded, collate if packed else transformers.collator(flat=False)
    )
    return recorder.result(
        kernels="unsloth" if "unsloth.kernels" in sys.modules else "none",
        activation_checkpointing=used["gradient_checkpointing"],
        autocast=bool(used.get("bf16", False)),
        parameters=str(next(p.dtype for p in loaded.parameters() if p.requires_grad)),
    )


if __name__ == "__main__":
    packages = ("torch", "unsloth", "unsloth_zoo", "transformers", "peft", "xformers", "trl")
    engine.main(run, packages=packages)
