"""The config of `entry: pretrain`: every token of plain text is trained."""

from dataclasses import dataclass
from typing import ClassVar

from runspec.keys.key import changeable, setting
from runspec.keys.train import TrainConfig


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(TrainConfig):
    """Pre-training, continued or from scratch: cross-entropy over every token of plain text."""

    objective: ClassVar[str] = "trainer.methods.pretrain.Pretraining"
    streams: ClassVar[bool] = True

    from_scratch: bool = setting(
        "flag",
        "Begin with new weights, drawn by the seed as the model class of transformers does it; "
        "checkpointer.checkpoint_dir then needs no weights, only config.json.",
        False,
    )
    z_loss: float = changeable(
        "rate",
        "Weight of the squared logarithm of the softmax's sum, which keeps logits small: 1e-4.",
        0.0,
    )

    @property
    def reads_weights(self) -> bool:
        """See `TrainConfig.reads_weights`."""
        return not self.from_scratch
