"""torchtune's language: its keys, builders, recipes and configs are read, and it is not imported.

The kit's trainer has one spelling of each thing. A model builder means the model in the recipe's
folder, with the adapter that the builder adds; a tokenizer means that of the folder.
"""

import ast
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from launcher.errors import RecipeFault
from launcher.venv import packages, site_packages
from runspec.keys.model import FOLDERS_TOKENIZER

# What the method sft does in the place of these recipes, for the models that it builds.
_OURS = re.compile(r"(full|lora)_finetune_(single_device|distributed)")
_TEXT_MODELS = re.compile(r"(code_)?llama2|llama3(_[123])?|gemma2|mistral|phi[34]|qwen2(_5)?")
# Keys that only some of its scripts read, and what these have in their names.
_OTHERS = {
    "ref_checkpointer": "full_dpo",
    "kd_loss": "knowledge_distillation",
    "quantizer": "qat",
    "policy_model": "ppo",
    "tasks": "eval",
}


# The kit's key, and torchtune's for the same: whichever is given last counts.
SPELLINGS = {
    "activation_checkpointing": ("enable_activation_checkpointing", "ac_mode", "ac_option"),
    "fsdp_cpu_offload": ("fsdp",),
}
# Its keys of LoRA, which `normalised_model` reads.
_OF_BUILDERS = ("lora_attn_modules", "apply_lora_to_mlp", "apply_lora_to_output", "use_dora")
KEYS = frozenset(
    (
        "fsdp.cpu_offload",
        *chain.from_iterable(SPELLINGS.values()),
        *(f"model.{key}" for key in _OF_BUILDERS),
    )
)
# The kit's component, and torchtune's names of the same.
_COMPONENTS = {
    "trainer.layers.loss.LinearCrossEntropy": (
        "torchtune.modules.loss.CEWithChunkedOutputLoss",
        "torchtune.modules.loss.LinearCrossEntropyLoss",
        "torchtune.modules.loss.cross_entropy_loss.LinearCrossEntropyLoss",
    ),
    "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup": (
        "torchtune.training.get_cosine_schedule_with_warmup",
    ),
}


def replace_older(config: dict[str, Any], key: str) -> None:
    """Remove other spellings of what a key says, which is about to be set."""
    key = key.partition(".")[0]
    for ours, theirs in SPELLINGS.items():
        for other in theirs if key == ours else [ours] if key in theirs else []:
            config.pop(other, None)


def normalise(config: dict[str, Any]) -> None:
    """Put the kit's spelling in the place of torchtune's into a recipe of the kit's trainer.

    A value that torchtune's keys cannot have stays as it is: the check of the kit's key names it.
    """
    block = config.get("fsdp")
    if isinstance(block, dict) and block.keys() <= {"cpu_offload"}:
        del config["fsdp"]
        _take(config, "fsdp_cpu_offload", block.get("cpu_offload"))
    flag, mode, option = (config.pop(k, None) for k in SPELLINGS["activation_checkpointing"])
    if mode is None:
        mode = {"True": "full", "False": "none"}.get(str(flag), flag)
    if option is not None and mode in (None, "selective"):
        mode = int(option) if str(option).isdigit() else option
    _take(config, "activation_checkpointing", mode)
    if isinstance(config.get("model"), dict):
        built = _BUILDER.fullmatch(str(config["model"].get("_component_") or ""))
        config["model"] = normalised_model(config["model"])
        if built and isinstance(block := config.get("checkpointer"), dict):
            _take(block, "model_type", _MODEL_TYPES.get(built[1].partition("_")[0]))
    if isinstance(block := config.get("tokenizer"), dict):
        config["tokenizer"] = _normalised_tokenizer(block)
    for block in config.values():
        named = block.get("_component_") if isinstance(block, dict) else None
        for ours in (key for key, theirs in _COMPONENTS.items() if named in theirs):
            block["_component_"] = ours


