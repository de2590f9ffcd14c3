"""The config of `entry: distill`: a student learns the distributions of a teacher."""

from dataclasses import dataclass
from typing import ClassVar

from runspec.keys.key import REQUIRED, setting
from runspec.keys.train import TrainConfig


@dataclass(frozen=True, kw_only=True)
class DistillConfig(TrainConfig):
    """Distillation: for each token of the answers, the teacher's distribution is the target."""

    objective: ClassVar[str] = "trainer.methods.distill.Distillation"
    torchtune: ClassVar[str] = "knowledge_distillation"
    teacher_key: ClassVar[str] = "teacher"
    reads_teacher_logits: ClassVar[bool] = True

    teacher: str = setting(
        "text",
        "Folder of the teacher, a model of the Hub with the student's tokenizer. It may be larger, "
        "and of another family.",
        REQUIRED,
    )
    teacher_quantize_base: bool = setting(
        "flag",
        "Store the teacher's linear layers in 4 bits (NF4), as model.quantize_base does for the "
        "base of QLoRA.",
        False,
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

    @property
    def quantizes_teacher(self) -> bool:
        """As TrainConfig.quantizes_teacher."""
        return self.teacher_quantize_base
