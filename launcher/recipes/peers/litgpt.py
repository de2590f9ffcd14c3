"""The keys of LitGPT's configs: finetune_full, finetune_lora and pretrain."""

from typing import Any

from launcher.recipes.peers import data
from launcher.recipes.peers.table import (
    Answer,
    Draft,
    Peer,
    Refused,
    Row,
    Unused,
    off,
    rows,
    whole,
)

_WAY = "start LitGPT itself with this file"
_SWITCHES = "lora_query lora_key lora_value lora_projection lora_mlp lora_head"
_MODULES = {
    "lora_query": ["q_proj"],
    "lora_key": ["k_proj"],
    "lora_value": ["v_proj"],
    "lora_projection": ["o_proj"],
    "lora_mlp": ["gate_proj", "up_proj", "down_proj"],
    "lora_head": ["lm_head"],
}
# litgpt.data's datasets of the hub with Alpaca's columns; the others need files.
_SOURCES = {
    "Alpaca2k": "mhenrichsen/alpaca_2k_test",
    "Alpaca": "tatsu-lab/alpaca",
    "AlpacaGPT4": "vicgalle/alpaca-gpt4",
}


def _begin(draft: Draft) -> None:
    new = "model_name" in draft.given or "initial_checkpoint_dir" in draft.given
    draft.entry = "pretrain" if new else "sft"
    draft.method = "lora" if any(key.startswith("lora_") for key in draft.given) else "full"
    draft.put("entry", draft.entry)
    devices, nodes = draft.get("devices"), draft.get("num_nodes") or 1
    draft.needs((devices if isinstance(devices, int) else 1) * nodes, nodes)
    if new:
        own = {"global_batch_size": 512, "max_seq_length": 2048}
        draft.defaults |= {f"train.{key}": value for key, value in own.items()}
        draft.defaults["train.lr_warmup_steps"] = 2000
        draft.defaults.pop("train.epochs")


def _model(draft: Draft, value: Any) -> Answer:
    """checkpoints/ORGANISATION/NAME is where `litgpt download` puts a model of the hub."""
    parts = str(value).rstrip("/").split("/")
    draft.model = "/".join(parts[1:]) if parts[0] == "checkpoints" and len(parts) > 2 else value
    return f"the model {draft.model}"


def _quantize(draft: Draft, value: Any) -> Answer:
    if not str(value).startswith("bnb.nf4") or draft.method == "full":
        return Refused("only LoRA over a base in bnb.nf4 is here: use quantize: bnb.nf4")
    draft.method = "qlora"
    return "the base in 4 bits (NF4): extends hub_qlora"


def _precision(draft: Draft, value: Any) -> Answer:
    kinds = {
        "bf16-true": ("bf16", None),
        "bf16-mixed": ("bf16", "fp32"),
        "32-true": ("fp32", None),
        "32": ("fp32", None),
    }
    if str(value) not in kinds:
        return Refused("bf16-true, bf16-mixed and 32-true are here: fp16 needs loss scaling")
    dtype, master = kinds[str(value)]
    draft.put("dtype", dtype)
    draft.put("master_weights", master)
    return None


def _module(draft: Draft, value: Any) -> Answer:
    if not value:
        return Unused("it is switched off")
    named = draft.values.get("model.lora_modules", [])
    draft.put("model.lora_modules", [*named, *_MODULES[draft.key]])
    return None


def _data(draft: Draft, value: Any) -> Answer:
    if isinstance(value, str):
        value = {"class_path": value}
    name = str(value.get("class_path")).rpartition(".")[2]
    own = value.get("init_args") or {}
    if data.form(draft).plain:
        if name != "TinyStories":
            return Refused(f"the files of {name} are not known: give --data FILE of plain text")
        where = data.origin(draft, "roneneldan/TinyStories")
        data.put(draft, {"_component_": data.TEXTS, **where, "column": "text"})
        return None
    style = own.get("prompt_style") or "alpaca"
    if style != "alpaca":
        return Refused(f"the prompt style {style} is not here: use alpaca, or give --data FILE")
    if name == "JSON" and own.get("json_path"):
        where = data.origin(draft, str(own["json_path"]))
    elif name in _SOURCES:
        where = data.origin(draft, _SOURCES[name])
    else:
        return Refused(f"the data of {name} are not known here: give --data FILE")
    trained = {"train_on_input": not own.get("mask_prompt", False)}
    data.put(draft, {"_component_": data.ALPACA, **where, **trained})
    draft.put("tokenizer.chat_template", data.PLAIN)
    size = own.get("val_split_fraction", 0.03847 if name != "JSON" else 0)
    held = draft.held_out(size or 0)
    return f"Alpaca's prompt as plain text; {held}" if isinstance(held, str) else "Alpaca's prompt"


def _batch(draft: Draft, value: Any) -> Answer:
    return draft.accumulate(int(value), draft.get("train.micro_batch_size"), draft.ranks, "GPUs")


def _ranks(draft: Draft, value: Any) -> Answer:
    return f"{draft.nodes} x {draft.gpus_per_node} GPUs, in resources"


def _optimizer(draft: Draft, value: Any) -> Answer:
    name = str(value)
    draft.put("optimizer._component_", name if "." in name else f"torch.optim.{name}")
    return None


