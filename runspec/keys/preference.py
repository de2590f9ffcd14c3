"""The configs of `entry: dpo` and `entry: kto`, training on preferences."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from runspec.keys.key import setting
from runspec.keys.train import TrainConfig

# Losses that compare with no reference model.
REFERENCE_FREE = ("simpo", "orpo")


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(TrainConfig):
    """The keys that both methods share."""

    documents_per_sample: ClassVar[int] = 2
    has_reference: ClassVar[bool] = True

    beta: float = setting(
        "number", "Strength of the preference; the larger, the closer to the reference.", 0.1
    )

    @classmethod
    def reference_of(cls, config: Mapping[str, Any]) -> str:
        """As TrainConfig.reference_of, by the key `loss`."""
        return "" if config.get("loss") in REFERENCE_FREE else super().reference_of(config)


@dataclass(frozen=True, kw_only=True)
class DpoConfig(PreferenceConfig):
    """Preference tuning on pairs of a chosen and a rejected answer."""

    objective: ClassVar[str] = "trainer.methods.dpo.PreferenceTuning"
    goal: ClassVar[str] = "preference tuning"
    torchtune: ClassVar[str] = "dpo"
    pairs: ClassVar[str] = "trainer.data.preferences.PreferenceDataset"

    loss: str = setting(
        "dpo | ipo | simpo | orpo",
        "Loss of a pair. simpo and orpo need no reference model.",
        "dpo",
    )
    label_smoothing: float = setting(
        "rate", "Probability that chosen and rejected are swapped, below 0.5; dpo and simpo.", 0.0
    )
    length_normalized: bool = setting(
        "flag", "Use means over the tokens of an answer instead of sums; dpo.", False
    )
    simpo_gamma: float = setting("rate", "Margin that simpo demands.", 0.5)
    sft_weight: float = setting(
        "rate", "Weight of the chosen answer's mean negative log-likelihood in the loss.", 0.0
    )


@dataclass(frozen=True, kw_only=True)
class KtoConfig(PreferenceConfig):
    """Preference tuning on single answers, each labelled as desirable or not."""

    objective: ClassVar[str] = "trainer.methods.kto.UnpairedPreferenceTuning"
    pairs: ClassVar[str] = "trainer.data.preferences.UnpairedPreferenceDataset"

    desirable_weight: float = setting("rate", "Weight of desirable answers in the loss.", 1.0)
    undesirable_weight: float = setting("rate", "Weight of undesirable answers in the loss.", 1.0)
