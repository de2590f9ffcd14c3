"""NeMo Automodel's fine-tuning recipe, with one document per row; it needs a GPU.

It needs other versions of transformers and torchao than this project: install it in its own
environment and select that with --python. Its packing needs Transformer Engine, so it runs only
with --documents whole.
"""

from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import engine
from benchmarks.peers.engine import Job, Recorder, Skip


def rows(job_file: str) -> list[dict[str, list[int]]]:
    """The job's rows as samples of its datasets, with labels shifted to the next token."""
    rows = engine.read_job(job_file).rows()
    shifted = torch.full_like(rows["labels"], engine.IGNORE_INDEX)
    shifted[:, :-1] = rows["labels"][:, 1:]
    return [
        {"input_ids": tokens, "labels": labels}
        for tokens, labels in zip(rows["tokens"].tolist(), shifted.tolist(), strict=True)
    ]


def recipe_config(job: Job) -> dict[str, Any]:
    """The content of a recipe's YAML file."""
    config: dict[str, Any] = {
        "seed": job.seed,
        "step_scheduler": {
            "global_batch_size": job.batch_size,
            "local_batch_size": job.batch_size,
            "max_steps": job.total_steps,
            "num_epochs": 1,
            "ckpt_every_steps": 10**9,
        },
        "dist_env": {"backend": "nccl"},
        "distributed": {
            "strategy": "fsdp2",
            "activation_checkpointing": bool(job.setting("activation_checkpointing", False)),
        },
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
            "pretrained_model_name_or_path": str(job.model_folder),
            "torch_dtype": engine.DTYPES[job.dtype],
        },
        "checkpoint": {"enabled": False, "checkpoint_dir": str(Path(job.out) / "run")},
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "dataset": {
            "_target_": "benchmarks.peers.automodel.rows",
            "job_file": str(Path(job.out) / engine.JOB),
        },
        "dataloader": {
            "_target_": "torchdata.stateful_dataloader.StatefulDataLoader",
            "collate_fn": "nemo_automodel.components.datasets.utils.default_collater",
            "shuffle": False,
        },
        "optimizer": {
            "_target_": "torch.optim.AdamW",
            "lr": job.lr,
            "betas": list(engine.BETAS),
            "eps": engine.EPSILON,
            "weight_decay": engine.WEIGHT_DECAY,
            "fused": True,
        },
        "lr_scheduler": {
            "lr_decay_style": "constant",
            "lr_warmup_steps": engine.LR_WARMUP_STEPS,
            "min_lr": 0.0,
        },
        "clip_grad_norm": {"max_norm": engine.CLIP},
    }
    if job.method != "full":
        config["peft"] = {
            "_target_": "nemo_automodel.components._peft.lora.PeftConfig",
            "target_modules": [f"*.{name}" for name in job.targets],
            "dim": job.lora_rank,
            "alpha": job.lora_alpha,
            "use_triton": True,
        }
    return config


def load_adapter(adapter: Path, model: torch.nn.Module) -> int:
    """Copy the job's adapter into `model`; returns how many of its tensors were found there."""
    from safetensors.torch import load_file

    parameters = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    found = 0
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        parameter = parameters.get(name.removeprefix("base_model.model."))
        if parameter is not None:
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.data.copy_(tensor)
            found += 1
    return found


def run(job: Job) -> dict[str, Any]:
    """Train with the recipe of `automodel finetune llm`."""
    if job.device == "cpu":
        raise Skip("needs a GPU")
    if job.method == "qlora":
        raise Skip("QLoRA is not implemented in this benchmark")
    from nemo_automodel.components.config.loader import ConfigNode
    from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

    config = recipe_config(job)
    recipe = TrainFinetuneRecipeForNextTokenPrediction(ConfigNode(config))
    recipe.setup()
    loaded = 0
    if job.method != "full":
        loaded = sum(load_adapter(job.adapter_folder, part) for part in recipe.model_parts)
    recorder = Recorder(job)
    recipe.log_train_metrics = lambda data: recorder.step(
        data.metrics["loss"], data.metrics["grad_norm"]
    )
    recipe.run_train_validation_loop()
    return recorder.result(
        strategy=config["distributed"]["strategy"],
        activation_checkpointing=config["distributed"]["activation_checkpointing"],
        adapter_tensors_loaded=loaded,
    )


if __name__ == "__main__":
    engine.main(run, packages=("torch", "nemo_automodel", "transformers", "torchao"), packs=False)
