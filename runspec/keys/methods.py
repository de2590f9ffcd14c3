"""The training methods of the kit's trainer: the config of each, by the name of its entry."""

from importlib import import_module

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
}


def config_class(name: str) -> type[TrainConfig]:
    """Return the config of a method: of the trainer by its name, of others as MODULE:CLASS.

    Raises:
        LookupError: there is none; the message says why.
    """
    module, colon, attribute = name.partition(":")
    if not colon and name in METHODS:
        return METHODS[name]
    try:
        found = getattr(import_module(module), attribute) if colon else None
    except (ImportError, AttributeError, ValueError) as error:
        raise LookupError(f"there is no method {name}: {error}") from None
    if isinstance(found, type) and issubclass(found, TrainConfig):
        return found
    known = ", ".join(METHODS)
    raise LookupError(f"there is no method {name}: give {known}, or MODULE:CLASS of a TrainConfig")
