"""The training step that a resolved recipe describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.errors import RecipeFault
from launcher.recipe import entries
from launcher.recipe.model import method_of
from plugins.estimate.launcher.shapes import shape_of
from plugins.estimate.launcher.step_config import StepConfig
from runspec import adapters, tokens
from runspec.adapters import IA3, KINDS
from runspec.description import family_of
from runspec.keys.model import TRANSFORMERS
from runspec.keys.train import TrainConfig, recomputed, uncompiled_experts
from runspec.layout import Layout, LayoutError
from runspec.shape import Shape
from runspec.step import reduces_each
from runspec.weights import parameter_count

# By the trainer's names of the tables, those here.
_TABLES = {"embed_tokens": "tok_embeddings", "lm_head": "output"}


def step_of(config: Mapping[str, Any], nodes: int, gpus_per_node: int) -> StepConfig:
    """Return the step of a resolved recipe; RecipeFault names all that is wrong."""
    model, method = _block(config, "model"), entries.of(config).method or TrainConfig
    faults: list[str] = []
    shape, family = model_of(config, method, faults)
    try:
        layout = Layout.of(config, nodes * gpus_per_node, gpus_per_node)
    except LayoutError as error:
        faults += error.faults
        # The rules that do not depend on it.
        layout = Layout()
    step = StepConfig(
        shape=shape,
        method=method_of(model),
        layout=layout,
        gpus_per_node=gpus_per_node,
        model=_name(config, model),
        saved=tuple(_TABLES.get(name, name) for name in model.get("modules_to_save") or ()),
        frozen=tuple(config.get("freeze") or ()),
        adapter_only=bool(config.get("save_adapter_weights_only")),
        **_rows(config, method, faults),
        **_precision(config),
        **_saving(config),
        **_adapter(model, shape, family, faults),
        updated_by=str(_block(config, "optimizer").get("_component_") or ""),
        **optimizer_of(_block(config, "optimizer")),
        **_loss(_block(config, "loss"), method),
        **_frozen_models(config, method),
        **_on_policy(config, method),
    )
    if faults := faults + step.faults():
        raise RecipeFault(faults)
    return step


def model_of(
    config: Mapping[str, Any], method: type[TrainConfig], faults: list[str]
) -> tuple[Shape, str]:
    """The shape of what is trained, and the model's family."""
    model = _block(config, "model")
    given = _block(config, "checkpointer").get("checkpoint_dir")
    folder = Path(given) if given else None
    shape = shape_of(model, folder)
    try:
        added = len(tokens.new_tokens(_block(config, "tokenizer")))
        # At most: a folder may have rows that belong to no token yet.
        shape = replace(shape, vocab=tokens.grown(shape.vocab, shape.vocab + added))
    except ValueError as error:
        faults.append(str(error))
    if blocks := config.get("first_blocks"):
        shape = shape.cut(int(blocks))
    if method.has_score_head:
        # As a tied output layer, it has no table of its own.
        shape = replace(shape, tied=True)
    return shape, family_of(model, folder)


def _rows(
    config: Mapping[str, Any], method: type[TrainConfig], faults: list[str]
) -> dict[str, Any]:
    """The rows of a step."""
    length = _block(config, "tokenizer").get("max_seq_len") or 0
    if not length:
        faults.append(
            "tokenizer.max_seq_len is not set, and the longest sample decides the memory: set "
            "tokenizer.max_seq_len=4096, or what your data need"
        )
    packed = bool(_block(config, "dataset").get("packed"))
    # In a packed row the documents of a sample share it; else each is a row.
    rows = 1 if packed else method.documents_per_sample
    return {
        "batch": rows * int(config.get("batch_size") or 1),
        "length": int(length),
        "packed": packed,
        "accumulation": int(config.get("gradient_accumulation_steps") or 1),
    }


def _precision(config: Mapping[str, Any]) -> dict[str, Any]:
    """What is stored and computed in which dtype."""
    fp32 = config.get("dtype") == "fp32"
    return {
        "element_bytes": 4 if fp32 else 2,
        "reduce_bytes": 2 if config.get("fsdp_reduce_dtype") == "bf16" else 4,
        "fp32_master": config.get("master_weights") == "fp32" and not fp32,
        "fp8": bool(config.get("enable_fp8_training")),
    }


