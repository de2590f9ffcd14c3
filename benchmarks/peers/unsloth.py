"""Unsloth's FastLanguageModel under transformers' Trainer, packed as its own collator packs.

It needs other versions of transformers and datasets than ours: give it an interpreter of its own
with --python. Without a GPU it falls back to plain transformers.
"""

import sys
from dataclasses import replace
from typing import Any

import torch

from benchmarks.peers import engine, transformers
from benchmarks.peers.engine import Job


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The rows side by side in one, with the documents' lengths, by which it keeps them apart."""
    batch = transformers.collator(flat=True)(samples)
    begins = torch.nonzero(batch["position_ids"][0] == 0).flatten()
    ends = torch.tensor([batch["position_ids"].shape[1]])
    lengths = torch.diff(torch.cat([begins, ends]))
    return batch | {"packed_seq_lengths": lengths.int()}


def model(job: Job) -> Any:
    """The model, and with the job's adapter where it has one."""
    # It changes transformers, and must be there before it.
    from unsloth import FastLanguageModel  # isort: skip
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    recomputes = bool(job.setting("activation_checkpointing", False))
    made, _ = FastLanguageModel.from_pretrained(
        model_name=str(job.model_folder),
        max_seq_length=job.sequence,
        dtype=getattr(torch, engine.DTYPES[job.dtype]),
        load_in_4bit=job.method == "qlora",
        full_finetuning=job.method == "full",
        use_gradient_checkpointing="unsloth" if recomputes else False,
    )
    if job.method == "full":
        return made
    made = FastLanguageModel.get_peft_model(
        made,
        r=job.lora_rank,
        lora_alpha=job.lora_alpha,
        lora_dropout=0,
        bias="none",
        target_modules=list(engine.TARGETS),
        use_gradient_checkpointing="unsloth" if recomputes else False,
        random_state=job.seed,
    )
    set_peft_model_state_dict(made, load_file(job.adapter_folder / "adapter_model.safetensors"))
    return made


def run(job: Job) -> dict[str, Any]:
    """Train by the Trainer that Unsloth has changed."""
    if job.device == "cuda" and job.dtype == "bf16":
        # As its own examples have it: it keeps an adapter in fp32.
        job = replace(job, settings={"bf16": True} | job.settings)
    built = model(job)
    # Its fallback on a CPU is plain transformers, which reads the positions.
    packed = job.device == "cuda"
    recorder, given = transformers.fit(
        job, built, collate if packed else transformers.collator(flat=False)
    )
    return recorder.result(
        kernels="unsloth" if "unsloth.kernels" in sys.modules else "none",
        activation_checkpointing=given["gradient_checkpointing"],
        autocast=bool(given.get("bf16", False)),
        parameters=str(next(p.dtype for p in built.parameters() if p.requires_grad)),
    )


if __name__ == "__main__":
    packages = ("torch", "unsloth", "unsloth_zoo", "transformers", "peft", "xformers", "trl")
    engine.main(run, packages=packages)
