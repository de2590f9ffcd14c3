"""What is seen of reinforcement learning: figures of the newest step, and sampled answers."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.runs.directory import Run
from runspec import files

# Answers that are shown of each group, and groups.
_ANSWERS, _GROUPS = 4, 3
# Metric -> title of its chart, in a report.
CHARTS = {
    "reward": "Reward",
    "val_reward": "Reward of greedy answers to dataset_val",
    "answers/tokens": "Tokens of an answer",
    "answers/turns": "Answers of a conversation",
    "answers/cut": "Share of answers that max_new_tokens ended",
    "answers/failed": "Share of answers whose reward failed",
    "groups/zero_variance": "Share of groups with equal rewards",
    "staleness": "Rollouts that the sampler's weights were behind, mean",
    "staleness/most": "Rollouts that the sampler's weights were behind, at most",
    "entropy": "Entropy (nats per token)",
    "kl": "KL divergence from the model before training",
    "kl/sampler": "KL divergence between sampler and trainer",
    "clip/low": "Share clipped below",
    "clip/high": "Share clipped above",
    "seconds/generate": "Seconds to generate, per rollout",
    "seconds/score": "Seconds to score, per rollout",
    "seconds/transfer": "Seconds of a transfer of weights, per rollout",
    "seconds/update": "Seconds of updates, per rollout",
}


def charts(rewards: Any) -> dict[str, str]:
    """Return the charts of runs with these rewards: those above, and one for each function."""
    names = list(rewards) if isinstance(rewards, Mapping) else []
    own = {f"rewards/{name}": f"Reward by {name}" for name in names if len(names) > 1}
    return {"reward": CHARTS["reward"], **own, **CHARTS} if names else {}


def figures(row: Mapping[str, Any]) -> list[str]:
    """Return a logged step's figures of its answers, in lines; none of another method."""

    def shown(parts: Mapping[str, tuple[str, str]]) -> str:
        known = (
            f"{title} {form.format(row[name])}"
            for name, (title, form) in parts.items()
            if isinstance(row.get(name), int | float)
        )
        return ", ".join(known)

    functions = [name for name in row if name.startswith("rewards/")]
    percent, seconds = "{:.1%}", "{:.3g} s"
    lines = (
        shown(
            {"reward": ("reward", "{:.3f}")}
            | {name: (name.partition("/")[2], "{:.3f}") for name in functions}
            | {"groups/zero_variance": ("equal groups", percent)}
        ),
        shown(
            {
                "answers/tokens": ("tokens per answer", "{:.1f}"),
                "answers/turns": ("turns", "{:.1f}"),
                "answers/cut": ("cut", percent),
                "answers/failed": ("failed", percent),
                "seconds/generate": ("generate", seconds),
                "seconds/score": ("score", seconds),
                "seconds/transfer": ("transfer", seconds),
                "seconds/update": ("update", seconds),
            }
        ),
        shown(
            {
                "entropy": ("entropy", "{:.3g}"),
                "kl": ("KL to the start", "{:.3g}"),
                "kl/sampler": ("KL to the sampler", "{:.2g}"),
                "clip/low": ("clipped below", percent),
                "clip/high": ("above", percent),
                "staleness": ("staleness", "{:.2f}"),
                "staleness/most": ("at most", "{:.0f}"),
            }
        ),
    )
    has = isinstance(row.get("answers/tokens"), int | float)
    return [line for line in lines if line] if has else []


def roles(run: Run) -> str:
    """Return how ranks and replicas of a run are, in a line; nothing without replicas."""
    state = files.peek(run.path / files.ROLLOUT_STATE)
    if not state:
        return ""
    count = Counter(str(each.get("state")) for each in state.get("replicas", []))
    how = ", ".join(f"{number} {name}" for name, number in count.items())
    text = f"ranks: {run.progress.get('state', 'starting')}; rollout replicas: {how}"
    if deaths := state.get("deaths"):
        last = deaths[-1]
        text += f"; last one ended: {last['replica']} on {last['node']}, {last['reason']}"
    return text


def samples(run: Run) -> Iterator[str]:
    """Yield the newest groups of a run's answers, each with its rewards."""
    groups = [g for g in files.read_json_lines(run.path / files.ROLLOUTS) if isinstance(g, dict)]
    for group in groups[-_GROUPS:]:
        yield f"step {group.get('step')}, prompt:"
        yield from _indented(group.get("prompt"))
        answers = [each for each in group.get("answers") or () if isinstance(each, dict)]
        # The best and the worst tell the most.
        ordered = sorted(answers, key=lambda each: -(each.get("reward") or 0.0))
        half = _ANSWERS // 2
        few = ordered if len(ordered) <= _ANSWERS else [*ordered[:half], *ordered[-half:]]
        for each in few:
            own = each.get("scores")
            scores = own.items() if isinstance(own, Mapping) and len(own) > 1 else ()
            by_name = "".join(f", {name} {_number(value)}" for name, value in scores)
            cut = ", cut" if each.get("cut") else ""
            tokens = each.get("tokens")
            yield f"answer, reward {_number(each.get('reward'))}{by_name}, {tokens} tokens{cut}:"
            yield from _indented(each.get("answer"))
        if len(few) < len(answers):
            yield f"and {len(answers) - len(few)} answers between them"
        yield ""


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "none"


def _indented(text: Any) -> Iterator[str]:
    yield from (f"    {line}" for line in str(text or "").splitlines() or [""])
