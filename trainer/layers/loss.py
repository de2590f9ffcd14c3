"""The loss that a config names, as an exact sum over trained tokens, without logits of all."""

import torch

from runspec.keys.sft import SftConfig
from trainer.config import instantiate
from trainer.errors import ConfigError
from trainer.layers.batch import IGNORE_INDEX, MicroBatch
from trainer.layers.head import Factors, through_head
from trainer.layers.log_probs import linear_cross_entropy
from trainer.model import Decoder

SUPPORTED = ("CrossEntropyLoss", "LinearCrossEntropy")


class LinearCrossEntropy:
    """Cross-entropy computed together with the output head; see `log_probs.linear_cross_entropy`.

    Args:
        num_output_chunks: in how many chunks tokens go through the output head; None chooses.
        ignore_index: label of the positions that are not trained.
    """

    def __init__(
        self, num_output_chunks: int | None = None, ignore_index: int = IGNORE_INDEX
    ) -> None:
        if num_output_chunks is not None and num_output_chunks < 1:
            raise ValueError("num_output_chunks must be a whole number from 1 on")
        self.num_output_chunks, self.ignore_index = num_output_chunks, ignore_index


class TokenLoss:
    """Cross-entropy summed over the trained tokens of a micro-batch.

    Whatever component the config names, only trained positions enter the output head, in chunks.
    The components return a mean over the micro-batch; the sum lets the caller divide by the
    tokens of all ranks and micro-steps, so that the gradient is the one of a single big batch.

    Raises:
        ConfigError: the component is no cross-entropy, or ignores other labels than -100.
    """

    def __init__(self, config: SftConfig) -> None:
        component = instantiate("loss", config.loss)
        name = type(component).__name__
        if name not in SUPPORTED:
            raise ConfigError(f"loss: {name} is not supported; known: {', '.join(SUPPORTED)}")
        if getattr(component, "reduction", "mean") != "mean":
            raise ConfigError("loss.reduction: must be mean, the trainer divides by all tokens")
        if component.ignore_index != IGNORE_INDEX:
            raise ConfigError(f"loss.ignore_index: must be {IGNORE_INDEX}")
        self._chunks: int | None = getattr(component, "num_output_chunks", None)
        self._smoothing: float = getattr(component, "label_smoothing", 0.0)

    def __call__(self, model: Decoder, batch: MicroBatch, device: torch.device) -> torch.Tensor:
        """Summed loss, a scalar in fp32 with a graph behind it, also if no token is trained."""
        batch = batch.to(device)

        def of_logits(made_of: Factors) -> torch.Tensor:
            made_of = made_of._replace(chunks=self._chunks)
            return linear_cross_entropy(made_of, batch.targets, self._smoothing)

        return through_head(model, batch, of_logits)
