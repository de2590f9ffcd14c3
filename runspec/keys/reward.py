"""The config of `entry: reward`, training a reward model on pairs of answers."""

from dataclasses import dataclass
from typing import ClassVar

from runspec.keys.key import setting
from runspec.keys.preference import DpoConfig
from runspec.keys.train import TrainConfig


@dataclass(frozen=True, kw_only=True)
class RewardConfig(TrainConfig):
    """A reward model: a score for each answer, higher for the chosen one of a pair."""

    objective: ClassVar[str] = "trainer.methods.reward.RewardModelling"
    documents_per_sample: ClassVar[int] = 2
    has_score_head: ClassVar[bool] = True
    pairs: ClassVar[str] = DpoConfig.pairs

    center_rewards_coefficient: float = setting(
        "rate",
        "Weight of the squared sum of a pair's rewards in the loss, which keeps their mean near 0; "
        "0.01 is advised (arXiv 2312.09244).",
        0.0,
    )
