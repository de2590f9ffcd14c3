"""A training method with a teacher: the log-probabilities of another folder's model, imitated.

torchrun ... -m trainer.train tests.trainer.methods.toy_teacher:ImitationConfig <run>/train.yaml
"""

from dataclasses import dataclass
from typing import ClassVar

from runspec.keys.key import REQUIRED, setting
from runspec.keys.train import TrainConfig
from trainer.layers.batch import MicroBatch
from trainer.layers.log_probs import token_log_probs
from trainer.methods.base import LossSum, Models, Objective


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ImitationConfig(TrainConfig):
    """Keys of the method, and what the launcher knows of it."""

    objective: ClassVar[str] = "tests.trainer.methods.toy_teacher.Imitation"
    teacher_key: ClassVar[str] = "teacher_dir"

    teacher_dir: str = setting("text", "Folder of the teacher.", REQUIRED)


class Imitation(Objective):
    """The squared difference of the log-probabilities of each token."""

    config_class: ClassVar[type[TrainConfig]] = ImitationConfig

    def loss(self, models: Models, batch: MicroBatch) -> LossSum:
        batch = batch.to(self.world.device)
        with models.as_teacher() as teacher:
            wanted = token_log_probs(teacher, batch)
        own = token_log_probs(models.policy.module, batch)
        return LossSum((own - wanted).square().sum(), {"teacher_log_prob": wanted.sum()})
