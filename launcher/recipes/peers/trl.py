"""The keys of TRL's configs, and of the alignment handbook's, which are TRL's."""

from collections.abc import Callable
from typing import Any

from launcher.recipes.peers import data
from launcher.recipes.peers.table import (
    Answer,
    Draft,
    Peer,
    Refused,
    Row,
    Unused,
    names,
    off,
    only_for,
    rows,
)
from launcher.recipes.peers.trainer import (
    ARGUMENTS,
    DEFAULTS,
    FLASH,
    KERNELS,
    LOADING,
    LOGGING,
    TOKENIZER,
    four_bits,
    hub_model,
    modules,
)

_WAY = "start TRL itself with this file"
_LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "robust": "dpo"}
# Keys that only one of TRL's scripts has; the config does not name the script.
_SIGNS = (
    ("grpo", "num_generations reward_funcs reward_model_name_or_path num_generations_eval"),
    ("kto", "desirable_weight undesirable_weight"),
    ("reward", "center_rewards_coefficient"),
    ("dpo", "beta loss_type max_prompt_length precompute_ref_log_probs rpo_alpha"),
)
_RATES = {"dpo": 1e-6, "kto": 1e-6, "reward": 1e-4}
_COLUMNS = names("messages prompt chosen rejected completion label tools")
_OF_DATASET = names("id config split columns weight")


def _begin(draft: Draft) -> None:
    signs = (name for name, keys in _SIGNS if any(key in draft.given for key in keys.split()))
    name = draft.wanted or next(signs, "sft")
    draft.entry = "dpo" if name == "orpo" else name
    draft.method = "lora" if draft.get("use_peft") else "full"
    # Each script has a rate of its own, and max_seq_length is max_length's older name.
    draft.defaults = {**draft.defaults, "learning_rate": _RATES.get(draft.entry, 2e-5)}
    if draft.given.get("max_seq_length"):
        draft.defaults.pop("max_length")
    draft.put("entry", draft.entry)
    if name == "orpo":
        draft.put("loss", "orpo")


def _precision(draft: Draft, value: Any) -> Answer:
    """The weights' type; without one they are fp32, and bf16 is used for the products."""
    draft.put("dtype", "bf16" if draft.get("bf16") else "fp32")
    held = str(draft.get("torch_dtype") or draft.get("dtype"))
    if draft.get("bf16") and (held in ("None", "float32", "auto") or draft.method != "full"):
        draft.put("master_weights", "fp32")
    return None


def _weights(draft: Draft, value: Any) -> Answer:
    if value in ("bfloat16", "float32", "auto"):
        return f"master_weights={draft.values.get('master_weights')}"
    return Refused("weights are bf16 or fp32 here")


def _length(draft: Draft, value: Any) -> Answer:
    draft.put("tokenizer.max_seq_len", value)
    return None


def _mixture(draft: Draft, value: Any) -> Answer:
    """Parts of one dataset are joined; the last samples are for the validation."""
    listed = value.get("datasets") if isinstance(value, dict) else None
    blocks = [block for block in listed or [] if isinstance(block, dict)]
    if not blocks or {(each.get("id"), each.get("config")) for each in blocks} != {
        (blocks[0].get("id"), blocks[0].get("config"))
    }:
        return Refused(data.ONE_DATASET)
    if unknown := sorted({key for each in blocks for key in each} - _OF_DATASET):
        return Refused(f"{unknown[0]} of a dataset is not known here: leave it out, or {_WAY}")
    if unknown := sorted(set(value) - {"datasets", "test_split_size", "seed"}):
        return Refused(f"{unknown[0]} of dataset_mixture is not known here: {_WAY}")
    if unread := sorted({name for each in blocks for name in each.get("columns") or []} - _COLUMNS):
        return Refused(f"the column {unread[0]} is not read here: give --data FILE, or {_WAY}")
    parts = []
    for each in blocks:
        weight = each.get("weight", 1.0)
        parts.append(str(each.get("split") or "train") + _share(weight))
    _put(draft, str(blocks[0].get("id")), blocks[0].get("config"), "+".join(parts))
    size = value.get("test_split_size")
    return draft.held_out(size) if size else None


def _share(weight: float) -> str:
    return "" if weight >= 1 else f"[:{round(100 * weight)}%]"


