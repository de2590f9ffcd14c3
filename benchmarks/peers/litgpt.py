"""litgpt's finetune commands, litgpt.finetune.full and .lora, with one document per row.

litgpt does not pack and does not separate the documents of a row in attention, so it runs only with
--documents whole. It neither clips gradients nor reports their norm. It needs an older
huggingface_hub than this project: install it in its own environment and select that with --python.
"""

import importlib
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.peers import engine
from benchmarks.peers.engine import Job, Recorder, Skip

# litgpt's cosine schedule decays over max_steps: with this many the learning rate is constant.
MANY_STEPS = 10**7


class _Done(Exception):
    """All steps are recorded; litgpt's work after training is not measured."""


class Rows(Dataset):
    """The job's rows as samples of litgpt's SFTDataset."""

    def __init__(self, job: Job) -> None:
        self._rows = job.rows()

    def __len__(self) -> int:
        return len(self._rows["tokens"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self._rows["tokens"][index]
        count = torch.tensor([len(tokens)])
        return {
            "input_ids": tokens,
            "labels": self._rows["labels"][index],
            "token_counts": {"raw": count, "raw_plus_prompt_template": count},
        }


def run(job: Job) -> dict[str, Any]:
    """Train with the setup function of `litgpt finetune_lora` or `litgpt finetune_full`."""
    if "_component_" not in job.model:
        raise Skip("this benchmark does not convert a model with experts for it")
    if job.method == "full" and job.model_type == "LLAMA3_2":
        raise Skip("it unties tied embeddings, so it would train a different model")
    if job.setting("activation_checkpointing", False):
        raise Skip("it has no activation checkpointing in one process")
    finetune = importlib.import_module(f"litgpt.finetune.{job.method.lstrip('q')}")
    from litgpt.args import EvalArgs, TrainArgs

    recorder = Recorder(job)
    finetune.choose_logger = lambda *_, **__: _logger(recorder)
    checkpoint = Path(job.out) / "checkpoint"
    convert(job, checkpoint)
    options: dict[str, Any] = {
        "checkpoint_dir": checkpoint,
        "out_dir": Path(job.out) / "run",
        "precision": {"bf16": "bf16-true", "fp32": "32-true"}[job.dtype],
        "devices": 1,
        "data": _data(job),
        "train": TrainArgs(
            save_interval=None,
            log_interval=1,
            global_batch_size=job.batch_size,
            micro_batch_size=job.batch_size,
            lr_warmup_steps=engine.LR_WARMUP_STEPS,
            epochs=MANY_STEPS,
            max_steps=MANY_STEPS,
        ),
        "eval": EvalArgs(interval=MANY_STEPS, max_new_tokens=1, max_iters=1),
        "optimizer": {
            "class_path": "torch.optim.AdamW",
            "init_args": {
                "lr": job.lr,
                "betas": engine.BETAS,
                "eps": engine.EPSILON,
                "weight_decay": engine.WEIGHT_DECAY,
                "fused": True,
            },
        },
        "seed": job.seed,
    }
    if job.method != "full":
        kinds = ("query", "key", "value", "projection", "mlp")
        options |= {f"lora_{kind}": True for kind in kinds}
        options |= {"lora_r": job.lora_rank, "lora_alpha": job.lora_alpha, "lora_dropout": 0.0}
        options |= {"quantize": "bnb.nf4"} if job.method == "qlora" else {}
    with suppress(_Done):
        finetune.setup(**options)
    return recorder.result(compile=False, activation_checkpointing=False, clipping=False)


def convert(job: Job, folder: Path) -> None:
    """Write a litgpt checkpoint folder with the job's model and the adapter's weights."""
    from litgpt.config import Config
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
    from litgpt.utils import save_config
    from safetensors.torch import load_file

    hf_config = json.loads((job.model_folder / "config.json").read_text())
    rope = hf_config["rope_scaling"]
    config = Config(
        name="Llama-3.1-8B",
        block_size=hf_config["max_position_embeddings"],
        vocab_size=hf_config["vocab_size"],
        padded_vocab_size=hf_config["vocab_size"],
        n_layer=hf_config["num_hidden_layers"],
        n_head=hf_config["num_attention_heads"],
        n_embd=hf_config["hidden_size"],
        n_query_groups=hf_config["num_key_value_heads"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=hf_config["rms_norm_eps"],
        mlp_class_name="LLaMAMLP",
        intermediate_size=hf_config["intermediate_size"],
        rope_base=int(hf_config["rope_theta"]),
        rope_adjustments={
            "factor": rope["factor"],
            "low_freq_factor": rope["low_freq_factor"],
            "high_freq_factor": rope["high_freq_factor"],
            "original_max_seq_len": rope["original_max_position_embeddings"],
        },
    )
    folder.mkdir(parents=True)
    save_config(config, folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(job.model_folder / name, folder / name)
    hf_weights: dict[str, torch.Tensor] = {}
    for path in sorted(job.model_folder.glob("*.safetensors")):
        hf_weights |= load_file(path)
    weights: dict[str, torch.Tensor] = {}
    copy_weights_hf_llama(config, {}, weights, hf_weights)
    if job.method != "full":
        weights |= adapter(load_file(job.adapter_folder / "adapter_model.safetensors"))
    torch.save(weights, folder / "lit_model.pth")


def adapter(peft: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """PEFT's tensors under litgpt's names; litgpt concatenates query, key and value."""
    names = {
        "self_attn.o_proj": "attn.proj",
        "mlp.gate_proj": "mlp.fc_1",
        "mlp.up_proj": "mlp.fc_2",
        "mlp.down_proj": "mlp.proj",
    }
    converted: dict[str, torch.Tensor] = {}
    layers = {key.split(".layers.")[1].split(".")[0] for key in peft}
    for layer in layers:
        for part in ("lora_A", "lora_B"):

            def tensor(name: str, layer: str = layer, part: str = part) -> torch.Tensor:
                return peft[f"base_model.model.model.layers.{layer}.{name}.{part}.weight"]

            joined = torch.cat([tensor(f"self_attn.{kind}_proj") for kind in "qkv"])
            converted[f"transformer.h.{layer}.attn.qkv.{part}"] = joined
            for hf_name, litgpt_name in names.items():
                converted[f"transformer.h.{layer}.{litgpt_name}.{part}"] = tensor(hf_name)
    return converted


def _data(job: Job) -> Any:
    from litgpt.data import DataModule
    from litgpt.prompts import Default

    class Data(DataModule):
        """Data loaders over the job's rows, in order."""

        prompt_style = Default()

        def connect(self, *args: Any, **options: Any) -> None:
            """Nothing to do: the job has all settings."""

        def train_dataloader(self) -> DataLoader:
            return DataLoader(Rows(job), batch_size=job.batch_size)

        def val_dataloader(self) -> DataLoader:
            return DataLoader(torch.utils.data.Subset(Rows(job), [0]), batch_size=1)

    return Data()


def _logger(recorder: Recorder) -> Any:
    from lightning.fabric.loggers import Logger

    class Steps(Logger):
        """Passes each step to the recorder."""

        name, version = "steps", 0

        def log_hyperparams(self, *args: Any, **options: Any) -> None:
            """Not recorded."""

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            if "loss" in metrics:
                recorder.step(metrics["loss"], None)
                if recorder.done:
                    raise _Done

    return Steps()


if __name__ == "__main__":
    engine.main(run, packages=("torch", "litgpt", "lightning", "bitsandbytes"), packs=False)
