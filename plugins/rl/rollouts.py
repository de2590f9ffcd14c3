"""Answers that the policy samples to the prompts of a step, and the batches that train on them.

The token ids and the sampler's log-probabilities are kept as they were drawn: nothing is tokenised
again. Sampling depends on the seed, the step, the prompt and the answer's number, and on no other
answer, so that every layout and every resumed run draws the same.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from plugins.rl import gathered
from plugins.rl.recipe_keys import GrpoConfig, OnPolicyConfig
from plugins.rl.samplers import Request, Sampled, Samplers
from trainer.checkpoint import weights
from trainer.data import tokenizers
from trainer.data.batches import NONE, Batches, Collator, Row, TrainingBatches
from trainer.errors import ConfigError
from trainer.layers.batch import IGNORE_INDEX, MicroBatch
from trainer.methods.base import Models
from trainer.parallel.world import World

Config = GrpoConfig | OnPolicyConfig


class Document(NamedTuple):
    """A sample that counts."""

    tokens: np.ndarray
    # Which of them are trained.
    trained: np.ndarray
    # Its index in the dataset.
    sample: int

    @property
    def prompt(self) -> list[int]:
        """The tokens before the last answer; [] without one."""
        trained = np.flatnonzero(self.trained)
        breaks = np.flatnonzero(np.diff(trained) > 1)
        begin = 0 if not len(trained) else trained[breaks[-1] + 1 if len(breaks) else 0]
        return self.tokens[: int(begin)].tolist()


class Asked(NamedTuple):
    """A prompt that is to be answered."""

    # Its index in the dataset.
    sample: int
    prompt: list[int]
    # What the answer's random numbers are drawn from.
    draw: str


class Answer(NamedTuple):
    """An answer that was sampled."""

    sample: int
    prompt: list[int]
    # [] if there was no room for any.
    tokens: list[int]
    # The sampler's.
    log_probs: list[float]
    # By itself, and not because max_new_tokens was reached.
    ended: bool
    # None for one that is not trained.
    advantage: float | None = None
    # The log-probabilities of the trainer's policy at that time; [] if it is the current one.
    old: list[float] = []  # noqa: RUF012, never changed
    # Of which rollout the weights were that drew it; -1 if not from rollout nodes.
    version: int = -1


@dataclass
class RolloutBatch(MicroBatch):
    """A batch of answers."""

    # fp32 [documents]
    advantages: torch.Tensor | None = None
    # Log-probabilities of the trained tokens by the sampler, fp32 [target_count].
    sampled: torch.Tensor | None = None
    # By the policy at that time, if it is not the current one.
    old: torch.Tensor | None = None


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


def prompts_of(batch: MicroBatch) -> list[tuple[int, list[int]]]:
    """The samples of a batch: their indices, and the tokens before their last answer."""
    return [(document.sample, document.prompt) for document in documents_of(batch)]


class PromptBatches(TrainingBatches):
    """The prompts of each step, each for as many steps as train on the same answers.

    current: this rank's answers, which a checkpoint between two such steps contains.
    """

    def __init__(self, inner: Batches, config: GrpoConfig, world: World) -> None:
        self.inner, self._repeats, self._world = inner, config.updates_per_rollout, world
        self.samples_per_step = inner.samples_per_step
        self.steps_per_epoch = inner.steps_per_epoch * self._repeats
        steps = inner.total_steps * self._repeats
        self.total_steps = min(steps, config.max_steps or steps)
        self.current: list[Answer] = []
        rest = max(0, inner.size - inner.steps_per_epoch * inner.samples_per_step)
        left = f", {rest} samples left out of each epoch" if rest else ""
        self._described = f"{config.group_size} answers each{left}"

    def from_step(self, step: int) -> Iterator[list[MicroBatch]]:
        first = step // self._repeats
        for number, given in enumerate(self.inner.from_step(first), first):
            for each in range(number * self._repeats, (number + 1) * self._repeats):
                if step <= each < self.total_steps:
                    yield given

    def samples_new(self, step: int) -> bool:
        """Whether the step of this index begins with new answers."""
        return step % self._repeats == 0

    def state(self, step: int) -> list[Any] | None:
        """The answers that the next step trains on, if it samples none; all ranks call this."""
        if self.samples_new(step):
            return None
        own = self.current if self._world.data_weight else []
        return [tuple(answer) for of_rank in self._world.gather(own) for answer in of_rank]

    def restore(self, step: int, state: list[Any] | None) -> None:
        if self.samples_new(step):
            return
        if not state:
            raise ConfigError(f"checkpoints/step_{step} does not hold the answers of its step")
        size = len(state) // self._world.layout.data_parallel
        begin = self._world.data_rank * size
        self.current = [Answer(*each) for each in state[begin : begin + size]]

    @property
    def identity(self) -> dict[str, Any]:
        return self.inner.identity

    @property
    def described(self) -> str:
        return f"{self.inner.described}, {self._described}"

    def faults(self, key: str, vocab_size: int, max_seq_len: int) -> list[str]:
        return self.inner.faults(key, vocab_size, max_seq_len)


def batches_of(answers: Sequence[Answer], config: GrpoConfig, pad_id: int) -> list[MicroBatch]:
    """The micro-batches of a step, as many on each rank; what is not trained counts for nothing."""
    collator, size = Collator(pad_id, config.row_multiple), config.batch_size
    batches: list[MicroBatch] = []
    for begin in range(0, len(answers), size):
        own = answers[begin : begin + size]
        counted = [each for each in own if each.advantage is not None and each.tokens]
        filler = Row([(np.full(2, pad_id), np.zeros(2, bool))], False, NONE)
        rows = [_row(each) for each in counted] + [filler] * (len(own) - len(counted))
        batch = collator.collate(rows)

        def joined(parts: Iterable[Sequence[float]]) -> torch.Tensor:
            return torch.tensor([value for part in parts for value in part], dtype=torch.float32)

        batches.append(
            RolloutBatch(
                **vars(batch),
                advantages=joined([[each.advantage or 0.0] for each in counted]),
                sampled=joined([each.log_probs for each in counted]),
                old=joined([each.old for each in counted]) if any(e.old for e in own) else None,
            )
        )
    return batches


def _row(answer: Answer) -> Row:
    tokens = np.array(answer.prompt + answer.tokens)
    trained = np.arange(len(tokens)) >= len(answer.prompt)
    return Row([(tokens, trained)], True, np.array([answer.sample]))


class Generation:
    """The policy as transformers' class, which generates; see plugins.rl.gathered.

    It is on this rank, or on samplers, which get the weights of each rollout.

    samplers: None without. transfer_s: how long the last weights took to them.

    Raises:
        ConfigError: that class cannot take the weights.
    """

    def __init__(self, config: Config, world: World) -> None:
        self._config, self._world = config, world
        self.tokenizer = world.on_all(lambda: tokenizers.of_block(config.tokenizer))
        self.ends = gathered.Ends.of(self.tokenizer)
        self._whole = gathered.Copy(config.model_folder, world)
        self.samplers = Samplers.of(config, world) if isinstance(config, GrpoConfig) else None
        self.held = False
        self.transfer_s = 0.0

    @contextmanager
    def holding(self, models: Models, rollout: int) -> Iterator[None]:
        """Hold the whole policy's present weights inside; all ranks call this together."""
        self.hold(models, rollout)
        try:
            yield
        finally:
            self.release()

    def hold(self, models: Models, rollout: int) -> None:
        """Gather the policy's present weights; all ranks call this together."""
        began = time.monotonic()
        if self.samplers is None:
            self._whole.gather(models.policy)
        else:
            self.samplers.send(models.policy, rollout)
            self.transfer_s = time.monotonic() - began
        self.held = True

    def release(self) -> None:
        """Give the memory back."""
        self._whole.free()
        self.held = False

    def answers(
        self, asked: Sequence[Asked], vocabulary: int, greedy: bool = False
    ) -> list[Answer]:
        """An answer to each, in order; on a rank that answers, while the weights are held.

        Args:
            vocabulary: tokens from this one on are never drawn.
            greedy: the likeliest token each time, instead of a drawn one.
        """
        config = self._config
        limit = int(config.tokenizer.get("max_seq_len") or 2**31)
        rooms = [min(config.max_new_tokens, limit - len(each.prompt)) for each in asked]
        answers = [Answer(each.sample, each.prompt, [], [], False) for each in asked]
        fits = [index for index, room in enumerate(rooms) if room > 0 and asked[index].prompt]
        longest = max((len(asked[index].prompt) + rooms[index] for index in fits), default=0)
        size = at_once(config, longest)
        if self.samplers is not None and self.samplers.schedules:
            # It schedules answers itself, so that each sampler gets its share at once.
            size = config.generation_batch_size or -(-len(fits) // self.samplers.count) or 1
        parts = [fits[begin : begin + size] for begin in range(0, len(fits), size)]
        requests = [
            Request(
                [asked[index].prompt for index in part],
                None if greedy else [weights.seed_of(config.seed, asked[i].draw) for i in part],
                max(rooms[index] for index in part),
                vocabulary,
                config.sampling_temperature,
            )
            for part in parts
        ]
        if self.samplers is not None:
            sampled = self.samplers.sample(requests)
        else:
            sampled = [sample(self._whole, each, self.ends) for each in requests]
        for part, of_part in zip(parts, sampled, strict=True):
            for index, row, of_row in zip(part, of_part.tokens, of_part.log_probs, strict=True):
                end = next((n + 1 for n, token in enumerate(row) if token in self.ends.tokens), 0)
                count = min(end or len(row), rooms[index])
                ended = bool(end) and count == end
                answers[index] = answers[index]._replace(
                    tokens=row[:count],
                    log_probs=of_row[:count],
                    ended=ended,
                    version=of_part.version,
                )
        return answers


@torch.no_grad()
def sample(generator: gathered.Generator, asked: Request, ends: gathered.Ends) -> Sampled:
    """Generate what a request asks for."""
    draw = _Draw(asked.temperature, asked.seeds, asked.vocabulary, generator.device)
    new = generator.generate(asked.prompts, asked.room, draw, ends)
    return Sampled(new, torch.stack(draw.log_probs, 1).tolist())


def at_once(config: Config, longest: int) -> int:
    """How many answers are generated together, the longest of this many tokens with its prompt.

    In place of packed rows: as many as have the positions of a micro-batch.
    """
    if config.generation_batch_size or not config.dataset.get("packed"):
        return config.generation_batch_size or config.batch_size
    return max(1, config.batch_size * int(config.tokenizer["max_seq_len"]) // max(longest, 1))


def trace(models: Models, config: Config, world: World, answers: int) -> None:
    """What a step's answers take, for `plugins.estimate.trace`, whose tensors have no values."""
    copy = gathered.Copy(config.model_folder, world, len(models.policy.module.blocks))
    copy.gather(models.policy)
    rows, length = at_once(config, config.max_new_tokens), int(config.tokenizer["max_seq_len"])
    if config.dataset.get("packed"):
        length = config.batch_size * length // rows
    rows = min(rows, answers)
    scores = copy.one_token(rows, length - 1)
    draw = _Draw(config.sampling_temperature, None, models.policy.module.vocab_size, scores.device)
    # The noise, which generators cannot draw without values.
    noise = torch.empty_like(scores, dtype=torch.float32)
    # As transformers' `generate`, which gives the processors a copy.
    draw(scores, scores.to(torch.float32, copy=True))
    del noise
    copy.free()


class _Draw:
    """Samples a row's next token by a generator of its own, so that no other row matters.

    The largest of log-probabilities + Gumbel noise is a draw from their distribution.

    log_probs: of what was drawn, [rows] for each token.
    """

    def __init__(
        self,
        temperature: float,
        seeds: list[int] | None,
        vocabulary: int,
        device: torch.device,
    ) -> None:
        self._temperature, self._vocabulary = temperature, vocabulary
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds or ()]
        self.log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.float() / self._temperature
        scores[:, self._vocabulary :] = -math.inf
        log_probs = scores.log_softmax(1)
        drawn = log_probs
        if self._generators:
            drawn = torch.empty_like(log_probs)
            for row, generator in zip(drawn.unbind(), self._generators, strict=True):
                row.exponential_(generator=generator)
            torch.sub(log_probs, drawn.log_(), out=drawn)
        chosen = drawn.argmax(1, keepdim=True)
        self.log_probs.append(log_probs.gather(1, chosen)[:, 0])
        return drawn


def prompt_config(config: GrpoConfig) -> GrpoConfig:
    """The config by which the batches of prompts are made: those of a step are one batch."""
    steps = config.max_steps and -(-config.max_steps // config.updates_per_rollout)
    return replace(
        config,
        batch_size=config.prompts_per_step,
        gradient_accumulation_steps=1,
        max_steps=steps,
        batch_size_val=config.batch_size_val or config.batch_size,
    )
