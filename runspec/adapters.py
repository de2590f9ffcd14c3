"""Kinds of adapters: what each adds to a model, which sizing counts and the trainer makes.

`model.adapter` names a kind: one of `KINDS`, or the dotted path of a class of your own, a
trainer.model.AdapterKind, whose `declared = Adapter(...)` has literals only: it is
read here without an import, as the launcher never imports torch.
"""

import ast
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# What a parameter belongs to, then its sizes.
Sizes = tuple[str, ...]
# The usual rank, of configs/base.
USUAL_RANK = 16
# Virtual tokens of prompts and prefixes if a recipe names none.
VIRTUAL_TOKENS = 20
NUM_VIRTUAL = "num_virtual_tokens"


@dataclass(frozen=True)
class Adapter:
    """One kind of adapter."""

    # The method's name; over an NF4 base with a Q before it.
    title: str
    # By the end of a parameter's name, what it belongs to (each chosen "linear" layer, or each
    # "row" or "column" layer among them; each "block"; the "model") and its sizes: "in" and "out"
    # of the linear layer, "kv" (the width of all keys), "dim" (that of the stream), or a key of
    # the model block, such as lora_rank.
    parts: Mapping[str, Sizes]
    # What else each of these keeps of a token for the backward pass, in the same terms.
    saved: tuple[Sizes, ...] = ()
    # The backward pass needs the input of the linear layers that have it.
    reads_input: bool = True
    # The keys of the model block that it reads.
    keys: tuple[str, ...] = ()
    # Of those that are numbers, where the model block gives none.
    defaults: tuple[tuple[str, int], ...] = ()
    # Each document has as many positions more as it has virtual tokens.
    lengthens: bool = False
    # The base weights can hold it; if not, it is exported separately only.
    merges: bool = False
    # PEFT's name of it, in adapter_config.json.
    peft_type: str = ""
    # Of a kind of the kit's: its class, a dotted path.
    made_by: str = ""

    def parts_of(self, *owners: str) -> dict[str, Sizes]:
        """The sizes of the parameters that belong to one of `owners`, by name."""
        return {name: of[1:] for name, of in self.parts.items() if of[0] in owners}

    def saved_of(self, *owners: str) -> list[Sizes]:
        """What one of `owners` keeps of a token."""
        return [of[1:] for of in self.saved if of[0] in owners]

    def numbers(self, model: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
        """The whole numbers among the values that a model block gives its keys, or the defaults."""
        given = {key: model.get(key) for key in self.keys}
        numbers = {key: value for key, value in given.items() if type(value) is int}
        return (*(dict(self.defaults) | numbers).items(),)


LORA = Adapter(
    "LoRA",
    {
        "lora_a.weight": ("linear", "lora_rank", "in"),
        "lora_b.weight": ("linear", "out", "lora_rank"),
    },
    saved=(("linear", "lora_rank"),),
    keys=("lora_rank", "lora_alpha", "lora_dropout", "lora_modules", "use_rslora"),
    merges=True,
    peft_type="LORA",
    made_by="trainer.layers.adapters.lora.LoRA",
)
DORA = replace(
    LORA,
    title="DoRA",
    parts={**LORA.parts, "magnitude": ("linear", "out")},
    # The sum that the magnitude scales.
    saved=(*LORA.saved, ("linear", "out")),
    made_by="trainer.layers.adapters.lora.DoRA",
)
IA3 = Adapter(
    "(IA)3",
    # A layer that is split by rows scales its inputs, any other its outputs.
    {"ia3_out": ("column", "out"), "ia3_in": ("row", "in")},
    saved=(("column", "out"), ("row", "in")),
    reads_input=False,
    keys=("target_modules",),
    merges=True,
    peft_type="IA3",
    made_by="trainer.layers.adapters.ia3.IA3",
)
PROMPT = Adapter(
    "Prompt tuning",
    {"prompt_embeddings": ("model", NUM_VIRTUAL, "dim")},
    keys=(NUM_VIRTUAL, "prompt_init_text"),
    defaults=((NUM_VIRTUAL, VIRTUAL_TOKENS),),
    lengthens=True,
    peft_type="PROMPT_TUNING",
    made_by="trainer.layers.adapters.prompt.Prompt",
)
PREFIX = Adapter(
    "Prefix tuning",
    {
        "prefix_keys": ("block", NUM_VIRTUAL, "kv"),
        "prefix_values": ("block", NUM_VIRTUAL, "kv"),
    },
    # Keys and values of all tokens once more, behind those of the prefix.
    saved=(("block", "kv"), ("block", "kv")),
    keys=(NUM_VIRTUAL, "prompt_init_text"),
    defaults=((NUM_VIRTUAL, VIRTUAL_TOKENS),),
    peft_type="PREFIX_TUNING",
    made_by="trainer.layers.adapters.prefix.Prefix",
)
KINDS = {"lora": LORA, "dora": DORA, "ia3": IA3, "prompt": PROMPT, "prefix": PREFIX}


def name_of(model: Any) -> str | None:
    """Return the kind that a `model` block names; None if all weights are trained.

    None, too, of what is not a block, or not a name: its key's check says it.
    """
    name = model.get("adapter") if isinstance(model, Mapping) else None
    if not isinstance(model, Mapping) or not isinstance(name, str | None):
        return None
    return "lora" if name is None and model.get("lora_rank") else name


def ia3_targets(family: str) -> tuple[str, ...]:
    """The layers that have (IA)3 by default in a model of this model_type, as PEFT has them.

    Names are the last part of transformers'
    (peft.utils.constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING).
    """
    first = "q_proj" if family.startswith(("gemma", "llama4", "phi", "qwen")) else "k_proj"
    return (first, "v_proj", "down_proj")


def is_quantised(model: Mapping[str, Any]) -> bool:
    """Whether the base weights are kept in NF4."""
    return bool(model.get("quantize_base"))


def declared(dotted: str) -> Adapter:
    """Read what a class at a dotted path declares; its file is not imported.

    Raises:
        ValueError: there is no such class, or it declares nothing.
    """
    *parents, module, name = ["", *dotted.split(".")]
    places = [Path(folder, *parents) / module for folder in (str(Path.cwd()), *sys.path)]
    files = (file for place in places for file in (place / "__init__.py", Path(f"{place}.py")))
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise ValueError(
            f"model.adapter: there is no {dotted}; give one of {', '.join(KINDS)}, or the dotted "
            "path of a class in this folder, in PYTHONPATH, or installed"
        )
    tree = ast.parse(file.read_text(encoding="utf-8"))
    classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
    body = classes[0].body if classes else []
    values = (n.value for n in body if isinstance(n, ast.Assign | ast.AnnAssign))
    calls = (value for value in values if isinstance(value, ast.Call))
    call = next((c for c in calls if ast.unparse(c.func).endswith("Adapter")), None)
    if call is None:
        raise ValueError(f"model.adapter: {dotted} has no `declared = Adapter(...)`")
    try:
        named = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        return Adapter(*map(ast.literal_eval, call.args), **named)
    except (ValueError, TypeError) as error:
        raise ValueError(f"model.adapter: {dotted} declares no literals: {error}") from None
