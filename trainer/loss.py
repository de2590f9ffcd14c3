"""The loss as an exact sum over trained tokens, whichever component computes it."""

import torch
from torch import nn

from trainer import parallel
from trainer.config import TrainConfig, instantiate
from trainer.data import IGNORE_INDEX, MicroBatch
from trainer.errors import ConfigError

SUPPORTED = ("CrossEntropyLoss", "CEWithChunkedOutputLoss")


class TokenLoss:
    """Cross-entropy summed over the trained tokens of a micro-batch.

    The components return a mean over the micro-batch; the sum lets the caller divide by the
    tokens of all ranks and micro-steps, so that the gradient is the one of a single big batch.

    Raises:
        ConfigError: the component is no cross-entropy, or skips other labels than -100.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._component = instantiate("loss", config.loss)
        name = type(self._component).__name__
        if name not in SUPPORTED:
            raise ConfigError(f"loss: {name} is not supported; known: {', '.join(SUPPORTED)}")
        if getattr(self._component, "reduction", "mean") != "mean":
            raise ConfigError("loss.reduction: must be mean, the trainer divides by all tokens")
        if self._component.ignore_index != IGNORE_INDEX:
            raise ConfigError(f"loss.ignore_index: must be {IGNORE_INDEX}")
        # The model then gives its logits in so many parts; 0 means whole.
        self.output_chunks = getattr(self._component, "num_output_chunks", 0)

    def __call__(self, model: nn.Module, batch: MicroBatch, device: torch.device) -> torch.Tensor:
        """Summed loss, a scalar in fp32 with a graph behind it, also where nothing is trained.

        Logits that are split over the vocabulary need `vocabulary_split_loss` around this call
        and around the backward pass.
        """
        batch = batch.to(device)
        logits = model(batch.tokens, mask=batch.documents, input_pos=batch.positions)
        chunks = logits if isinstance(logits, list) else [logits]
        if batch.target_count == 0:
            # All ranks must run the same backward pass, and a mean over no token is NaN.
            return parallel.whole(sum(chunk.sum() for chunk in chunks)) * 0.0
        if isinstance(logits, list):
            mean = self._component(logits, batch.labels)
        else:
            mean = self._component(logits.flatten(0, 1), batch.labels.flatten())
        return parallel.whole(mean) * batch.target_count
