"""The configs of `entry: grpo`, reinforcement learning, and of `entry: distill_on_policy`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from runspec.keys.distill import DistillConfig
from runspec.keys.key import REQUIRED, Fault, changeable, setting
from runspec.keys.train import TrainConfig

# Scores by a reward model on the rank's own device.
REWARD_MODEL = "reward_model"
# The reward functions that the kit has, and the keys that each takes beside `weight`.
BUILT_IN: dict[str, tuple[str, ...]] = {
    "exact_match": ("column", "pattern"),
    "regex": ("pattern",),
    REWARD_MODEL: ("model",),
}


@dataclass(frozen=True, kw_only=True)
class AnswerKeys:
    """The answers that the policy gives to prompts."""

    max_new_tokens: int = setting(
        "positive", "Tokens of an answer at most; tokenizer.max_seq_len also ends it.", 256
    )
    sampling_temperature: float = setting(
        "number", "Temperature at which answers are sampled, and of their log-probabilities.", 1.0
    )
    generation_batch_size: int | None = changeable(
        "positive",
        "Answers that a GPU generates at once. Default: batch_size; of packed data as many as fill "
        "their rows.",
    )


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(AnswerKeys, TrainConfig):
    """Reinforcement learning: answers that score above others to the same prompt get likelier."""

    objective: ClassVar[str] = "plugins.rl.grpo.PolicyOptimisation"
    goal: ClassVar[str] = "reinforcement learning"
    torchtune: ClassVar[str] = "grpo"
    has_reference: ClassVar[bool] = True
    samples_answers: ClassVar[bool] = True
    companion: ClassVar[str] = "plugins.rl.slurm.samplers:SamplerProcesses"
    sampler: ClassVar[str] = "plugins.rl.sampler"

    rewards: dict[str, Any] = setting(
        "open block",
        "What scores the answers, by names of your own: {correct: {function: exact_match, column: "
        "answer}, mine: {function: /shared/reward.py:score, weight: 0.5}}; function: reward_model, "
        "and model: a folder. The sum of the scores times their weights (default 1) is the reward.",
        REQUIRED,
    )
    loss: str = setting(
        "grpo | dr_grpo | dapo | gspo",
        "grpo: mean over answers of means over their tokens. dr_grpo: sums divided by "
        "max_new_tokens. dapo: mean over all tokens. gspo: one ratio for each answer, of means.",
        "dapo",
    )
    group_size: int = setting("positive", "Answers to each prompt.", 8)
    updates_per_rollout: int = setting("positive", "Steps that train on the same answers.", 1)
    epsilon: float = setting("rate", "How far below 1 a ratio counts; the rest is clipped.", 0.2)
    epsilon_high: float | None = setting(
        "rate", "The same above 1; 0.28 in DAPO. Default: as epsilon."
    )
    beta: float = setting("rate", "Weight of the KL divergence from the reference.", 0.0)
    scale_rewards: bool | None = setting(
        "flag",
        "Divide advantages by the standard deviation of their group. Default: true, but false for "
        "dr_grpo.",
    )
    importance_cap: float | None = setting(
        "number",
        "Truncated importance sampling: each token's loss is multiplied by the ratio of the "
        "trainer's probability to the sampler's, at most this, such as 2. Default: it is not.",
    )
    overlong_tokens: int = setting(
        "count",
        "DAPO's soft punishment: over this many tokens before max_new_tokens the reward falls by "
        "up to 1.",
        0,
    )
    max_staleness: int = setting(
        "count",
        "With resources.rollout: of how many rollouts before the present one the weights may be "
        "that sample the answers. 0: they are the present ones, and training waits for answers. "
        "More needs importance_cap; 1 is enough to sample while the step before is trained.",
        0,
    )
    mask_truncated: bool = setting(
        "flag", "Do not train on answers that max_new_tokens cut.", False
    )
    zero_variance: str = setting(
        "keep | mask",
        "Groups whose answers all have the same reward: keep counts them in the mean (their "
        "advantage is 0), mask leaves them out.",
        "keep",
    )
    rollout_timeout: float = changeable(
        "number",
        "With resources.rollout: seconds that a transfer of weights, or a batch of answers, may "
        "take, including the restart of a sampler.",
        600.0,
    )
    rollout_engine: str = changeable(
        "transformers | vllm",
        "What generates the answers. vllm: a server on each GPU of the rollout nodes, in the "
        "recipe's environment (environment: vllm); the ranks are in the kit's own.",
        "transformers",
    )
    rollout_gpus: int = changeable(
        "positive",
        "GPUs of a node that share one vLLM server (tensor parallel), for a model that is too "
        "large for one GPU.",
        1,
    )
    rollout_engine_args: list[str] | None = changeable(
        "texts", "Additional arguments of vLLM's server."
    )
    reward_workers: int = changeable("positive", "Processes per GPU that score answers.", 2)
    reward_timeout: float = changeable(
        "number",
        "Seconds for one score of a function; an answer whose score takes longer is left out.",
        30.0,
    )
    logged_rollouts: int = changeable(
        "count", "Groups of each step that are written to rollouts.jsonl.", 1
    )

    def __post_init__(self) -> None:
        # One of a file that the recipe extends is left out by null.
        given = {name: block for name, block in self.rewards.items() if block is not None}
        object.__setattr__(self, "rewards", given)

    @classmethod
    def reference_of(cls, config: Mapping[str, Any]) -> str:
        """As TrainConfig.reference_of, by the key `beta`."""
        return super().reference_of(config) if config.get("beta") else ""

    @classmethod
    def recipe_faults(cls, config: Mapping[str, Any]) -> Iterator[Fault]:
        """As TrainConfig.recipe_faults: keys for vLLM and for rollout nodes only."""
        with_vllm = config.get("rollout_engine") == "vllm"
        only: dict[str, Any] = {"rollout_engine_args": [], "rollout_gpus": 1}
        for key, default in only.items():
            if not with_vllm and (config.get(key) or default) != default:
                yield Fault(key, f"{key}: only for vLLM; set rollout_engine=vllm, or leave it out")
        if with_vllm and _block(config, "tokenizer").get("new_tokens"):
            key = "tokenizer.new_tokens"
            message = "vLLM starts with the model's folder, which has no weights for new tokens"
            yield Fault(key, f"{key}: {message}; set rollout_engine=transformers, or leave it out")
        if _block(config, "resources").get("rollout"):
            return
        if with_vllm:
            yield Fault(
                "rollout_engine",
                "rollout_engine: vLLM generates on nodes of its own; set resources.rollout=1 or "
                "more (vLLM on the GPUs that train: entry=trl:grpo)",
            )
        if config.get("max_staleness"):
            yield Fault(
                "max_staleness",
                "max_staleness: only rollout nodes sample ahead of the trainer; set "
                "resources.rollout=1 or more, or leave it out",
            )

    @classmethod
    def functions(cls, config: Mapping[str, Any]) -> dict[tuple[str, ...], str]:
        """As TrainConfig.functions, of rewards."""
        blocks = _block(config, "rewards")
        return {
            ("rewards", name, "function"): str(block.get("function"))
            for name, block in blocks.items()
            if isinstance(block, dict)
        }

    @classmethod
    def backend_of(cls, config: Mapping[str, Any]) -> str:
        """As TrainConfig.backend_of; transformers generates in the ranks themselves."""
        backend = str(config.get("rollout_engine") or "transformers")
        return "" if backend == "transformers" else backend

    @property
    def scales(self) -> bool:
        """Whether advantages are divided by their group's standard deviation."""
        if self.scale_rewards is None:
            return self.loss != "dr_grpo"
        return self.scale_rewards

    @property
    def prompts_per_step(self) -> int:
        """Prompts of each rank (group of tensor-parallel ranks) in a step."""
        return self.batch_size * self.gradient_accumulation_steps // self.group_size


def _block(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    block = config.get(name)
    return block if isinstance(block, dict) else {}


@dataclass(frozen=True, kw_only=True)
class OnPolicyConfig(AnswerKeys, DistillConfig):
    """Distillation in which the student gives the answers in a share of the steps."""

    objective: ClassVar[str] = "plugins.rl.on_policy.OnPolicyDistillation"

    on_policy_share: float = setting(
        "rate",
        "Share of the steps whose answers the student generates, in place of the data's (lmbda of "
        "TRL's GKDConfig); which steps is drawn from the seed.",
        0.5,
    )
