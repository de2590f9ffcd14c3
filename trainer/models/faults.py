"""Why a model cannot be laid out, or trained in part, as a config says."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from runspec import tokens
from runspec.hints import nearest
from runspec.keys.train import ModelSpec
from runspec.layout import StepFacts
from trainer.checkpoint import weights
from trainer.layers import experts, nf4
from trainer.model import Decoder, Role

# torchtune's names of families in `checkpointer.model_type`, and config.json's of the same.
_FAMILIES = {
    **dict.fromkeys(("LLAMA2", "LLAMA3", "LLAMA3_2"), "llama"),
    **dict.fromkeys(("PHI3_MINI", "PHI4"), "phi3"),
    **{name: name.lower() for name in ("MISTRAL", "QWEN2", "GEMMA", "GEMMA2")},
}


def family_faults(spec: ModelSpec, hf_config: Mapping[str, Any]) -> Iterator[str]:
    """What a recipe of torchtune's says of the family, if the folder's model is of another one."""
    named, found = spec.checkpointer.get("model_type"), hf_config.get("model_type")
    if _FAMILIES.get(str(named), found) != found:
        yield (
            f"checkpointer.model_type: {named} is not of the folder's {found} model; give the "
            "folder of the model that you mean, or leave model_type and model._component_ out"
        )


def layout_faults(module: Decoder, spec: ModelSpec) -> list[str]:
    """Return why a model from `empty` cannot be split, or use fp8, as `spec` says."""
    faults = facts(module, spec).faults()
    if spec.router_aux_loss_coef and not module.routers():
        faults.append(
            "router_aux_loss_coef: this model has no routers of experts that it applies to; leave "
            "it out"
        )
    faults += [*_freeze_faults(module, spec), *_saved_faults(module, spec.model)]
    faults += _new_token_faults(module, spec)
    if spec.packs and not module.packs:
        faults.append(
            "dataset.packed: in this model's linear attention a packed document would see those "
            "before it; set dataset.packed=False"
        )
    kind = None if module.adapter is None else module.adapter.declared
    if kind is not None and not kind.merges and not spec.save_adapter_weights_only:
        faults.append(
            f"save_adapter_weights_only: {kind.title} cannot be merged into the base weights; set "
            "save_adapter_weights_only=True"
        )
    return faults


def facts(module: Decoder, spec: ModelSpec) -> StepFacts:
    """What the rules of layouts and fp8 read of a model from `empty`."""
    rows = set(module.linear_layers(Role.ROW))
    linear = set()
    for name in module.linear_layers():
        outputs, inputs = nf4.dense_shape(module.get_submodule(name).weight)
        linear.add((inputs, outputs, name in rows))
    routed = [getattr(layer, experts.MATRICES[0]) for _, layer in experts.layers(module)]
    sizes = {"vocab_size": module.vocab_size, "max_seq_len": module.max_seq_len}
    return StepFacts(
        tensor_parallel=spec.tensor_parallel_dim,
        expert_parallel=spec.expert_parallel_dim,
        sizes=module.sizes() | sizes,
        unsplit=module.split_faults(),
        experts={len(matrix) for matrix in routed},
        linear=linear,
        quantised=bool(spec.model.get("quantize_base")),
        fp8=spec.fp8_recipe is not None,
    )


def frozen_by_name(module: Decoder, patterns: list[str]) -> dict[str, nn.Parameter]:
    """The parameters whose plain name is like one of the patterns, by that name."""
    return {
        name: parameter
        for name, parameter in weights.named_parameters(module)
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def _freeze_faults(module: Decoder, spec: ModelSpec) -> Iterator[str]:
    names = [name for name, _ in weights.named_parameters(module)]
    for pattern in spec.freeze or []:
        if not frozen_by_name(module, [pattern]):
            yield f"freeze: no parameter is called {pattern!r}{nearest(pattern, names)}"
    trained = {name for name in names if module.adapter is None or module.adapter.owns(name)}
    if spec.freeze and trained <= frozen_by_name(module, spec.freeze).keys():
        yield "freeze: nothing is left to train; leave out a pattern"


def _saved_faults(module: Decoder, block: dict[str, Any]) -> Iterator[str]:
    known = [_last(name) for name in module.tables]
    kind = None if module.adapter is None else module.adapter.declared
    if module.modules_to_save and kind is None:
        yield "model.modules_to_save: all weights are trained without an adapter; leave it out"
    elif (
        kind is not None and module.modules_to_save and module.is_tied and kind.peft_type != "LORA"
    ):
        yield (
            "model.modules_to_save: this model's output head is its embedding (tied), which PEFT "
            "knows for LoRA only; leave it out, or train all weights"
        )
    twice = set(module.modules_to_save) & set(block.get("lora_modules") or ())
    for name in sorted(twice):
        yield f"model.modules_to_save: {name} is in model.lora_modules, too; leave one out"
    for name in module.modules_to_save:
        if name not in known:
            tied = " (the output head is the embedding: tied)" * module.is_tied
            yield f"model.modules_to_save: {name} is none of {', '.join(known)}{tied}"


def _new_token_faults(module: Decoder, spec: ModelSpec) -> Iterator[str]:
    if not spec.tokenizer.get("new_tokens") or module.adapter is None:
        return
    kind, missing = module.adapter.declared, [_last(name) for name in module.tables]
    if not kind.merges:
        yield f"{tokens.KEY}: {kind.title} trains no embeddings; use LoRA, or train all weights"
    elif set(missing) - set(module.modules_to_save):
        yield (
            f"{tokens.KEY}: beside an adapter their rows would stay as they begin; set "
            f"model.modules_to_save=[{','.join(missing)}]"
        )


def _last(name: str) -> str:
    return name.rpartition(".")[2]
