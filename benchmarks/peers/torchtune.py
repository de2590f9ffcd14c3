"""torchtune's stock recipes: packed rows, torch.compile, chunked cross-entropy, fused AdamW.

One process runs the single-device recipes, several run the distributed recipes with FSDP. The
distributed recipes call functions that torch has for GPUs only; for a CPU these are added here.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import Dataset

from benchmarks.peers import engine
from benchmarks.peers.engine import Job, Recorder

RECIPES = {
    ("full", False): ("full_finetune_single_device", "FullFinetuneRecipeSingleDevice"),
    ("lora", False): ("lora_finetune_single_device", "LoRAFinetuneRecipeSingleDevice"),
    ("full", True): ("full_finetune_distributed", "FullFinetuneRecipeDistributed"),
    ("lora", True): ("lora_finetune_distributed", "LoRAFinetuneRecipeDistributed"),
}


class PackedRows(Dataset):
    """The job's rows in the format of torchtune's PackedDataset."""

    def __init__(self, tokenizer: Any, job_file: str, packed: bool = True) -> None:
        self._rows = engine.read_job(job_file).rows()

    def __len__(self) -> int:
        return len(self._rows["tokens"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        positions = self._rows["positions"][index]
        starts = torch.nonzero(positions == 0).flatten()
        ends = torch.cat([starts[1:], torch.tensor([len(positions)])])
        return {
            "tokens": self._rows["tokens"][index],
            "labels": self._rows["labels"][index],
            "input_pos": positions,
            "seq_lens": ends - starts,
        }


class StepLogger:
    """A torchtune metric logger that passes each step to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        """Record one optimizer step."""
        self._recorder.step(payload["loss"], payload["grad_norm"])

    def close(self) -> None:
        """torchtune calls this at the end; there is nothing to close."""


def hf_config(job: Job) -> dict[str, Any]:
    """The content of the model's config.json."""
    content: dict[str, Any] = json.loads((job.model_folder / "config.json").read_text())
    return content


def builder(job: Job) -> dict[str, Any]:
    """The `model` block of torchtune's Llama 3 with the sizes of config.json."""
    known = hf_config(job)
    family = "llama3_2" if known["tie_word_embeddings"] else "llama3_1"
    block: dict[str, Any] = {
        "_component_": f"torchtune.models.{family}.{'lora_' * (job.method != 'full')}{family}",
        "vocab_size": known["vocab_size"],
        "num_layers": known["num_hidden_layers"],
        "num_heads": known["num_attention_heads"],
        "num_kv_heads": known["num_key_value_heads"],
        "embed_dim": known["hidden_size"],
        "intermediate_dim": known["intermediate_size"],
        "max_seq_len": known["max_position_embeddings"],
        "rope_base": int(known["rope_theta"]),
        "norm_eps": known["rms_norm_eps"],
        "scale_factor": int(known["rope_scaling"]["factor"]),
    }
    if job.method != "full":
        block |= {
            "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
            "apply_lora_to_mlp": True,
            "apply_lora_to_output": False,
            "lora_rank": job.lora_rank,
            "lora_alpha": job.lora_alpha,
            "lora_dropout": 0.0,
        }
    return block | ({"quantize_base": True} if job.method == "qlora" else {})


# torchtune's names of the layers that have adapters, by the last parts of transformers'.
LAYERS = {
    "q_proj": "attn.q_proj",
    "k_proj": "attn.k_proj",
    "v_proj": "attn.v_proj",
    "o_proj": "attn.output_proj",
    "gate_proj": "mlp.w1",
    "up_proj": "mlp.w3",
    "down_proj": "mlp.w2",
}


def fill_adapter(model: torch.nn.Module, folder: Path) -> None:
    """Give torchtune's LoRA the matrices of a new adapter in PEFT's form."""
    found = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for key, value in found.items():
            # base_model.model.model.layers.N.PART.NAME.lora_A.weight
            parts = key.split(".")
            if parts[7] not in ("lora_A", "lora_B"):  # torchtune computes magnitudes itself
                continue
            name = f"layers.{parts[4]}.{LAYERS[parts[6]]}.{parts[7].lower()}.weight"
            parameter = model.get_parameter(name)
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)


