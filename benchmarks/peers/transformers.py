"""transformers' Trainer, with PEFT for adapters: packed rows and the fastest available attention.

On a GPU the attention is FlashAttention 2 if flash-attn is installed, else compiled FlexAttention.
Liger kernels are used if they are installed. Weights and computation are in the job's dtype.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import engine
from benchmarks.peers.engine import Job, Recorder

FLASH = "flash_attention_2"


class Rows(torch.utils.data.Dataset):
    """The job's rows as samples for the Trainer."""

    def __init__(self, job: Job) -> None:
        self._rows = job.rows()

    def __len__(self) -> int:
        return len(self._rows["tokens"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "input_ids": self._rows["tokens"][index],
            "labels": self._rows["labels"][index],
            "position_ids": self._rows["positions"][index],
        }


def collator(flat: bool) -> Any:
    """Collates without a mask: position_ids that restart at 0 mark the documents.

    Args:
        flat: concatenate the rows into one, like DataCollatorWithFlattening.
    """

    def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = {key: torch.stack([s[key] for s in samples]) for key in samples[0]}
        return {k: v.view(1, -1) for k, v in batch.items()} if flat else batch

    return collate


def attention(job: Job) -> str:
    """The name of the attention implementation."""
    if job.device == "cpu":
        return job.setting("attention", "sdpa")
    return job.setting("attention", FLASH if find_spec("flash_attn") else "flex_attention")


def base_model(job: Job) -> torch.nn.Module:
    """The model with its weights and, for LoRA and QLoRA, the job's adapter."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    dtype = getattr(torch, engine.DTYPES[job.dtype])
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention(job)}
    if job.method == "qlora":
        import bitsandbytes  # noqa: F401 (without it from_pretrained asks for another package)

        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
        options["device_map"] = {"": job.device}
    model = AutoModelForCausalLM.from_pretrained(job.model_folder, **options)
    model.config.use_cache = False
    if job.method != "full":
        from peft import PeftModel

        model = PeftModel.from_pretrained(
            model, job.adapter_folder, is_trainable=True, autocast_adapter_dtype=False
        )
    return model


def arguments(job: Job) -> dict[str, Any]:
    """TrainingArguments; `job.settings` replace single ones."""
    checkpointing = bool(job.setting("activation_checkpointing", False))
    return {
        "output_dir": str(Path(job.out) / "run"),
        "max_steps": job.total_steps,
        "per_device_train_batch_size": job.batch_size,
        "train_sampling_strategy": "sequential",
        "learning_rate": job.lr,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": engine.LR_WARMUP_STEPS,
        "optim": "adamw_torch_fused",
        "adam_beta1": engine.BETAS[0],
        "adam_beta2": engine.BETAS[1],
        "adam_epsilon": engine.EPSILON,
        "weight_decay": engine.WEIGHT_DECAY,
        "max_grad_norm": engine.CLIP,
        **({"gradient_checkpointing_kwargs": {"use_reentrant": False}} if checkpointing else {}),
        "gradient_checkpointing": checkpointing,
        "use_liger_kernel": job.device == "cuda" and find_spec("liger_kernel") is not None,
        "torch_compile": False,
        "dataloader_num_workers": 2 if job.device == "cuda" else 0,
        "remove_unused_columns": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": job.device == "cpu",
        "ddp_backend": "gloo" if job.device == "cpu" and job.ranks > 1 else None,
        "ddp_find_unused_parameters": False,
        "seed": job.seed,
    } | {
        k: v for k, v in job.settings.items() if k not in ("activation_checkpointing", "attention")
    }


def run(job: Job) -> dict[str, Any]:
    """Train the model with transformers.Trainer; several ranks use DDP."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    if job.ranks > 1 and job.method == "full":
        raise engine.Skip("full fine-tuning on several ranks is not implemented in this benchmark")
    recorder, used = Recorder(job), arguments(job)

    class Steps(TrainerCallback):
        """Passes each step to the recorder."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "grad_norm" in (logs or {}):
                recorder.step(logs["loss"], logs["grad_norm"])

    trainer = Trainer(
        model=base_model(job),
        args=TrainingArguments(**used),
        train_dataset=Rows(job),
        data_collator=collator(flat=attention(job) == FLASH),
        callbacks=[Steps()],
    )
    trainer.train()
    return recorder.result(
        attention=attention(job),
        compile=used["torch_compile"],
        activation_checkpointing=used["gradient_checkpointing"],
        liger=used["use_liger_kernel"],
        autocast=bool(used.get("bf16", False)),
    )


if __name__ == "__main__":
    engine.main(
        run,
        packages=("torch", "transformers", "peft", "accelerate", "liger_kernel", "flash_attn"),
        ranks="torchrun",
        fallback={"attention": "sdpa"},
    )
