"""On-policy distillation: in a share of the steps the student gives the answers.

For such a step the trained model is gathered, its adapter merged, into transformers' own class, and
each data-parallel rank lets that `generate` the answers to its prompts with a cache of keys and
values. In packed rows the answers take the place of the data's, and the documents are packed again.
Source: GKD, Agarwal et al. 2023 (arXiv 2306.13649), whose lambda is `on_policy_share`.
"""

import time
from typing import Any, ClassVar

import numpy as np
import torch

from plugins.rl import gathered
from plugins.rl.recipe_keys import OnPolicyConfig
from plugins.rl.rollouts import Asked, Document, Generation, at_once, documents_of, trace
from runspec.keys.train import TrainConfig
from trainer.checkpoint import weights
from trainer.data import packing
from trainer.data.batches import NONE, Collator, Data, Row
from trainer.layers.batch import MicroBatch
from trainer.methods.base import Models
from trainer.methods.distill import Distillation
from trainer.parallel.world import World

Answers = list[list[int]]


class Student:
    """Gives answers by the trained model; all ranks call its methods together."""

    def __init__(self, config: OnPolicyConfig, world: World) -> None:
        self._config, self._world = config, world
        self._generation = Generation(config, world)
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
        answered: Answers = []
        with self._generation.holding(models, step):
            if world.data_weight:
                answered = self._answered(documents, step, vocabulary)
        took = time.monotonic() - began
        # Ranks of a tensor-parallel group train on the same tokens, whatever their GPUs round.
        every = world.gather((answered, took))
        self._own_steps += 1
        self._seconds += max(seconds for _, seconds in every)
        for own in (each for rank, _ in every for each in rank if each):
            self._answers, self._tokens = self._answers + 1, self._tokens + len(own)
            self._ended += own[-1] in self._generation.ends.tokens
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
        asked = [
            Asked(each.sample, each.prompt, f"answer {step} {each.sample}") for each in documents
        ]
        # Prompts of about the same length are answered together.
        order = sorted(range(len(asked)), key=lambda index: -len(asked[index].prompt))
        answers: Answers = [[] for _ in asked]
        found = self._generation.answers([asked[index] for index in order], vocabulary)
        for index, answer in zip(order, found, strict=True):
            answers[index] = answer.tokens
        return answers

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
        collator = Collator(self._generation.ends.pad_id, config.row_multiple, row_length)
        return [collator.collate(rows[begin : begin + size]) for begin in range(0, len(rows), size)]


def _with(document: Document, answer: list[int]) -> Document:
    """The document's prompt with this answer; without one the document as it is."""
    if not answer:
        return document
    tokens = np.array(document.prompt + answer)
    return Document(tokens, np.arange(len(tokens)) >= len(document.prompt), document.sample)


class OnPolicyDistillation(Distillation):
    """As Distillation; see Student.figures for its own figures."""

    config_class: ClassVar[type[TrainConfig]] = OnPolicyConfig
    _student: Student

    @classmethod
    def faults(cls, config: Any) -> list[str]:
        """As Distillation.faults, of its own keys, too, and why the student cannot generate."""
        texts = super().faults(config)
        if config.on_policy_share > 1:
            texts.append(f"on_policy_share: must be from 0 to 1, got {config.on_policy_share}")
        return texts or gathered.faults(config)

    def prepare(self, models: Models, data: Data) -> None:
        """As Objective.prepare."""
        self._student = Student(self.config, self.world)

    def before_step(
        self, models: Models, micro_batches: list[MicroBatch], step: int
    ) -> list[MicroBatch]:
        """As Objective.before_step: with the student's answers in a share of the steps."""
        return self._student.replaced(models, micro_batches, step)

    @property
    def generates(self) -> bool:
        """As Objective.generates."""
        return bool(self.config.on_policy_share)

    def step_figures(self) -> dict[str, float | None]:
        """As Objective.step_figures."""
        return self._student.figures()

    def trace_answers(self, models: Models) -> None:
        """As Objective.trace_answers."""
        config = self.config
        answers = config.batch_size * config.gradient_accumulation_steps
        if config.dataset.get("packed"):
            answers = at_once(config, config.max_new_tokens)
        trace(models, config, self.world, answers)