# torchtune.models.FAMILY.BUILDER; a builder of a base in 4 bits is that of LoRA with a key.
_BUILDER = re.compile(r"torchtune\.models\.(\w+)\.(?:_\w+\.)?(q?lora_)?\w+")
_TOKENIZER = re.compile(r"torchtune\.models\.(\w+)\.(?:_\w+\.)?\w*tokenizer")
# torchtune's names of the families, which are compared with config.json.
_MODEL_TYPES = {
    "llama2": "LLAMA2",
    "llama3": "LLAMA3",
    "mistral": "MISTRAL",
    "qwen2": "QWEN2",
    "gemma2": "GEMMA2",
    "phi3": "PHI3_MINI",
    "phi4": "PHI4",
}
# What a builder of LoRA has if a recipe gives no values.
_OF_LORA = {"lora_rank": 8, "lora_alpha": 16}
# transformers' names of torchtune's layers.
_LAYERS = {"output_proj": "o_proj", "output": "lm_head", "tok_embeddings": "embed_tokens"}
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
# Phi's layers hold several of these.
_OF_PHI = dict.fromkeys(_ATTENTION[:3], "qkv_proj") | dict.fromkeys(_MLP[:2], "gate_up_proj")


def normalised_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `model` block without torchtune's builder: the model is that of the folder."""
    model = dict(model)
    built = _BUILDER.fullmatch(str(model.get("_component_") or ""))
    family, prefix = built.groups() if built else ("", None)
    if built:
        del model["_component_"]
    if prefix:
        for key, value in _OF_LORA.items():
            _take(model, key, value)
    if prefix == "qlora_":
        _take(model, "quantize_base", True)
    attention, mlp, output, dora = (model.pop(key, None) for key in _OF_BUILDERS)
    if dora and model.get("adapter") in (None, "lora"):
        model["adapter"] = "dora"
    if isinstance(saved := model.get("modules_to_save"), list):
        model["modules_to_save"] = [_LAYERS.get(str(name), name) for name in saved]
    if attention is None and not (mlp or output):
        return model
    if not isinstance(attention or [], list):
        return model | {"lora_modules": attention}
    wanted = [_LAYERS.get(str(name), name) for name in attention or []]
    wanted += [*(_MLP if mlp else ()), *(["lm_head"] if output else ())]
    # All layers of the blocks are the kit's default.
    if {*wanted} != {*_ATTENTION, *_MLP}:
        here = _OF_PHI if family.startswith("phi") else {}
        _take(model, "lora_modules", [*dict.fromkeys(here.get(name, name) for name in wanted)])
    return model


