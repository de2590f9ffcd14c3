"""The loss as an exact sum over trained tokens, with or without logits of the whole batch."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from runspec.keys.sft import SftConfig
from runspec.step import loss_tokens
from trainer.config import instantiate
from trainer.errors import ConfigError
from trainer.layers.batch import IGNORE_INDEX, MicroBatch
from trainer.layers.log_probs import factors, head_faults, linear_cross_entropy, own_columns
from trainer.models.decoder import Decoder
from trainer.parallel.sharded import full_tensor, local

SUPPORTED = ("CrossEntropyLoss", "CEWithChunkedOutputLoss", "LinearCrossEntropy")
# torchtune's configs name it so after its last release, which has no such class yet.
LATER_NAMES = (
    "torchtune.modules.loss.LinearCrossEntropyLoss",
    "torchtune.modules.loss.cross_entropy_loss.LinearCrossEntropyLoss",
)

# Times the model's width: its head costs about as much as a block's linear layers.
SMALL_VOCABULARY = 4


class LinearCrossEntropy:
    """Cross-entropy computed together with the output head; see `log_probs.linear_cross_entropy`.

    Only trained positions enter the output head.

    Args:
        num_output_chunks: in how many chunks tokens go through the output head; None chooses.
        ignore_index: label of the positions that are not trained.
    """

    def __init__(
        self, num_output_chunks: int | None = None, ignore_index: int = IGNORE_INDEX
    ) -> None:
        if num_output_chunks is not None and num_output_chunks < 1:
            raise ValueError("num_output_chunks must be a whole number from 1 on")
        self._chunks = num_output_chunks
        self.ignore_index = ignore_index
        self.compiled = False

    def __call__(self, model: nn.Module, hidden: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Summed loss, a scalar in fp32, of the last block's output [batch, sequence, dim]."""
        return linear_cross_entropy(
            factors(model, hidden, batch.trained),
            batch.labels.flatten().index_select(0, batch.trained),
            chunks=self._chunks,
            compile_chunks=self.compiled,
        )

    def fits_graph(self, model: Decoder, batch: MicroBatch) -> bool:
        """Whether the logits of all positions are as few as one chunk's, and soon computed."""
        tokens, (vocabulary, dim) = batch.labels.numel(), model.embedding.weight.shape
        chunk = loss_tokens(tokens, vocabulary, dim, self._chunks)
        return tokens <= chunk and vocabulary <= SMALL_VOCABULARY * dim


def _of_all_positions(model: Decoder, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The same as LinearCrossEntropy in operators that the compiler fuses.

    Positions that are not trained are masked: their number would be another in each batch.
    """
    (logits,) = model.unembed(hidden)
    logits, labels = logits.flatten(0, 1).float(), labels.flatten()
    return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")


class TokenLoss:
    """Cross-entropy summed over the trained tokens of a micro-batch.

    The components return a mean over the micro-batch; the sum lets the caller divide by the
    tokens of all ranks and micro-steps, so that the gradient is the one of a single big batch.

    Raises:
        ConfigError: the component is no cross-entropy, ignores other labels than -100, or does not
            know the model's kind of output head.
    """

    def __init__(self, config: SftConfig) -> None:
        block = config.loss
        if block["_component_"] in LATER_NAMES:
            block = block | {"_component_": "trainer.layers.loss.LinearCrossEntropy"}
        self._component = instantiate("loss", block)
        name = type(self._component).__name__
        if name not in SUPPORTED:
            raise ConfigError(f"loss: {name} is not supported; known: {', '.join(SUPPORTED)}")
        if getattr(self._component, "reduction", "mean") != "mean":
            raise ConfigError("loss.reduction: must be mean, the trainer divides by all tokens")
        if self._component.ignore_index != IGNORE_INDEX:
            raise ConfigError(f"loss.ignore_index: must be {IGNORE_INDEX}")
        # The number of chunks in which the model then gives its logits; 0 means whole.
        self.output_chunks = getattr(self._component, "num_output_chunks", 0)
        if isinstance(self._component, LinearCrossEntropy):
            # It reads the output head's weight by itself.
            self.output_chunks = 1
            self._component.compiled = config.compile
            other = ", or loss._component_=torchtune.modules.loss.CEWithChunkedOutputLoss"
            if faults := head_faults(config.model, other):
                raise ConfigError(*faults)

    def __call__(self, model: Decoder, batch: MicroBatch, device: torch.device) -> torch.Tensor:
        """Summed loss, a scalar in fp32 with a graph behind it, also if no token is trained.

        Logits that are split over the vocabulary need `vocabulary_split_loss` around this call
        and around the backward pass.
        """
        batch = batch.to(device)
        inputs = {"mask": batch.documents, "input_pos": batch.positions}
        if isinstance(self._component, LinearCrossEntropy):
            if model.one_graph and self._component.fits_graph(model, batch):
                output = partial(_of_all_positions, labels=batch.labels)
                return model(batch.tokens, **inputs, output=output, in_graph=True)
            output = partial(self._component, batch=batch)
            return model(batch.tokens, **inputs, output=output)
        logits = model(batch.tokens, **inputs)
        chunks = logits if isinstance(logits, list) else [logits]
        if batch.target_count == 0:
            # All ranks must run the same backward pass, and a mean over no token is NaN.
            return full_tensor(sum(chunk.sum() for chunk in chunks)) * 0.0
        if isinstance(logits, list):
            mean = self._component(logits, batch.labels)
        elif isinstance(logits, DTensor) and self._component.label_smoothing:
            return self._split_and_smoothed(logits.flatten(0, 1), batch.labels.flatten())
        else:
            mean = self._component(logits.flatten(0, 1), batch.labels.flatten())
        return full_tensor(mean) * batch.target_count

    def _split_and_smoothed(self, logits: DTensor, labels: torch.Tensor) -> torch.Tensor:
        """Summed loss of [tokens, vocabulary] logits; torch's split one knows no label_smoothing.

        With smoothing e the loss of a token is that without, and e times its target's logit above
        the mean of all logits.
        """
        plain = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
        mesh, own = logits.device_mesh, local(logits)
        columns, held = own_columns(labels, own.shape[1], mesh.get_group())
        trained = labels != IGNORE_INDEX
        columns = columns.clamp(0, own.shape[1] - 1).unsqueeze(1)
        chosen = own.gather(1, columns).squeeze(1).float() * held
        above = chosen - own.sum(1, dtype=torch.float32) / logits.shape[1]
        part = DTensor.from_local((above * trained).sum(), mesh, [Partial()], run_check=False)
        total = local(part.redistribute(placements=[Replicate()]))
        return full_tensor(plain) + self._component.label_smoothing * total