def _mixer(draft: Draft, value: Any) -> Answer:
    """The handbook's older block: {NAME: share}, with dataset_splits for training and tests."""
    if not isinstance(value, dict) or len(value) != 1:
        return Refused(data.ONE_DATASET)
    ((name, weight),) = value.items()
    splits = draft.get("dataset_splits") or ["train"]
    train = [split for split in splits if "test" not in split]
    _put(draft, name, None, "+".join(f"{split}{_share(weight)}" for split in train))
    if tests := [split for split in splits if "test" in split]:
        draft.put("dataset_val", {"split": tests[0]})
    return None


def _named(draft: Draft, value: Any) -> Answer:
    """dataset_name with its configuration and splits."""
    split = str(draft.get("dataset_train_split") or "train")
    _put(draft, str(value), draft.get("dataset_config"), split)
    if draft.get("eval_strategy") not in (None, "no"):
        draft.put("dataset_val", {"split": draft.get("dataset_test_split") or "test"})
    return (
        ""
        if not data.form(draft).answers
        else "the column messages; another: dataset in the recipe"
    )


def _put(draft: Draft, name: str, config: Any, split: str) -> None:
    where = data.origin(draft, name, None, config, split)
    if data.form(draft).preferences:
        data.preferences(draft, where, {})
        return
    chat = {"conversation_column": "messages", "conversation_style": "openai"}
    only = draft.get("assistant_only_loss")
    data.put(draft, {"_component_": data.CHAT, **where, **chat, "train_on_input": not only})


def _loss(draft: Draft, value: Any) -> Answer:
    if data.form(draft).answers:
        return off("its loss is not here: leave it out", "nll", "chunked_nll")(draft, value)
    name = value[0] if isinstance(value, list) and len(value) == 1 else value
    if draft.values.get("loss") == "orpo" or data.form(draft).labelled:
        return Unused("the entry says it")
    if str(name) not in _LOSSES:
        return Refused(f"the loss {name} is not here: use one of {', '.join(_LOSSES)}")
    draft.put("loss", _LOSSES[name])
    if name == "robust":
        draft.put("robust", True)
    return None


def _peft(draft: Draft, value: Any) -> Answer:
    return "extends hub_lora" if value else Unused("every weight is trained: extends hub_full")


def _adapters(row: str | Callable[[Draft, Any], Answer]) -> Row:
    def inner(draft: Draft, value: Any) -> Answer:
        if draft.method == "full":
            return Unused("use_peft is not set, so there is no adapter")
        if callable(row):
            return row(draft, value)
        draft.put(row, value)
        return None

    return inner


def _tokens(draft: Draft, value: Any) -> Answer:
    return "the data are files: dataset.train_on_input=false" if value else Unused("off")


def _end(draft: Draft) -> None:
    data.pack(draft, draft.get("packing"))
    if draft.method != "full" and not draft.get("lora_target_modules"):
        # PEFT's own default, for the families of these examples.
        draft.put("model.lora_modules", ["q_proj", "v_proj"])


_ENTRY = off(f"keys of GRPO are not converted: write a recipe of entry: grpo, or {_WAY}")