def _turns(question: str, system: str) -> str:
    """A chat template: `question` around each of the user's messages, `system` where one is."""
    return (
        "{% for message in messages %}"
        "{% if loop.first or loop.previtem.role == 'assistant' %}{{ bos_token }}{% endif %}"
        f"{{% if message.role == 'system' %}}{system}"
        f"{{% elif message.role == 'user' %}}{question}"
        "{% else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )


# The texts of torchtune's tokenizers (torchtune.models.FAMILY) for families whose folders have no
# chat template, or one that refuses what torchtune takes. All others have the folder's.
_LLAMA2 = _turns(
    "[INST] {% if messages[0].role == 'system' %}<<SYS>>\n{{ messages[0].content }}\n<</SYS>>\n\n"
    "{% endif %}{{ message.content }} [/INST] ",
    "",
)
_TEMPLATES = {
    "llama2": _LLAMA2,
    "code_llama2": _LLAMA2,
    "mistral": _turns(
        "[INST] {{ message.content }} [/INST] ",
        "{{ raise_exception('System prompts are not supported') }}",
    ),
    **dict.fromkeys(("gemma", "gemma2"), _turns("{{ message.content }}", "{{ message.content }}")),
}


def _normalised_tokenizer(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block of the folder's tokenizer in the place of one of torchtune's.

    Its `prompt_template` stays, as an argument that the check of components refuses.
    """
    named = _TOKENIZER.fullmatch(str(block.get("_component_") or ""))
    if not named:
        return dict(block)
    kept = ("max_seq_len", "prompt_template", "chat_template", "chat_template_kwargs", "new_tokens")
    made: dict[str, Any] = dict(FOLDERS_TOKENIZER)
    if path := block.get("path"):
        folder = PurePosixPath(str(path)).parent
        # Meta's file is in a folder of its own.
        made["path"] = str(folder.parent if folder.name == "original" else folder)
    made |= {key: block[key] for key in kept if block.get(key) is not None}
    _take(made, "chat_template", _TEMPLATES.get(named[1]))
    return made


def _take(config: dict[str, Any], key: str, value: Any) -> None:
    if value is not None and config.get(key) is None:
        config[key] = value


class Stock(NamedTuple):
    """A training script of torchtune's, and the configs that are written for it."""

    path: Path
    distributed: bool
    configs: tuple[str, ...]


@cache
def recipes() -> dict[str, Stock]:
    """Return torchtune's recipes by the names that `tune ls` prints; {} without torchtune."""
    packages = site_packages()
    registry = packages / "torchtune" / "_recipe_registry.py" if packages else None
    if packages is None or registry is None or not registry.is_file():
        return {}
    by_name = {}
    for call in ast.walk(ast.parse(registry.read_text(encoding="utf-8"))):
        if not (isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Recipe"):
            continue
        given = {word.arg: word.value for word in call.keywords}
        configs = [
            ast.literal_eval(word.value)
            for config in getattr(given["configs"], "elts", [])
            for word in config.keywords
            if word.arg == "file_path"
        ]
        name, file = (ast.literal_eval(given[key]) for key in ("name", "file_path"))
        distributed = ast.literal_eval(given["supports_distributed"])
        by_name[name] = Stock(packages / "recipes" / file, distributed, tuple(configs))
    return by_name


def configs() -> dict[str, Path]:
    """Return torchtune's own config files by the names that `tune ls` prints."""
    folder = _config_folder()
    files = sorted(folder.rglob("*.yaml")) if folder else []
    return {str(path.relative_to(folder).with_suffix("")): path for path in files if folder}


def config_name(path: Path) -> str | None:
    """Return torchtune's name of one of its own config files, None for any other file.

    The file may be given by a link or by a path with `..`.
    """
    folder = _config_folder()
    for root in (folder, folder.resolve()) if folder else ():
        # A package's files may be links themselves, into the cache of an installer.
        for file in (path.resolve(), Path(os.path.normpath(path))):
            if file.is_relative_to(root):
                return str(file.relative_to(root).with_suffix(""))
    return None


def _config_folder() -> Path | None:
    packages = site_packages()
    return packages / "recipes" / "configs" if packages else None


def entry_of(path: Path, config: Mapping[str, Any], own_method: Callable[[str], str]) -> str | None:
    """Return the entry of one of torchtune's configs or of a copy, None for any other file.

    What sft does too is its; preference tuning, distillation, quantisation, images and the
    like are torchtune's own script's: the one that lists the file, or that the file's header runs,
    as in a copy that `tune cp` made.

    Args:
        own_method: the kit's method for the purpose of a script, such as entries.like_torchtune.

    Raises:
        RecipeFault: the installed torchtune has no such script, or a copy does not name it.
    """
    relative = f"{config_name(path)}.yaml"
    listed = [name for name, each in recipes().items() if relative in each.configs]
    # A header may show before how a teacher is trained.
    shown = re.findall(r"tune run .*?([a-z0-9_/]+) --config", path.read_text(encoding="utf-8"))
    name = next(iter([*listed, *reversed(shown)]), "")
    if name not in recipes():
        marks = [mark for key, mark in _OTHERS.items() if config.get(key) is not None]
        marks += ["lora_dpo"] if "DPO" in _component(config, "loss") else []
        if name or marks:
            raise RecipeFault(_lost(path, name, marks, own_method))
        return None
    family = _component(config, "model").removeprefix("torchtune.models.").partition(".")[0]
    # --model puts one of transformers' models in its place.
    known = family == "transformers" or _TEXT_MODELS.fullmatch(family) or not _has_models(family)
    is_ours = _OURS.fullmatch(name) and known
    return "sft" if is_ours else f"torchtune:{name}"


def _component(config: Mapping[str, Any], key: str) -> str:
    block = config.get(key)
    return str(block.get("_component_") or "") if isinstance(block, Mapping) else ""


def _has_models(family: str) -> bool:
    """Whether torchtune has models of a family; those of later versions need --model here."""
    folder = site_packages()
    return folder is None or (folder / "torchtune" / "models" / family).is_dir()


def _lost(path: Path, name: str, marks: Sequence[str], own_method: Callable[[str], str]) -> str:
    """Say how a config is started whose script is missing or not named."""
    mark = next((each for each in _OTHERS.values() if each in name), name) or marks[0]
    fitting = [f"entry=torchtune:{each}" for each in recipes() if mark in each]
    here = f"torchtune {packages().get('torchtune', '')}".strip()
    what = f"is of {name}, which {here} does not have" if name else f"has the keys of {mark}"
    ways = [f"add {' or '.join(fitting)} to start torchtune's own script"] if fitting else []
    ways += [f"the kit's own method is entry: {own}"] if (own := own_method(mark)) else []
    return f"{path} {what}: {'; '.join(ways) or 'tune ls shows what it has'}"
