"""The config of `entry: distill`: a student learns the distributions of a teacher."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from runspec.keys.key import REQUIRED, setting
from runspec.keys.train import TrainConfig
from runspec.step import kept_bytes

# What a token of a teacher's pass should take at most.
MAX_KEPT_BYTES = 300


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
    teacher_log_probs: str = setting(
        "online | kept",
        "online: the teacher runs in each step. kept: the log-probabilities that entry: teach "
        "wrote are read, and no teacher is held in memory; beta must be 0.",
        "online",
    )
    teacher_top_k: int = setting(
        "positive",
        "Log-probabilities that entry: teach stores for each trained token, 8 bytes each. "
        "The total probability of all other tokens takes 4 more.",
        32,
    )

    @classmethod
    def teacher_of(cls, config: Mapping[str, Any]) -> str:
        """As TrainConfig.teacher_of; a teacher whose log-probabilities are kept does not run."""
        return "" if config.get("teacher_log_probs") == "kept" else super().teacher_of(config)

    @property
    def quantizes_teacher(self) -> bool:
        """As TrainConfig.quantizes_teacher."""
        return self.teacher_quantize_base

    @property
    def kept_top_k(self) -> int:
        """As TrainConfig.kept_top_k."""
        return self.teacher_top_k if self.teacher_log_probs == "kept" else 0


@dataclass(frozen=True, kw_only=True)
class TeachConfig(DistillConfig):
    """`entry: teach` reads the recipe of a distillation, whose teacher it runs once."""

    objective: ClassVar[str] = "trainer.methods.teach.Teaching"
    runs_teacher_only: ClassVar[bool] = True

    @classmethod
    def teacher_of(cls, config: Mapping[str, Any]) -> str:
        """As TrainConfig.teacher_of; here it runs, whatever the distillation reads."""
        return str(config.get(cls.teacher_key) or "")

    @property
    def kept_top_k(self) -> int:
        """As TrainConfig.kept_top_k; nothing is read."""
        return 0

    @classmethod
    def key_notes(cls, config: Mapping[str, Any]) -> Iterator[str]:
        """As TrainConfig.key_notes, and of a large k."""
        yield from super().key_notes(config)
        k = config.get("teacher_top_k")
        if isinstance(k, int) and kept_bytes(k) > MAX_KEPT_BYTES:
            largest = next(n for n in range(k, 0, -1) if kept_bytes(n) <= MAX_KEPT_BYTES)
            yield (
                f"teacher_top_k: {k} keeps {kept_bytes(k):,} bytes for each trained token, "
                f"{kept_bytes(k) / 1000:.2f} GB for a million; up to {largest} it is at most "
                f"{MAX_KEPT_BYTES}, and the pass prints how large the error is"
            )
