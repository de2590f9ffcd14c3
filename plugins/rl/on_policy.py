"""Answers that the student gives between two steps, in place of the data's.

For such a step the trained model is gathered, its adapter merged, into transformers' own class, and
each data-parallel rank lets that `generate` the answers to its prompts with a cache of keys and
values. In packed rows the answers take the place of the data's, and the documents are packed again.
Source: GKD, Agarwal et al. 2023 (arXiv 2306.13649), whose lambda is `on_policy_share`.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from runspec.keys.distill import DistillConfig
from trainer.checkpoint import weights
from trainer.config import instantiate
from trainer.data import packing
from trainer.data.batches import NONE, Collator, Row
from trainer.errors import ConfigError
from trainer.layers.batch import IGNORE_INDEX, MicroBatch
from trainer.methods import whole
from trainer.methods.base import Models
from trainer.parallel.world import World

Answers = list[list[int]]


class Document(NamedTuple):
    """A sample that counts: its tokens, which of them are trained, and its index in the dataset."""

    tokens: np.ndarray
    trained: np.ndarray
    sample: int

    @property
    def prompt(self) -> list[int]:
        """The tokens before the last answer; [] without one."""
        trained = np.flatnonzero(self.trained)
        breaks = np.flatnonzero(np.diff(trained) > 1)
        begin = 0 if not len(trained) else trained[breaks[-1] + 1 if len(breaks) else 0]
        return self.tokens[: int(begin)].tolist()


def faults(config: DistillConfig) -> list[str]:
    """What cannot be done together with answers of the student's; files are not read."""
    if config.teacher_log_probs != "kept":
        return []
    return [
        "on_policy_share: the teacher's stored pass covers the data's answers only; set "
        "teacher_log_probs=online or on_policy_share=0"
    ]


