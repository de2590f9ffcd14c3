"""The config of `entry: distill`: a student learns the distributions of a teacher."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from runspec.keys.key import REQUIRED, setting
from runspec.keys.train import TrainConfig


@dataclass(frozen=True, kw_only=True, init=False, eq=False, repr=False)
class DistillConfig(TrainConfig):
    """Distillation: for each token of the answers, the teacher's distribution is the target."""

    objective: ClassVar[str] = "trainer.objectives.distill.Distillation"
    fused_loss: ClassVar[bool] = True
    teacher_key: ClassVar[str] = "teacher"
    reads_teacher_logits: ClassVar[bool] = True

    teacher: str = setting(
        "text",
        "Folder of the teacher, a model of the Hub with the student's tokenizer. It may be larger, "
        "and of another family.",
        REQUIRED,
    )
    beta: float = setting(
        "rate",
        "Divergence of teacher and student: 0 is the forward KL, 1 the reverse, between them the "
        "generalised Jensen-Shannon divergence.",
        0.0,
    )
    temperature: float = setting(
        "number",
        "Both models' logits are divided by it, and the divergence is multiplied by its square.",
        1.0,
    )
    cross_entropy_share: float = setting(
        "rate", "Share of the cross-entropy with the data in the loss, from 0 to 1.", 0.5
    )
    teacher_log_probs: str = setting(
        "online | kept",
        "online: the teacher runs in each step. kept: the log-probabilities that entry: teach "
        "wrote are read, and no teacher is held in memory; beta must be 0.",
        "online",
    )
    teacher_top_k: int = setting(
        "positive",
        "Tokens whose log-probabilities entry: teach keeps for each trained token, beside the mass "
        "of all others: 8 bytes each, and 4.",
        32,
    )

    @classmethod
    def teacher_of(cls, config: Mapping[str, Any]) -> str:
        """As TrainConfig.teacher_of; a teacher whose log-probabilities are kept does not run."""
        return "" if config.get("teacher_log_probs") == "kept" else super().teacher_of(config)

    @property
    def kept_top_k(self) -> int:
        """As TrainConfig.kept_top_k."""
        return self.teacher_top_k if self.teacher_log_probs == "kept" else 0


@dataclass(frozen=True, kw_only=True, init=False, eq=False, repr=False)
class TeachConfig(DistillConfig):
    """`entry: teach` reads the recipe of a distillation, whose teacher it runs once."""

    objective: ClassVar[str] = "trainer.objectives.teach.Teaching"
