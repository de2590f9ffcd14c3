"""The training methods of the kit's trainer: the config of each, by the name of its entry.

trainer.train starts a method by its name.
"""

from plugins.rl.recipe_keys import GrpoConfig
from runspec.keys.distill import DistillConfig
from runspec.keys.preference import DpoConfig, KtoConfig
from runspec.keys.pretrain import PretrainConfig
from runspec.keys.reward import RewardConfig
from runspec.keys.sft import SftConfig
from runspec.keys.train import TrainConfig

METHODS: dict[str, type[TrainConfig]] = {
    "sft": SftConfig,
    "dpo": DpoConfig,
    "kto": KtoConfig,
    "distill": DistillConfig,
    "pretrain": PretrainConfig,
    "reward": RewardConfig,
    "grpo": GrpoConfig,
}
