"""What the engines train: real model shapes, weights from a seed, and the same rows for all."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.peers import ours
from benchmarks.peers.engine import IGNORE_INDEX, TARGETS, Job, write_json
from runspec.flops import ModelFlops
from trainer.checkpoint import weights
from trainer.config import TrainConfig, parse
from trainer.data import batches as data
from trainer.data.packing import pack
from trainer.metrics import model_flops
from trainer.model import Decoder
from trainer.models import build as models
from trainer.parallel import world as distributed

METHODS = ("full", "lora", "qlora")
LORA_RANK, LORA_ALPHA = 16, 32
MAX_SHARD_BYTES = 4 * 2**30
BOS, EOS, FIRST_WORD = 0, 1, 2
# Document lengths are log-normal, like those of conversations: median as a share of a row, sigma.
MEDIAN_SHARE, SIGMA, MIN_TOKENS = 0.1, 1.0, 8


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama model, as in its config.json."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int
    rope_factor: float
    tied: bool = False

    @property
    def targets(self) -> tuple[str, ...]:
        """The layers that have adapters."""
        return TARGETS

    def hf_config(self) -> dict[str, Any]:
        """The content of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.width // self.heads,
            "hidden_act": "silu",
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-05,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": self.rope_factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": self.tied,
            "vocab_size": self.vocabulary,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
        }

    def model_block(self, method: str) -> dict[str, Any]:
        """The `model` block of a config whose model folder says what the model is."""
        if method == "full":
            return {}
        adapter = {"lora_rank": LORA_RANK, "lora_alpha": LORA_ALPHA}
        block = {**adapter, "lora_modules": list(self.targets)}
        return block | ({"quantize_base": True} if method == "qlora" else {})

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each tensor in the model folder."""
        keys = self.width // self.heads * self.kv_heads
        found = {"model.embed_tokens.weight": (self.vocabulary, self.width)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            found |= {
                prefix + "input_layernorm.weight": (self.width,),
                prefix + "self_attn.q_proj.weight": (self.width, self.width),
                prefix + "self_attn.k_proj.weight": (keys, self.width),
                prefix + "self_attn.v_proj.weight": (keys, self.width),
                prefix + "self_attn.o_proj.weight": (self.width, self.width),
                prefix + "post_attention_layernorm.weight": (self.width,),
                prefix + "mlp.gate_proj.weight": (self.inner, self.width),
                prefix + "mlp.up_proj.weight": (self.inner, self.width),
                prefix + "mlp.down_proj.weight": (self.width, self.inner),
            }
        found["model.norm.weight"] = (self.width,)
        return found if self.tied else found | {"lm_head.weight": (self.vocabulary, self.width)}


@dataclass(frozen=True)
class ExpertsShape(Shape):
    """Sizes of a Qwen 3 model with experts; `inner` is the width of one."""

    rope_factor: float = 1.0
    head_dim: int = 128
    experts: int = 128
    active: int = 8

    @property
    def targets(self) -> tuple[str, ...]:
        """Attention's: not every engine adapts experts."""
        return TARGETS[:4]

    def hf_config(self) -> dict[str, Any]:
        """The content of config.json."""
        same = ("hidden_act", "attention_bias", "attention_dropout", "initializer_range")
        same += ("vocab_size", "bos_token_id", "eos_token_id", "num_hidden_layers", "hidden_size")
        same += ("num_attention_heads", "num_key_value_heads", "tie_word_embeddings")
        found = super().hf_config()
        return {key: found[key] for key in same} | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "intermediate_size": self.inner,
            "moe_intermediate_size": self.inner,
            "num_experts": self.experts,
            "num_experts_per_tok": self.active,
            "norm_topk_prob": True,
            "head_dim": self.head_dim,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each tensor in the model folder."""
        found = super().tensors()
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for name in list(found):
            if ".mlp." in name:
                del found[name]
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
            found |= {
                attention + "q_proj.weight": (queries, self.width),
                attention + "k_proj.weight": (keys, self.width),
                attention + "v_proj.weight": (keys, self.width),
                attention + "o_proj.weight": (self.width, queries),
                attention + "q_norm.weight": (self.head_dim,),
                attention + "k_norm.weight": (self.head_dim,),
                mlp + "gate.weight": (self.experts, self.width),
            }
            for expert in range(self.experts):
                found |= {
                    f"{mlp}experts.{expert}.gate_proj.weight": (self.inner, self.width),
                    f"{mlp}experts.{expert}.up_proj.weight": (self.inner, self.width),
                    f"{mlp}experts.{expert}.down_proj.weight": (self.width, self.inner),
                }
        return found


@dataclass(frozen=True)
class Workload:
    """A model, a method, and the batch per GPU and step: batch_size rows of `sequence` tokens."""

    shape: Shape
    method: str
    batch_size: int
    sequence: int = 4096
    dtype: str = "bf16"

    @property
    def lr(self) -> float:
        """Learning rate."""
        return 2e-5 if self.method == "full" else 3e-4


LLAMA_8B = Shape(32, 4096, 14336, 32, 8, 128256, 8.0)
LLAMA_1B = Shape(16, 2048, 8192, 32, 8, 128256, 32.0, tied=True)
QWEN3_30B_A3B = ExpertsShape(48, 2048, 768, 32, 4, 151936)
TINY_MOE = ExpertsShape(2, 256, 128, 4, 2, 512, head_dim=64, experts=8, active=2)
# The same structure for a CPU, with the smallest matrices that torchao's NF4 accepts.
TINY = Shape(2, 256, 512, 4, 2, 512, 8.0)

WORKLOADS = {
    "llama8b_lora": Workload(LLAMA_8B, "lora", 2),
    "llama8b_full": Workload(LLAMA_8B, "full", 2),
    "llama8b_qlora": Workload(LLAMA_8B, "qlora", 2),
    "llama1b_full": Workload(LLAMA_1B, "full", 4),
    "llama1b_lora": Workload(LLAMA_1B, "lora", 4),
    "qwen3_30b_a3b_lora": Workload(QWEN3_30B_A3B, "lora", 1),
    "qwen3_30b_a3b_full": Workload(QWEN3_30B_A3B, "full", 1),
    # As many blocks of it as one GPU holds with ease.
    "qwen3_4blocks_lora": Workload(replace(QWEN3_30B_A3B, layers=4), "lora", 2),
    **{f"tiny_{m}": Workload(TINY, m, 2, sequence=128, dtype="fp32") for m in METHODS},
    **{
        f"tinymoe_{m}": Workload(TINY_MOE, m, 2, sequence=128, dtype="fp32")
        for m in ("full", "lora")
    },
}


@dataclass(frozen=True)
class Prepared:
    """Sizes of a prepared workload, from which model FLOPs and rates are computed.

    tokens, targets: real and trained tokens of each step. lengths: of its documents.
    filled: real tokens divided by all positions.
    """

    flops: ModelFlops
    tokens: list[int]
    targets: list[int]
    lengths: list[list[int]]
    filled: float

    def step_flops(self, step: int) -> float:
        """Model FLOPs of a step on all ranks; the first step is 1."""
        index = step - 1
        return self.flops.of(self.tokens[index], self.targets[index], self.lengths[index])


def make_job(name: str, folder: Path, **overrides: Any) -> Job:
    """The job of a workload; `overrides` add to or replace the workload's values."""
    workload = WORKLOADS[name]
    values = {
        "folder": str(folder),
        "out": str(folder),
        "workload": name,
        "method": workload.method,
        "model": workload.shape.model_block(workload.method),
        "batch_size": workload.batch_size,
        "sequence": workload.sequence,
        "dtype": workload.dtype,
        "lr": workload.lr,
        "lora_rank": LORA_RANK,
        "lora_alpha": LORA_ALPHA,
        "targets": list(workload.shape.targets),
    }
    return Job(**values | overrides)


