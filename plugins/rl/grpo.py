"""Reinforcement learning: GRPO, Dr. GRPO, DAPO and GSPO, with rollouts on the same ranks.

Each step the policy samples a group of answers to each of its prompts, functions score them in
processes of their own, and the policy is updated; all ranks do the one, then the other.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from plugins.rl import gathered
from plugins.rl import policy_losses as losses
from plugins.rl.ahead import Ahead, Drawn
from plugins.rl.policy_losses import LogProbs, Rule
from plugins.rl.recipe_keys import GrpoConfig
from plugins.rl.rewards import model as judges
from plugins.rl.rewards import pool
from plugins.rl.rewards.pool import Pool, Scores
from plugins.rl.rollout_log import Rollout, RolloutLog
from plugins.rl.rollouts import (
    Answer,
    Asked,
    Generation,
    PromptBatches,
    RolloutBatch,
    batches_of,
    prompt_config,
    prompts_of,
    trace,
)
from runspec.keys.train import TrainConfig
from trainer.data import batches, tokenizers
from trainer.data.batches import Batches, Data
from trainer.data.source import Source
from trainer.errors import ConfigError
from trainer.layers.batch import MicroBatch
from trainer.layers.log_probs import token_log_probs
from trainer.methods.base import LossSum, Models, Objective
from trainer.models.builder import Builder
from trainer.sharded import reshard

# What is scored when the rewards are tried before a run.
TRIED_ROWS, TRIED_TEXT = 3, "The answer is 42."


class PolicyOptimisation(Objective):
    """Answers that score above the others to the same prompt are to be likelier.

    Figures of the loss, means over answers (loss=dapo: over tokens): entropy, clip/low, clip/high,
    kl, kl/sampler; see policy_losses. Of the answers since the last line: RolloutLog.figures. The
    loss of dataset_val is minus the mean reward of greedy answers.
    """

    config_class: ClassVar[type[TrainConfig]] = GrpoConfig
    _prompts: PromptBatches
    _generation: Generation
    _pool: Pool
    _ahead: Ahead
    _number = 0

    @classmethod
    def faults(cls, config: Any) -> list[str]:
        """As `setting_faults`; and models that cannot generate, rewards that cannot be loaded."""
        faults = cls.setting_faults(config)
        if not faults:
            faults += gathered.faults(config, on_hub=config.rollout_engine == "vllm")
        if not pool.faults(config.rewards):
            try:
                Pool(config.rewards, 1, config.reward_timeout).close()
            except ConfigError as error:
                faults += error.faults
        return faults

    @classmethod
    def setting_faults(cls, config: Any) -> list[str]:
        """What of the keys does not go together; nothing is started."""
        faults = super().faults(config)
        rows = config.batch_size * config.gradient_accumulation_steps
        if rows % config.group_size:
            faults.append(
                f"group_size: the {rows} answers of a GPU and step (batch_size x "
                f"gradient_accumulation_steps) are not whole groups of {config.group_size}; set "
                f"gradient_accumulation_steps={config.group_size}"
            )
        if config.group_size < 2:
            faults.append("group_size: an answer is compared with others; set at least 2")
        if config.dataset.get("packed"):
            faults.append("dataset.packed: answers are not packed; set dataset.packed=False")
        if config.overlong_tokens > config.max_new_tokens:
            faults.append("overlong_tokens: must be at most max_new_tokens")
        if config.max_staleness and config.importance_cap is None:
            faults.append("max_staleness: older weights sample the answers; set importance_cap=2")
        if config.max_staleness and judges.blocks(config.rewards):
            faults.append(
                "max_staleness: a reward model is on the trainer's GPUs and cannot score while "
                "they train; set max_staleness=0"
            )
        faults += pool.faults(config.rewards)
        policy = Path(str(config.tokenizer.get("path") or config.model_folder))
        return faults + (judges.faults(config.rewards, policy) if config.rewards else [])

    @classmethod
    def sample_faults(cls, config: Any) -> list[str]:
        """What the rewards say of a text as the answer to the first prompts."""
        if pool.faults(config.rewards):
            return []
        try:
            tokenizer = tokenizers.of_block(config.tokenizer)
            source = Source("dataset", config.dataset, tokenizer)
            rows = [source.row(index) or {} for index in range(min(TRIED_ROWS, len(source)))]
            scorers = Pool(config.rewards, 1, config.reward_timeout)
        except ConfigError:
            return []  # reported by other checks
        try:
            prompt, tokens = "", tokenizer.encode(TRIED_TEXT)
            scorers.score([pool.Answer(prompt, TRIED_TEXT, tokens, row) for row in rows])
            return [
                f"rewards.{name}: {said} (tried on {source.origin(0)}, with the answer "
                f"{TRIED_TEXT!r})"
                for (name, _), said in scorers.messages.items()
            ]
        finally:
            scorers.close()

    @property
    def rule(self) -> Rule:
        """The loss, by the config."""
        config = self.config
        high = config.epsilon if config.epsilon_high is None else config.epsilon_high
        rule = Rule(config.loss, config.epsilon, high, config.beta, config.importance_cap)
        return replace(rule, longest=config.max_new_tokens)

    def target_count(self, batch: MicroBatch) -> int:
        """Tokens or answers that are trained; of dataset_val, prompts."""
        is_trained = isinstance(batch, RolloutBatch) and self.rule.over_tokens
        return batch.target_count if is_trained else len(batch.lengths)

    def build_data(self) -> Data:
        """As Objective.build_data, of prompts."""
        config, world = self.config, self.world
        if faults := world.from_main(lambda: self.setting_faults(config)):
            raise ConfigError(*faults)
        data = batches.build(prompt_config(config), world, self.form)
        if not isinstance(data.training, Batches):
            raise ConfigError("dataset: a stream cannot give prompts; use a dataset of files")
        self._prompts = PromptBatches(data.training, config, world)
        return replace(data, training=self._prompts)

    def build_models(self, builder: Builder) -> Models:
        """As Objective.build_models; ConfigError for a temperature that the head cannot have."""
        models = super().build_models(builder)
        if models.policy.module.output_softcap and self.config.sampling_temperature != 1:
            raise ConfigError(
                "sampling_temperature: the model caps its logits, so only 1 can be trained"
            )
        return models

    def prepare(self, models: Models, data: Data) -> None:
        """Start the processes that score, and open the rows that they get."""
        config, world = self.config, self.world
        self._generation = Generation(config, world)
        self._vocabulary = min(module.vocab_size for module in models.modules)
        self._weights = pool.weights_of(config.rewards)
        workers = config.reward_workers if world.data_weight else 0
        self._pool = world.on_all(lambda: Pool(config.rewards, workers, config.reward_timeout))
        self._sources = world.on_all(lambda: self._opened(data))
        self._judges = world.on_all(lambda: judges.loaded(config, world))
        self._tail = judges.tail(self._generation.tokenizer) if self._judges else []
        self._log = RolloutLog(config, world, self._generation.tokenizer)
        self._ahead = Ahead(config, world, self._generation, self._prompts, self._draw)
        for name, block in config.rewards.items():
            world.say(f"reward     {name}: {block['function']}, weight {self._weights[name]:g}")

    def _opened(self, data: Data) -> dict[str, tuple[Source, Any]]:
        """Of each dataset its rows, and its samples, which know the row of each."""
        given = [("dataset", self._prompts.inner), ("dataset_val", data.validation)]
        return {
            key: (
                Source(key, getattr(self.config, key), self._generation.tokenizer),
                of_key.rows.samples,
            )
            for key, of_key in given
            if of_key is not None
        }

    def before_step(
        self, models: Models, micro_batches: list[MicroBatch], step: int
    ) -> list[MicroBatch]:
        """The answers to the step's prompts, with advantages; new ones if it is their turn."""
        if self._prompts.samples_new(step):
            self._log.updated()
            self._prompts.current = self._sampled(models, micro_batches, step)
            self._log.updating()
        return batches_of(self._prompts.current, self.config, self._generation.ends.pad_id)

    def loss(self, models: Models, batch: MicroBatch) -> LossSum:
        if not isinstance(batch, RolloutBatch) and not models.policy.module.training:
            return self._validation(models, batch)
        batch, module = batch.to(self.world.device), models.policy.module
        reference = None
        if self.config.reference_kind:
            with models.as_reference() as frozen:
                reference = self._log_probs(frozen, batch)
        policy = self._log_probs(module, batch)
        old = sampled = None
        advantage = batch.numbers
        if isinstance(batch, RolloutBatch) and batch.advantages is not None:
            advantage, old, sampled = batch.advantages, batch.old, batch.sampled
        logps = LogProbs(policy, old, sampled, reference)
        return LossSum(*losses.policy_loss(logps, advantage, batch, self.rule))

    def _log_probs(self, module: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
        return token_log_probs(module, batch, self.config.sampling_temperature)

    def step_figures(self) -> dict[str, float | None]:
        """As Objective.step_figures; see RolloutLog.figures."""
        return self._log.figures()

    def identity(self, models: Models, data: Data) -> dict[str, Any]:
        """As Objective.identity; a file of reward functions counts by its content."""
        rewards = pool.identity(self.config.rewards)
        for name, sha in judges.fingerprints(self.config.rewards).items():
            rewards[name]["model"] = sha
        return super().identity(models, data) | {"rewards": rewards}

    # Rollouts -------------------------------------------------------------------------------------

    def _draw(self, given: list[MicroBatch], number: int) -> Drawn:
        """This rank's answers of the rollout of this number; nothing of it concerns other ranks."""
        step, size = number * self.config.updates_per_rollout, self.config.group_size
        prompts = [each for batch in given for each in prompts_of(batch)]
        if not self.world.data_weight:
            nothing = torch.full((len(prompts), size), torch.nan, dtype=torch.float64)
            return Drawn([[] for _ in prompts], [[] for _ in prompts], nothing, 0.0)
        # The last number gives the random numbers of earlier versions.
        asked = [
            Asked(sample, prompt, f"answer {step} {sample} {answer} 0")
            for sample, prompt in prompts
            for answer in range(size)
        ]
        answers = self._generation.answers(asked, self._vocabulary)
        before = time.monotonic()
        scored = self._scored("dataset", answers)
        scored_s = time.monotonic() - before
        places = [slice(begin, begin + size) for begin in range(0, len(asked), size)]
        return Drawn(
            [answers[own] for own in places],
            [scored[own] for own in places],
            self._rewards(answers, scored).view(-1, size),
            scored_s,
        )

    def _sampled(self, models: Models, given: list[MicroBatch], step: int) -> list[Answer]:
        """This rank's answers of a step; all ranks call this together."""
        config = self.config
        began, self._number = time.monotonic(), step // config.updates_per_rollout
        groups, scores, rewards, scored_s = self._ahead.take(models, given, self._number)
        self._log.failures(self._pool.messages)
        advantages = losses.advantages(rewards, config.scales)
        equal = losses.without_variance(rewards).tolist()
        known = ~rewards.isnan()
        trained = [
            [
                answer._replace(advantage=float(advantages[group, n]))
                if known[group, n]
                and not (equal[group] and config.zero_variance != "keep")
                and not (config.mask_truncated and not answer.ended)
                else answer
                for n, answer in enumerate(own)
            ]
            for group, own in enumerate(groups)
        ]
        self._log.add(step, Rollout(trained, scores, rewards, equal, self._number))
        transfer_s = self._generation.transfer_s
        waited_s = time.monotonic() - began - transfer_s
        # Ahead, scores are made while the step before is trained.
        waited_s -= 0.0 if config.max_staleness else scored_s
        self._log.took(waited_s, scored_s, transfer_s)
        flat = self._flat(trained)
        if config.updates_per_rollout > 1:
            flat = self._with_old(models, flat)
        return flat

    def _flat(self, groups: list[list[Answer]]) -> list[Answer]:
        """The answers of a rank's groups, as many on each; all ranks call this together."""
        config, world = self.config, self.world
        flat = [answer for own in groups for answer in own]
        missing = config.prompts_per_step * config.group_size - len(flat)
        flat += [Answer(0, [], [], [], False)] * missing
        # Ranks of a tensor-parallel group train on the same tokens, whatever their GPUs round.
        if world.tensor_parallel_dim > 1:
            flat = world.gather(flat)[world.group_leader]
        return flat

    def _scored(self, key: str, answers: Sequence[Answer]) -> list[Scores]:
        """The scores by all functions and reward models."""
        decode = self._generation.tokenizer.decode
        asked = {answer.sample: answer.prompt for answer in answers}
        prompts = {sample: decode(prompt, False) for sample, prompt in asked.items()}
        source, known = self._sources[key]
        rows = {sample: source.row(int(known.sources[sample])) or {} for sample in asked}
        scores = self._pool.score(
            [
                pool.Answer(prompts[a.sample], decode(a.tokens), a.tokens, rows[a.sample])
                for a in answers
            ]
        )
        for name, judge in self._judges.items():
            # What is behind the last answer's end, as the reward model was trained.
            documents = [[*a.prompt, *a.tokens, *(self._tail if a.ended else ())] for a in answers]
            for own, value in zip(scores, judge.scores(documents), strict=True):
                own.scores[name] = value
        return scores

    def _rewards(self, answers: Sequence[Answer], scores: Sequence[Scores]) -> torch.Tensor:
        """fp64 [answers]; NaN for one without tokens or a score."""
        config = self.config
        totals = [
            each.total(self._weights) if answer.tokens else None
            for answer, each in zip(answers, scores, strict=True)
        ]
        rewards = torch.tensor([torch.nan if t is None else t for t in totals], dtype=torch.float64)
        lengths = torch.tensor([len(answer.tokens) for answer in answers])
        return rewards + losses.overlong(lengths, config.max_new_tokens, config.overlong_tokens)

    def _with_old(self, models: Models, answers: list[Answer]) -> list[Answer]:
        """The answers with the policy's present log-probabilities of their tokens."""
        counted = [each._replace(advantage=0.0) for each in answers]
        module, logps = models.policy.module, []
        module.eval()
        try:
            with torch.no_grad():
                for batch in batches_of(counted, self.config, self._generation.ends.pad_id):
                    logps += self._log_probs(module, batch.to(self.world.device)).tolist()
        finally:
            module.train()
            reshard(module)
        values = iter(logps)
        return [each._replace(old=[next(values) for _ in each.log_probs]) for each in answers]

    def _validation(self, models: Models, batch: MicroBatch) -> LossSum:
        """Minus the sum of the rewards of greedy answers; one without a score counts as 0."""
        if not self._generation.held:
            self._ahead.rest()
            self._generation.hold(models, self._number)
        asked = [Asked(sample, prompt, "") for sample, prompt in prompts_of(batch)]

        def sample() -> tuple[list[float], dict[str, float]]:
            answers = self._generation.answers(asked, self._vocabulary, greedy=True)
            scores = self._scored("dataset_val", answers)
            totals = self._rewards(answers, scores).nan_to_num().tolist()
            by_name = {n: sum(each.scores.get(n) or 0.0 for each in scores) for n in self._weights}
            return totals, by_name

        nothing: tuple[list[float], dict[str, float]] = [], dict.fromkeys(self._weights, 0.0)
        totals, by_name = self.world.on_all(lambda: sample() if self.world.data_weight else nothing)
        total = torch.tensor(sum(totals), device=self.world.device, dtype=torch.float32)
        figures = {
            "reward": total,
            **{f"rewards/{n}": total.new_tensor(v) for n, v in by_name.items()},
        }
        return LossSum(-total, figures)

    @property
    def generates(self) -> bool:
        """As Objective.generates; what vLLM generates is not traced."""
        return bool(self.config.rollout_engine == "transformers")

    def trace_answers(self, models: Models) -> None:
        """As Objective.trace_answers."""
        answers = self.config.prompts_per_step * self.config.group_size
        trace(models, self.config, self.world, answers)

    def validated(self) -> None:
        """Free the sampler's memory."""
        self._generation.release()