def recipe_config(job: Job) -> dict[str, Any]:
    """Config of a stock recipe; `job.settings` replace its top-level keys."""
    files = sorted(path.name for path in job.model_folder.glob("*.safetensors"))
    config: dict[str, Any] = {
        "output_dir": str(Path(job.out) / "run"),
        "seed": job.seed,
        "shuffle": False,
        "device": job.device,
        "dtype": job.dtype,
        "model": builder(job),
        "tokenizer": {
            "_component_": "trainer.data.tokenizers.hugging_face_tokenizer",
            "path": str(job.model_folder),
            "max_seq_len": job.sequence,
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(job.model_folder),
            "checkpoint_files": files,
            "output_dir": str(Path(job.out) / "run"),
            "model_type": "LLAMA3_2" if hf_config(job)["tie_word_embeddings"] else "LLAMA3",
        },
        "resume_from_checkpoint": False,
        "save_adapter_weights_only": True,
        "dataset": {
            "_component_": "benchmarks.peers.torchtune.PackedRows",
            "job_file": str(Path(job.out) / engine.JOB),
            "packed": True,
        },
        "batch_size": job.batch_size,
        "epochs": 1,
        "max_steps_per_epoch": job.total_steps,
        "gradient_accumulation_steps": 1,
        "optimizer": {
            "_component_": "torch.optim.AdamW",
            "fused": True,
            "lr": job.lr,
            "betas": list(engine.BETAS),
            "eps": engine.EPSILON,
            "weight_decay": engine.WEIGHT_DECAY,
        },
        "optimizer_in_bwd": False,
        "lr_scheduler": {
            # Constant after the warm-up. transformers' own takes no number of steps.
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": engine.LR_WARMUP_STEPS,
            "num_cycles": 0.0,
        },
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "clip_grad_norm": engine.CLIP,
        "compile": job.device == "cuda",
        "enable_activation_checkpointing": bool(job.setting("activation_checkpointing", False)),
        "enable_activation_offloading": False,
        "log_every_n_steps": 1,
        "log_peak_memory_stats": False,
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": str(Path(job.out) / "run"),
        },
    }
    own = {"activation_checkpointing", "flex"}
    return config | {key: value for key, value in job.settings.items() if key not in own}


def run(job: Job) -> dict[str, Any]:
    """Train with the stock recipe, without the checkpoint at its end."""
    from omegaconf import OmegaConf

    if hf_config(job)["model_type"] != "llama":
        raise engine.Skip("it has no builder for this model")
    if not job.setting("flex", True):
        _without_flex_attention()
    distributed = job.ranks > 1
    if distributed and job.device == "cpu":
        _on_cpu_ranks()
    if distributed and job.method != "full":
        # The full recipe does this itself; the LoRA recipe's own code does it for GPUs only.
        backend = "cuda:nccl,cpu:gloo" if job.device == "cuda" else "gloo"
        torch.distributed.init_process_group(backend)
    Path(job.out, "run").mkdir(parents=True, exist_ok=True)
    config = OmegaConf.create(recipe_config(job))
    method = "full" if job.method == "full" else "lora"
    recipe = stock_recipe(*RECIPES[method, distributed])(cfg=config)
    recipe.setup(cfg=config)
    if method == "lora":
        # torchtune initialises the adapter from the global random state; all engines need the same.
        fill_adapter(recipe._model, job.adapter_folder)
    recorder = Recorder(job)
    recipe._metric_logger = StepLogger(recorder)
    # The distributed full recipe saves through its checkpoint client.
    saver = getattr(recipe, "_checkpoint_client", recipe)
    saver.save_checkpoint = lambda *_, **__: None
    recipe.train()
    return recorder.result(
        recipe=RECIPES[method, distributed][0],
        compile=config.compile,
        activation_checkpointing=config.enable_activation_checkpointing,
        attention="flex" if _uses_flex() else "sdpa",
        loss=config.loss._component_.rpartition(".")[2],
    )


def stock_recipe(file: str, name: str) -> type:
    """Load a recipe class from its file; torchtune's recipes package cannot be imported."""
    path = Path(importlib.util.find_spec("recipes").origin).parent / f"{file}.py"
    spec = importlib.util.spec_from_file_location(file, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def _uses_flex() -> bool:
    from torchtune.modules import attention_utils

    return attention_utils._SUPPORTS_FLEX_ATTENTION


def _without_flex_attention() -> None:
    from torchtune.modules import attention_utils

    attention_utils._SUPPORTS_FLEX_ATTENTION = False


def _on_cpu_ranks() -> None:
    """Add the memory functions that torchtune 0.6.1 calls and torch lacks on a CPU."""
    from torchtune import training

    torch.cpu.empty_cache = torch.cpu.reset_peak_memory_stats = lambda *_: None
    training.get_memory_stats = lambda device, reset_stats=True: {}
    training.log_memory_stats = lambda stats, message="": None


if __name__ == "__main__":
    engine.main(
        run,
        packages=("torch", "torchtune", "torchao"),
        ranks="torchrun",
        fallback={"flex": False},
    )