def prepare(job: Job) -> Prepared:
    """Write the model, the adapter, the documents and the rows into the job's folder.

    The same seed gives the same bytes on every machine. An existing model is kept.
    """
    shape = WORKLOADS[job.workload].shape
    if not (job.model_folder / "config.json").exists():
        write_model(job.model_folder, shape, job.dtype, job.seed)
    write_corpus(job, shape.vocabulary)
    config = parse(ours.train_config(job, Path(job.folder) / "run"))
    model = models.empty(config)
    models.freeze_base(model)
    if job.method != "full":
        model.fit(shape.hf_config(), config)
        write_adapter(job, model)
    return write_rows(job, config, model_flops(model))


def write_model(folder: Path, shape: Shape, dtype: str, seed: int) -> None:
    """Write a Hugging Face folder: random weights (normal, standard deviation 0.02), tokenizer.

    Projections into the residual stream are divided by sqrt(2 layers) (Radford et al. 2019, GPT-2).
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch_dtype = models.DTYPES[dtype]

    def tensor(name: str, size: tuple[int, ...]) -> torch.Tensor:
        if len(size) == 1:
            return torch.ones(size, dtype=torch_dtype)
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = 0.02 / ((2 * shape.layers) ** 0.5 if residual else 1)
        return torch.empty(size).normal_(0, std, generator=generator).to(torch_dtype)

    files = _shards(shape.tensors(), torch_dtype.itemsize)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for number, sizes in enumerate(files, 1):
            tensors = pool.map(tensor, sizes.keys(), sizes.values())
            path = folder / f"model-{number:05}-of-{len(files):05}.safetensors"
            save_file(dict(zip(sizes, tensors, strict=True)), path, metadata={"format": "pt"})
    index = {
        name: f"model-{number:05}-of-{len(files):05}.safetensors"
        for number, sizes in enumerate(files, 1)
        for name in sizes
    }
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    write_tokenizer(folder, shape.vocabulary)
    write_json(folder / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS})
    # Written last: it marks the folder as complete.
    name = str(torch_dtype).removeprefix("torch.")
    write_json(folder / "config.json", shape.hf_config() | {"dtype": name})


def _shards(sizes: dict[str, tuple[int, ...]], itemsize: int) -> list[dict[str, tuple[int, ...]]]:
    files: list[dict[str, tuple[int, ...]]] = [{}]
    left = MAX_SHARD_BYTES
    for name, size in sizes.items():
        needed = int(np.prod(size)) * itemsize
        if needed > left and files[-1]:
            files.append({})
            left = MAX_SHARD_BYTES
        files[-1][name] = size
        left -= needed
    return files


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a word-level tokenizer: token n is the word w<n>."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    words = {"<s>": BOS, "</s>": EOS} | {f"w{n}": n for n in range(FIRST_WORD, vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
    }
    write_json(folder / "tokenizer_config.json", settings)


def write_corpus(job: Job, vocabulary: int) -> None:
    """Write documents with Zipf-distributed words, enough for all steps.

    Packed: log-normal lengths with a median of a tenth of a row, truncated at a row. Whole: one row
    per document, less one token, because torchtune's text dataset truncates there.
    """
    rows = job.total_steps * job.batch_size * job.ranks
    random = np.random.default_rng(job.seed)
    longest = job.sequence - 1
    if job.documents == "whole":
        lengths = np.full(rows, longest)
    else:
        lengths = np.empty(0, dtype=np.int64)
        while not len(lengths) or len(pack(lengths, job.sequence, None)) < rows:
            drawn = random.lognormal(np.log(job.sequence * MEDIAN_SHARE), SIGMA, 16 * rows)
            lengths = np.append(lengths, drawn.clip(MIN_TOKENS, longest).astype(np.int64))
    frequencies = 1 / np.arange(1, vocabulary - FIRST_WORD + 1)
    cumulative = np.cumsum(frequencies / frequencies.sum())
    with open(job.corpus, "w", encoding="utf-8") as file:
        for length in lengths:
            # Two of its tokens are BOS and EOS.
            words = FIRST_WORD + np.searchsorted(cumulative, random.random(length - 2)).clip(
                max=vocabulary - FIRST_WORD - 1
            )
            file.write(json.dumps({"text": " ".join(f"w{word}" for word in words)}) + "\n")


def write_adapter(job: Job, model: Decoder) -> None:
    """Write the trainer's initial adapter in PEFT's format; B is zero.

    Args:
        model: on the meta device.
    """
    for name, layer in model.named_modules():
        if name.endswith(("lora_a", "lora_b")):
            layer.to_empty(device="cpu")
    weights.initialise_adapter(model, job.seed)
    tensors = {}
    for name, parameter in model.named_parameters():
        base, _, part = name.removesuffix(".weight").rpartition(".")
        if part in ("lora_a", "lora_b"):
            hf_name = model.hub_name(f"{base}.weight").removesuffix(".weight")
            matrix = "lora_A" if part == "lora_a" else "lora_B"
            tensors[f"base_model.model.{hf_name}.{matrix}.weight"] = parameter.detach().contiguous()
    folder = job.adapter_folder
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(job.model_folder),
        "r": job.lora_rank,
        "lora_alpha": job.lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(job.targets),
        "bias": "none",
        "inference_mode": False,
    }
    write_json(folder / "adapter_config.json", settings)


def write_rows(job: Job, config: TrainConfig, flops: ModelFlops) -> Prepared:
    """Write the rows as the trainer's data loader returns them; other engines read these."""
    world = distributed.start("cpu")
    # One rank with the rows of all ranks: the ranks take them in turns.
    config = replace(config, batch_size=job.batch_size * job.ranks)
    try:
        batches = data.build(config, world).training.from_step(0)
        steps = [next(batches)[0] for _ in range(job.total_steps)]
    finally:
        distributed.stop()
    shifted = torch.cat([batch.labels for batch in steps])
    labels = torch.full_like(shifted, IGNORE_INDEX)
    labels[:, 1:] = shifted[:, :-1]
    rows = {
        "tokens": torch.cat([batch.inputs.tokens for batch in steps]),
        "labels": labels,
        "positions": torch.cat([batch.inputs.positions for batch in steps]),
    }
    save_file({name: tensor.int() for name, tensor in rows.items()}, job.rows_file)
    return Prepared(
        flops,
        [batch.token_count for batch in steps],
        [batch.target_count for batch in steps],
        [list(batch.lengths) for batch in steps],
        sum(batch.token_count for batch in steps) / rows["tokens"].numel(),
    )