def _schedule(draft: Draft, value: Any) -> Answer:
    """Linear warm-up and cosine; pre-training ends at min_lr, fine-tuning at 0."""
    kind = "cosine_with_min_lr" if data.form(draft).plain else "cosine"
    name = f"get_{kind}_schedule_with_warmup"
    draft.put("lr_scheduler._component_", f"transformers.{name}")
    draft.put("lr_scheduler.num_warmup_steps", value)
    if data.form(draft).plain:
        draft.put("lr_scheduler.min_lr", draft.get("train.min_lr"))
    return None


def _minimum(draft: Draft, value: Any) -> Answer:
    if data.form(draft).plain:
        return "in lr_scheduler"
    return Unused("LitGPT's fine-tuning does not read it: its rate ends at 0, as here")


def _tokens(draft: Draft, value: Any) -> Answer:
    """A number of steps: tokens over rows of max_seq_len."""
    per_step = draft.get("train.global_batch_size") * draft.get("train.max_seq_length")
    draft.put("max_steps", -(-int(value) // int(per_step)))
    draft.put("epochs", 1000)
    return f"steps of {per_step:,} tokens"


def _steps(draft: Draft, value: Any) -> Answer:
    answer = whole("max_steps")(draft, value)
    if answer is None and not draft.get("train.epochs"):
        draft.put("epochs", 1000)
    return answer


def _logger(draft: Draft, value: Any) -> Answer:
    if value not in ("wandb", "mlflow"):
        return Unused("metrics go to metrics.jsonl and TensorBoard")
    draft.put("tracking", value)
    return None


def _new_model(draft: Draft, value: Any) -> Answer:
    if draft.model:
        draft.put("from_scratch", True)
        return "new weights for the model that MODEL names"
    return Refused(
        "a model's shape is its config.json here: give a MODEL of the hub, or a folder with "
        "config.json and the tokenizer"
    )


def _end(draft: Draft) -> None:
    data.pack(draft)
    draft.values.setdefault("clip_grad_norm", None)
    draft.put("activation_checkpointing", "none" if draft.ranks == 1 else "full")


TABLE: dict[str, Row] = {
    "checkpoint_dir": _model,
    "initial_checkpoint_dir": _model,
    "model_name": _new_model,
    "model_config": off("a model's shape is its config.json: give MODEL"),
    "tokenizer_dir": Unused("the tokenizer is the one in the model's folder"),
    "out_dir": Unused("each run has its own folder"),
    "precision": _precision,
    "quantize": _quantize,
    "devices": _ranks,
    "num_nodes": _ranks,
    "resume": Unused("a run resumes by itself"),
    "lora_r": "model.lora_rank",
    "lora_alpha": "model.lora_alpha",
    "lora_dropout": "model.lora_dropout",
    **rows(_module, _SWITCHES),
    "data": _data,
    "train.global_batch_size": _batch,
    "train.micro_batch_size": "batch_size",
    "train.lr_warmup_steps": _schedule,
    "train.lr_warmup_fraction": off("write lr_scheduler.warmup_ratio, a share of all steps"),
    "train.epochs": whole("epochs"),
    "train.max_tokens": _tokens,
    "train.max_steps": _steps,
    "train.max_time": off("set timeout, the time limit of an attempt"),
    "train.max_seq_length": lambda draft, value: draft.put("tokenizer.max_seq_len", value),
    "train.tie_embeddings": Unused("the model's config.json says it"),
    "train.max_norm": "clip_grad_norm",
    "train.min_lr": _minimum,
    "train.save_interval": "save_every_n_steps",
    "train.log_interval": whole("log_every_n_steps"),
    "eval.interval": "run_val_every_n_steps",
    **rows(
        Unused("the whole of dataset_val is validated, also at the end; generate: asks questions"),
        "eval.max_iters eval.max_new_tokens eval.initial_validation eval.final_validation "
        "eval.evaluate_example",
    ),
    "logger_name": _logger,
    "log": Unused("the run has metrics.jsonl, TensorBoard and logs; see also tracking:"),
    "seed": "seed",
    "optimizer": _optimizer,
    "optimizer.class_path": _optimizer,
    "optimizer.init_args.lr": "optimizer.lr",
    "optimizer.init_args.weight_decay": "optimizer.weight_decay",
    "optimizer.init_args.betas": "optimizer.betas",
    "optimizer.init_args.eps": "optimizer.eps",
    "optimizer.init_args.fused": "optimizer.fused",
    "access_token": Unused("the token is read from ~/.cache/huggingface, never from a file"),
    "ops_cpu_offload": off("set fsdp_cpu_offload"),
    "adapter_prompt_length": off(f"adapters of LLaMA-Adapter are not here: {_WAY}"),
    "adapter_start_layer": off(f"adapters of LLaMA-Adapter are not here: {_WAY}"),
}

LITGPT = Peer(
    name="LitGPT",
    prefix="litgpt:",
    table=TABLE,
    begin=_begin,
    end=_end,
    data=frozenset({"data"}),
    model=frozenset({"checkpoint_dir", "initial_checkpoint_dir"}),
    defaults={
        "train.global_batch_size": 16,
        "train.micro_batch_size": 1,
        "train.lr_warmup_steps": 100,
        "train.epochs": 5,
        "train.save_interval": 1000,
        "train.min_lr": 6e-5,
        "precision": "bf16-true",
        "data": "Alpaca",
        "seed": 1337,
        "optimizer.class_path": "torch.optim.AdamW",
        "optimizer.init_args.lr": 1e-3,
        "optimizer.init_args.weight_decay": 0.01,
    },
)