class Student:
    """Gives answers by the trained model; all ranks call its methods together.

    Raises:
        ConfigError: transformers' class cannot take the weights.
    """

    def __init__(self, config: DistillConfig, world: World) -> None:
        self._config, self._world = config, world

        def check() -> None:
            if wrong := whole.faults(config):
                raise ConfigError(*wrong)

        world.on_main(check)
        tokenizer = world.on_all(lambda: instantiate("tokenizer", config.tokenizer))
        self._ends = whole.Ends.of(tokenizer)
        self._whole = whole.Copy(config.model_folder, world)
        self._clear()

    def _clear(self) -> None:
        self._steps = self._own_steps = self._answers = self._tokens = 0
        self._ended, self._seconds = 0, 0.0

    def wants(self, step: int) -> bool:
        """Whether the step of this index trains on own answers; drawn from the seed."""
        seed = weights.seed_of(self._config.seed, f"on-policy step {step}")
        draw = torch.rand((), generator=torch.Generator().manual_seed(seed))
        return float(draw) < self._config.on_policy_share

    def replaced(self, models: Models, batches: list[MicroBatch], step: int) -> list[MicroBatch]:
        """The batches of a step of own answers; else the given ones."""
        self._steps += 1
        if not self.wants(step):
            return batches
        world, began = self._world, time.monotonic()
        vocabulary = min(module.vocab_size for module in models.modules)
        documents = [document for batch in batches for document in documents_of(batch)]
        self._whole.gather(models.policy)
        answered: Answers = []
        if world.data_weight:
            answered = self._answered(documents, step, vocabulary)
        self._whole.free()
        took = time.monotonic() - began
        # Ranks of a tensor-parallel group train on the same tokens, whatever their GPUs round.
        every = world.gather((answered, took))
        self._own_steps += 1
        self._seconds += max(seconds for _, seconds in every)
        for own in (each for rank, _ in every for each in rank if each):
            self._answers, self._tokens = self._answers + 1, self._tokens + len(own)
            self._ended += own[-1] in self._ends.tokens
        answers = every[world.group_leader][0]
        pairs = zip(documents, answers, strict=True)
        return self._batches([_with(*pair) for pair in pairs], batches[0])

    def figures(self) -> dict[str, float | None]:
        """Since the last call: the share of steps with own answers, and of these the mean length,
        the share that ended with an end token, and the tokens per second over all ranks.
        """
        answers, seconds = self._answers, self._seconds
        values = {
            "on_policy/steps": self._own_steps / max(self._steps, 1),
            "on_policy/answer_tokens": self._tokens / answers if answers else None,
            "on_policy/ended": self._ended / answers if answers else None,
            "on_policy/tokens_per_second": self._tokens / seconds if seconds else None,
        }
        self._clear()
        return values

    def _answered(self, documents: list[Document], step: int, vocabulary: int) -> Answers:
        """A new answer to the prompt of each document; [] where there is no room for one."""
        config, prompts = self._config, [document.prompt for document in documents]
        longest = int(config.tokenizer.get("max_seq_len") or 2**31)
        rooms = [min(config.on_policy_max_new_tokens, longest - len(each)) for each in prompts]
        asked = [index for index, room in enumerate(rooms) if room > 0 and prompts[index]]
        asked.sort(key=lambda index: -len(prompts[index]))
        room = max((rooms[index] for index in asked), default=0)
        # In groups whose keys and values have at most the positions of a micro-batch.
        positions = config.batch_size * min(longest, max(map(len, prompts), default=0) + room)
        answers: Answers = [[] for _ in prompts]
        while asked:
            count = max(1, positions // (len(prompts[asked[0]]) + room))
            now, asked = asked[:count], asked[count:]
            generators = [self._generator(step, documents[index].sample) for index in now]
            draw = _Draw(config.on_policy_temperature, generators, vocabulary)
            new = self._whole.generate([prompts[index] for index in now], room, draw, self._ends)
            for index, row in zip(now, new, strict=True):
                end = next(
                    (n + 1 for n, token in enumerate(row) if token in self._ends.tokens), len(row)
                )
                answers[index] = row[: min(end, rooms[index])]
        return answers

    def _generator(self, step: int, sample: int) -> torch.Generator:
        seed = weights.seed_of(self._config.seed, f"answer {step} {sample}")
        return torch.Generator(self._world.device).manual_seed(seed)

    def _batches(self, documents: list[Document], given: MicroBatch) -> list[MicroBatch]:
        """The documents in micro-batches, packed if the data are: as many on every rank.

        Answers that are longer than the data's may need more micro-batches than those had.
        """
        config = self._config
        row_length = config.tokenizer["max_seq_len"] if config.dataset.get("packed") else None
        members: list[list[int]] = [[index] for index in range(len(documents))]
        if row_length is not None:
            lengths = np.array([len(document.tokens) for document in documents], np.int64)
            members = packing.pack(lengths, row_length, None)
        rows = [
            Row(
                [(documents[index].tokens, documents[index].trained) for index in row],
                True,
                np.array([documents[index].sample for index in row]),
            )
            for row in members
        ]
        size = config.batch_size
        (count,) = self._world.max([-(-len(rows) // size)])
        # What fills the batches up counts for nothing.
        filler = given.inputs.tokens[0, :2].numpy(), np.zeros(2, bool)
        rows += [Row([filler], False, NONE)] * (max(1, int(count)) * size - len(rows))
        collator = Collator(self._ends.pad_id, config.row_multiple, row_length)
        return [collator.collate(rows[begin : begin + size]) for begin in range(0, len(rows), size)]


def documents_of(batch: MicroBatch) -> list[Document]:
    """The documents of a batch that count, of samples with one document each."""
    tokens, labels = batch.inputs.tokens.flatten().numpy(), batch.labels.flatten().numpy()
    documents, ends = [], batch.ends if batch.ends is not None else ()
    for last, length, sample in zip(ends, batch.lengths, batch.samples, strict=True):
        end = int(last) + 1
        trained = np.zeros(length, bool)
        # Label i is token i + 1.
        trained[1:] = labels[end - length : end - 1] != IGNORE_INDEX
        documents.append(Document(tokens[end - length : end], trained, int(sample)))
    return documents


def _with(document: Document, answer: list[int]) -> Document:
    """The document's prompt with this answer; without one the document as it is."""
    if not answer:
        return document
    tokens = np.array(document.prompt + answer)
    return Document(tokens, np.arange(len(tokens)) >= len(document.prompt), document.sample)


def trace(models: Models, config: DistillConfig, world: World) -> None:
    """What answers take, for `plugins.estimate.trace`, whose tensors have no values."""
    copy = whole.Copy(config.model_folder, world, len(models.policy.module.blocks))
    copy.gather(models.policy)
    positions = config.batch_size * int(config.tokenizer["max_seq_len"])
    rows = max(1, positions // config.on_policy_max_new_tokens)
    if not config.dataset.get("packed"):
        rows = min(rows, config.batch_size * config.gradient_accumulation_steps)
    draw = _Draw(1.0, [None] * rows, models.policy.module.vocab_size)
    scores = copy.one_token(rows, positions // rows - 1)
    draw(scores, scores)
    copy.free()


class _Draw:
    """Samples a row's next token by a generator of its own, so that no other row matters.

    The largest of logits / temperature + Gumbel noise is a draw from their softmax.
    """

    def __init__(
        self, temperature: float, generators: Sequence[torch.Generator | None], vocabulary: int
    ) -> None:
        self._temperature, self._generators = temperature, generators
        self._vocabulary = vocabulary

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.float() / self._temperature
        for row, generator in zip(scores, self._generators, strict=True):
            row -= torch.empty_like(row).exponential_(generator=generator).log_()
        scores[:, self._vocabulary :] = -torch.inf
        return scores