def _saving(config: Mapping[str, Any]) -> dict[str, Any]:
    """What saves memory or time."""
    layers = recomputed(config)
    return {
        "checkpointing": "full" if layers == 1 else str(layers or "none"),
        "sync_each": reduces_each(config),
        "cpu_offload": bool(config.get("fsdp_cpu_offload")),
        "activation_offload": bool(config.get("enable_activation_offloading")),
        "compiled": config.get("compile") is True and not uncompiled_experts(config),
        "reshard": config.get("fsdp_reshard_after_forward") is not False,
    }


def _frozen_models(config: Mapping[str, Any], method: type[TrainConfig]) -> dict[str, Any]:
    """The reference, and the teacher."""
    reference, teacher = method.reference_of(config), method.teacher_of(config)
    return {
        "has_reference": bool(reference),
        "keeps_reference": reference == "model",
        "teacher": shape_of({}, Path(teacher)) if teacher else None,
        "teacher_quantised": config.get("teacher_quantize_base") is True,
        "teacher_logits": method.reads_teacher_logits and bool(teacher),
    }


def _on_policy(config: Mapping[str, Any], method: type[TrainConfig]) -> dict[str, Any]:
    """How answers are sampled, if they are."""
    at_once = config.get("generation_batch_size")
    batch = {"generation_batch": at_once and int(at_once)}
    if method.samples_answers:
        rewards, apart = _block(config, "rewards"), _block(config, "resources").get("rollout")
        folders = [Path(str(_block(rewards, name).get("model") or "")) for name in rewards]
        most = config.get("max_new_tokens") or method.keys()["max_new_tokens"].default
        return batch | {
            "on_policy_share": 1 / int(config.get("updates_per_rollout") or 1),
            "new_tokens": int(most),
            "keeps_sampled": True,
            "in_reward_models": sum(parameter_count(f) for f in folders if f.parts and f.is_dir()),
            "apart": bool(apart),
        }
    keys, own = method.keys(), ("on_policy_share", "max_new_tokens")
    if own[0] not in keys:
        return {}
    share, most = (keys[n].default if config.get(n) is None else config[n] for n in own)
    return batch | {"on_policy_share": float(share), "new_tokens": int(most)}


def _block(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def _adapter(
    model: Mapping[str, Any], shape: Shape, family: str, faults: list[str]
) -> dict[str, Any]:
    name, own = adapters.name_of(model), None
    if name is None:
        return {}
    if name not in KINDS:
        try:
            own = adapters.declared(name)
        except ValueError as error:
            faults.append(str(error))
            return {}
    kind, low_rank = own or KINDS[name], name in ("lora", "dora")
    named = set(model.get("target_modules" if kind is IA3 else "lora_modules") or ())
    if kind is IA3 and not named:
        named = set(adapters.ia3_targets(family))
    every = {n: m for block, _ in shape.blocks for n, m in block.matrices.items()}
    targets = [
        name
        for name, matrix in every.items()
        if matrix.part != "router" and kind.parts_of(*matrix.owners)
        if matrix.is_split or kind is not IA3
        if not named or ("experts" if matrix.part == "experts" else _last(name)) in named
    ]
    rank = int(model.get("lora_rank") or adapters.USUAL_RANK)
    return {
        "own": own,
        "own_sizes": () if low_rank else kind.numbers(model),
        "lora_rank": rank if low_rank or own else 0,
        "lora_targets": tuple(targets),
        "lora_output": "lm_head" in named,
        "dropout": bool(model.get("lora_dropout")),
    }


def _name(config: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    component = str(model.get("_component_") or TRANSFORMERS)
    if component == TRANSFORMERS:
        return Path(str(_block(config, "checkpointer").get("checkpoint_dir"))).name
    return component.rpartition(".")[2]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def optimizer_of(block: Mapping[str, Any]) -> dict[str, Any]:
    name = str(block.get("_component_") or "").rpartition(".")[2].lower()
    kind = "adamw" + next((bits for bits in ("8bit", "4bit") if bits in name), "")
    if name == "sgd":
        kind = "momentum" if block.get("momentum") else "none"
    # As trainer.optimizers: torch's Adam and AdamW are fused unless a form is asked for.
    fused = name in ("adam", "adamw") and "foreach" not in block
    update = "single" if block.get("foreach") is False else "foreach"
    if block.get("fused", fused) or "bit" in name:
        update = "fused"
    return {"optimizer": kind, "update": update}


def _loss(block: Mapping[str, Any], method: type[TrainConfig]) -> dict[str, Any]:
    if method.has_score_head:
        return {"loss": "score"}
    return {"loss": "linear", "chunks": int(block.get("num_output_chunks") or 0)}
