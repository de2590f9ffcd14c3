"""The config of `entry: sft`, supervised fine-tuning."""

from dataclasses import dataclass
from typing import Any, ClassVar

from runspec.keys.key import setting
from runspec.keys.train import TrainConfig


@dataclass(frozen=True, kw_only=True)
class SftConfig(TrainConfig):
    """Supervised fine-tuning: cross-entropy over the tokens of the answers."""

    objective: ClassVar[str] = "trainer.methods.sft.SupervisedFineTuning"

    loss: dict[str, Any] = setting(
        "component",
        "A cross-entropy of torch or trainer.layers.loss; all logits never exist.",
        {"_component_": "torch.nn.CrossEntropyLoss"},
    )
