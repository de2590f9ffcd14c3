"""PEFT's adapter_config.json: the rank and the scale of each layer's adapter, read and written.

The fields and the patterns of layer names are those of PEFT's LoraConfig (0.18).
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

# LoraConfig's own values for what a file leaves out.
DEFAULTS = {"r": 8, "lora_alpha": 8, "use_rslora": False, "use_dora": False}
PATTERNS = ("rank_pattern", "alpha_pattern")
# The function of a trained adapter does not depend on these: they say where its layers are, which
# its tensors say too, how it was initialised or trained, or where it comes from.
WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "target_parameters",
    "task_type",
}
# The values of other fields at which LoRA is what is computed here. Initialisations that are not
# listed, such as pissa, also change the base weights.
PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
REMEDY = (
    "merge it into its base with PEFT's merge_and_unload, and train from that folder "
    "(checkpointer.checkpoint_dir)"
)


def scaling(rank: int, alpha: float, use_rslora: bool) -> float:
    """What B A is multiplied by: alpha / r, or alpha / sqrt(r) (Kalajdzievski, 2312.03732)."""
    return alpha / (math.sqrt(rank) if use_rslora else rank)


class PeftConfig:
    """An adapter_config.json.

    Args:
        content: its fields; those that are missing have PEFT's defaults.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content
        self.rank, self.alpha, self.use_rslora, self.use_dora = (
            default if content.get(name) is None else content[name]
            for name, default in DEFAULTS.items()
        )

    def unsupported(self) -> Iterator[str]:
        """Yield field=value of each field that makes another function of the adapter than LoRA."""
        for name, value in self._content.items():
            known = name in WITHOUT_EFFECT or name in DEFAULTS or name in PATTERNS
            neutral = value in PLAIN[name] if name in PLAIN else not value
            if not known and value is not None and not neutral:
                yield f"{name}={value!r}"

    def scaling_of(self, module: str) -> float:
        """The factor of B A in a module, which has its name of transformers' class."""
        rank = int(self._of("rank_pattern", module, self.rank))
        alpha = float(self._of("alpha_pattern", module, self.alpha))
        return scaling(rank, alpha, bool(self.use_rslora))

    def _of(self, field: str, module: str, otherwise: Any) -> Any:
        # As PEFT's get_pattern_key: the first that matches the end of a module's name.
        patterns = self._content.get(field) or {}
        matching = (v for p, v in patterns.items() if re.match(rf"(.*\.)?({p})$", module))
        return next(matching, otherwise)


def fields(ranks: Mapping[str, int], rank: int, factor: float, use_rslora: bool) -> dict[str, Any]:
    """The fields that give each module its adapter's rank, and all the factor of B A.

    Args:
        ranks: by module, as transformers' class names it.
        rank: for modules that no pattern names.
    """
    other = {name.rpartition(".")[2]: own for name, own in ranks.items() if own != rank}

    def alpha(rank: int) -> float:
        # 12 digits: these two multiplied give back the alpha of the recipe.
        return float(f"{factor / scaling(rank, 1, use_rslora):.12g}")

    return {
        "r": rank,
        "lora_alpha": alpha(rank),
        "use_rslora": use_rslora,
        "rank_pattern": other,
        "alpha_pattern": {name: alpha(own) for name, own in other.items()},
    }
