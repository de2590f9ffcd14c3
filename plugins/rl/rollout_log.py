"""What is seen of rollouts: figures over all ranks, rewards that fail, and some of the answers."""

import json
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from plugins.rl import names
from plugins.rl.recipe_keys import GrpoConfig
from plugins.rl.rewards.pool import Scores
from plugins.rl.rollouts import Answer
from runspec import files
from trainer.metrics import lines_until
from trainer.parallel.world import World


class Rollout(NamedTuple):
    """The groups of a step on a rank, with their scores."""

    groups: list[list[Answer]]
    scores: list[list[Scores]]
    # fp64 [groups, group_size], NaN for none.
    rewards: torch.Tensor
    # Whether those of a group are equal.
    equal: list[bool]
    # Of the rollout.
    number: int


class RolloutLog:
    """Counts rollouts between two logged steps; all ranks call its methods together."""

    def __init__(self, config: GrpoConfig, world: World, tokenizer: Any) -> None:
        self._config, self._world, self._tokenizer = config, world, tokenizer
        self._sums: dict[str, float] = defaultdict(float)
        self._longest = self._most_stale = 0
        self._said: set[tuple[str, str]] = set()
        self._begun = False
        self._since: float | None = None

    def add(self, step: int, rollout: Rollout) -> None:
        """Count the answers of the step of this index, and write some of them."""
        own = self._counted(rollout) if self._world.data_weight else {}
        answers = [each for group in rollout.groups for each in group]
        longest = max((len(each.tokens) for each in answers), default=0)
        versions = [each.version for each in answers if each.version >= 0]
        stale = rollout.number - min(versions, default=rollout.number)
        for of_rank, length, age in self._world.gather((own, longest, stale)):
            for name, value in of_rank.items():
                self._sums[name] += value
            self._longest, self._most_stale = max(self._longest, length), max(self._most_stale, age)
        self._sums["rollouts"] += 1
        if self._world.is_main and self._config.logged_rollouts:
            self._write(step, rollout)

    def took(self, generating_s: float, scoring_s: float, transfer_s: float = 0.0) -> None:
        """Count the seconds of a rollout on this rank; the slowest one's count."""
        slowest = self._world.max([generating_s, scoring_s, transfer_s])
        self._sums["generate"] += slowest[0]
        self._sums["score"] += slowest[1]
        self._sums["transfer"] += slowest[2]

    def updating(self) -> None:
        """The answers are there: from now on they are trained on."""
        self._since = time.monotonic()

    def updated(self) -> None:
        """The next answers are sampled."""
        if self._since is not None:
            self._sums["update"] += time.monotonic() - self._since
            self._sums["updated"] += 1

    def figures(self) -> dict[str, float | None]:
        """Of the answers since the last call, over all ranks.

        reward and reward_std: of all answers with one. rewards/NAME: of each function, without
        weight. answers/tokens, answers/longest; answers/cut: share that max_new_tokens ended;
        answers/masked: share that is not trained; answers/failed: share without a score, because a
        function hung, died or raised. groups/zero_variance: share whose rewards are equal.
        staleness and staleness/most, with
        rollout nodes: how many rollouts old the weights were. seconds/generate, seconds/score,
        seconds/transfer (of weights to rollout nodes), seconds/update: per rollout, of the slowest
        rank; the last one of rank 0, of the rollouts that were followed by another.
        """
        figures, longest, most_stale = self._sums, self._longest, self._most_stale
        self._sums, self._longest, self._most_stale = defaultdict(float), 0, 0

        def mean(name: str, over: str) -> float | None:
            return figures[name] / figures[over] if figures[over] else None

        reward, square = mean("reward", "rewarded"), mean("square", "rewarded")
        spread = None if reward is None or square is None else max(0.0, square - reward**2) ** 0.5
        return {
            "reward": reward,
            "reward_std": spread,
            **{
                f"rewards/{name}": mean(f"score {name}", f"scored {name}")
                for name in self._config.rewards
            },
            "answers/tokens": mean("tokens", "answers"),
            "answers/longest": longest if figures["answers"] else None,
            "answers/cut": mean("cut", "answers"),
            "answers/masked": mean("masked", "answers"),
            "answers/failed": mean("failed", "answers"),
            "groups/zero_variance": mean("equal", "groups"),
            **(
                {
                    "staleness": mean("stale", "versions"),
                    "staleness/most": most_stale,
                }
                if figures["versions"]
                else {}
            ),
            "seconds/generate": mean("generate", "rollouts"),
            "seconds/score": mean("score", "rollouts"),
            **({"seconds/transfer": mean("transfer", "rollouts")} if figures["transfer"] else {}),
            "seconds/update": mean("update", "updated"),
        }

    def failures(self, message: Mapping[tuple[str, str], str]) -> None:
        """Say the first time that a function fails in a way; the figures count all."""
        for of_rank in self._world.gather(dict(message)):
            for (name, kind), said in of_rank.items():
                if (name, kind) not in self._said:
                    self._said.add((name, kind))
                    self._world.say(
                        f"note: reward {name} failed ({kind}): {said}; such answers are left out, "
                        "and answers/failed is their share"
                    )

    def _counted(self, rollout: Rollout) -> dict[str, float]:
        own: dict[str, float] = defaultdict(float)
        answers = [each for group in rollout.groups for each in group]
        known = rollout.rewards[~rollout.rewards.isnan()]
        own["answers"], own["groups"] = len(answers), len(rollout.groups)
        own["rewarded"], own["reward"] = len(known), float(known.sum())
        own["square"] = float(known.square().sum())
        own["tokens"] = sum(len(each.tokens) for each in answers)
        own["cut"] = sum(not each.ended for each in answers)
        own["masked"] = sum(each.advantage is None for each in answers)
        own["equal"] = sum(rollout.equal)
        versions = [each.version for each in answers if each.version >= 0]
        own["versions"] = len(versions)
        own["stale"] = sum(rollout.number - each for each in versions)
        for each in (each for group in rollout.scores for each in group):
            own["failed"] += each.failed
            for name, score in each.scores.items():
                if score is not None:
                    own[f"score {name}"] += score
                    own[f"scored {name}"] += 1
        return own

    def _write(self, step: int, rollout: Rollout) -> None:
        """Add rank 0's first groups to rollouts.jsonl; a resumed run replaces later lines."""
        path = self._config.output_dir / names.ANSWERS
        if not self._begun:
            self._begun = True
            files.write_text(path, "".join(map(_line, lines_until(path, step))))
        decode, count = self._tokenizer.decode, self._config.logged_rollouts
        lines = []
        for group, scores, rewards in zip(
            rollout.groups[:count], rollout.scores, rollout.rewards.tolist(), strict=False
        ):
            answers = [
                {
                    "reward": None if reward != reward else reward,
                    "advantage": answer.advantage,
                    "scores": own.scores,
                    "tokens": len(answer.tokens),
                    "cut": not answer.ended,
                    "answer": decode(answer.tokens),
                }
                for answer, own, reward in zip(group, scores, rewards, strict=True)
            ]
            prompt = decode(group[0].prompt, False)
            place = {"step": step + 1, "sample": group[0].sample}
            lines.append(_line({**place, "prompt": prompt, "answers": answers}))
        with open(path, "a", encoding="utf-8") as file:
            file.write("".join(lines))


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"