TABLE: dict[str, Row] = {
    **ARGUMENTS,
    "model_name_or_path": hub_model,
    "model_revision": lambda draft, value: (
        f"in {draft.get('model_name_or_path')}" if value != "main" else Unused("the newest")
    ),
    "bf16": _precision,
    "torch_dtype": _weights,
    "dtype": _weights,
    "use_peft": _peft,
    "load_in_4bit": _adapters(four_bits),
    "load_in_8bit": Unused("the base is held in bf16; in 4 bits: model.quantize_base: true"),
    "lora_r": _adapters("model.lora_rank"),
    "lora_alpha": _adapters("model.lora_alpha"),
    "lora_dropout": _adapters("model.lora_dropout"),
    "lora_target_modules": _adapters(modules),
    "lora_modules_to_save": _adapters("model.modules_to_save"),
    "use_rslora": _adapters("model.use_rslora"),
    "use_dora": _adapters("model.use_dora"),
    "lora_task_type": Unused("the entry says it"),
    "bnb_4bit_quant_type": off("only NF4 is here", "nf4"),
    "use_bnb_nested_quant": Unused("the scales of NF4 are quantised, too, where it helps"),
    "dataset_name": _named,
    "dataset_config": lambda draft, value: "dataset.name" if value else Unused("there is none"),
    "dataset_train_split": lambda draft, value: "dataset.split",
    "dataset_test_split": lambda draft, value: "dataset_val.split",
    "dataset_mixture": _mixture,
    "dataset_mixer": _mixer,
    "dataset_splits": lambda draft, value: "dataset.split and dataset_val.split",
    "datasets": off(data.ONE_DATASET),
    "dataset_text_field": Unused(
        "name it in the recipe: dataset.column of text_completion_dataset"
    ),
    "dataset_streaming": off("give the files to entry: pretrain as dataset.sources"),
    "max_length": _length,
    "max_seq_length": _length,
    "max_prompt_length": Unused("a pair longer than max_seq_len is truncated at its end"),
    "max_completion_length": _ENTRY,
    "packing": lambda draft, value: "dataset.packed=" + ("true" if value else "false"),
    "eval_packing": Unused("dataset_val is as dataset"),
    "packing_strategy": off("whole samples are packed", "bfd", "ffd", "bfd_split"),
    "padding_free": Unused("packed rows have no padding"),
    "assistant_only_loss": lambda draft, value: "dataset.train_on_input",
    "completion_only_loss": _tokens,
    "chat_template": "tokenizer.chat_template",
    "chat_template_path": lambda draft, value: draft.put(
        "tokenizer.chat_template", data.file(draft, value)
    ),
    "eos_token": TOKENIZER,
    "pad_token": Unused("padding is neither attended to nor trained"),
    "beta": only_for("dpo kto", "beta"),
    "loss_type": _loss,
    "label_smoothing": only_for("dpo", "label_smoothing"),
    "rpo_alpha": only_for("dpo", "sft_weight"),
    "desirable_weight": only_for("kto", "desirable_weight"),
    "undesirable_weight": only_for("kto", "undesirable_weight"),
    "center_rewards_coefficient": only_for("reward", "center_rewards_coefficient"),
    "precompute_ref_log_probs": lambda draft, value: (
        draft.put("reference", "log_probs") if value else Unused("it is switched off")
    ),
    "num_labels": off("a reward model has one score", 1),
    "ref_model_name_or_path": off("the reference is the model itself before training"),
    "activation_offloading": lambda draft, value: (
        draft.put("enable_activation_offloading", True) if value else Unused("off")
    ),
    "router_aux_loss_coef": "router_aux_loss_coef",
    **rows(
        off(f"its method is not in this kit: {_WAY}"),
        "sync_ref_model use_weighting f_divergence_type loss_weights ld_alpha reference_free "
        "discopo_tau ref_model_mixup_alpha ref_model_sync_steps base_model_attribute_name",
    ),
    **rows(_ENTRY, "num_generations reward_funcs use_vllm temperature top_p top_k epsilon"),
    **rows(_ENTRY, "num_iterations scale_rewards vllm_mode reward_weights generation_batch_size"),
    **rows(FLASH, "attn_implementation"),
    **rows(KERNELS, "use_liger_loss use_liger use_unsloth"),
    **rows(
        LOADING,
        "dataset_num_proc preprocessing_num_workers dataset_kwargs pad_to_multiple_of model_code "
        "trust_remote_code disable_dropout dataset_batch_size truncation_mode "
        "precompute_ref_batch_size use_logits_to_keep",
    ),
    **rows(LOGGING, "generate_during_eval log_completions benchmarks callbacks hub_model_revision"),
    **rows(LOGGING, "num_completions_to_print wandb_project wandb_entity wandb_run_group"),
}

TRL = Peer(
    name="TRL",
    prefix="trl:",
    table=TABLE,
    begin=_begin,
    end=_end,
    data=names(
        "dataset_name dataset_config dataset_train_split dataset_test_split dataset_mixture "
        "dataset_mixer dataset_splits datasets dataset_text_field"
    ),
    model=frozenset({"model_name_or_path", "model_revision"}),
    defaults={
        **DEFAULTS,
        "gradient_checkpointing": True,
        "max_length": 1024,
        "bf16": True,
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "beta": 0.1,
    },
)
