"""What is seen of reinforcement learning: figures of the newest step, and sampled answers."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.look.outcome import resolved
from launcher.look.report import Section
from launcher.look.text import is_number
from launcher.run.directory import Run
from launcher.run.states import State
from plugins.rl import names
from runspec import files

# Answers that are shown of each group, and groups.
_ANSWERS, _GROUPS = 4, 3
# Metric -> title of its chart, in a report.
CHARTS = {
    "reward": "Reward",
    "val_reward": "Reward of greedy answers to dataset_val",
    "answers/tokens": "Tokens of an answer",
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

# What the live view shows of a step, by line: metric, title and form.
_PERCENT, _SECONDS = "{:.1%}", "{:.3g} s"
_FIGURES = (
    (("reward", "reward", "{:.3f}"), ("groups/zero_variance", "equal groups", _PERCENT)),
    (
        ("answers/tokens", "tokens per answer", "{:.1f}"),
        ("answers/cut", "cut", _PERCENT),
        ("answers/failed", "failed", _PERCENT),
        *(
            (f"seconds/{part}", part, _SECONDS)
            for part in ("generate", "score", "transfer", "update")
        ),
    ),
    (
        ("entropy", "entropy", "{:.3g}"),
        ("kl", "KL to the start", "{:.3g}"),
        ("kl/sampler", "KL to the sampler", "{:.2g}"),
        ("clip/low", "clipped below", _PERCENT),
        ("clip/high", "above", _PERCENT),
        ("staleness", "staleness", "{:.2f}"),
        ("staleness/most", "at most", "{:.0f}"),
    ),
)


def report_section(run: Run) -> Section:
    """Return the charts and the sampled answers of a run, for a report."""
    return Section(
        "Sampled answers",
        list(samples(run)),
        "Of the newest steps, the best and the worst answers of a group; the run's rollouts.jsonl "
        "has the others.",
        charts(resolved(run).get("rewards")),
    )


def charts(rewards: Any) -> dict[str, str]:
    """Return the charts of runs with these rewards: those above, and one for each function."""
    rules = list(rewards) if isinstance(rewards, Mapping) else []
    own = {f"rewards/{name}": f"Reward by {name}" for name in rules if len(rules) > 1}
    return {"reward": CHARTS["reward"], **own, **CHARTS} if rules else {}


def figures(row: Mapping[str, Any]) -> list[str]:
    """Return a logged step's figures of its answers, in lines; none of another method."""
    if not is_number(row.get("answers/tokens")):
        return []
    own = [(name, name.partition("/")[2], "{:.3f}") for name in row if name.startswith("rewards/")]
    first, *others = _FIGURES
    lines = (
        ", ".join(
            f"{title} {form.format(row[name])}"
            for name, title, form in parts
            if is_number(row.get(name))
        )
        for parts in ([first[0], *own, *first[1:]], *others)
    )
    return [line for line in lines if line]


def live_lines(run: Run, state: State, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the figures of the newest answers, and how ranks and samplers are."""
    yield from next((lines for row in reversed(rows) if (lines := figures(row))), [])
    if not state.ended and (line := roles(run)):
        yield line


def roles(run: Run) -> str:
    """Return how ranks and samplers of a run are, in a line; nothing without samplers."""
    state = files.peek(run.path / names.STATE)
    if not state:
        return ""
    count = Counter(str(each.get("state")) for each in state.get("samplers", []))
    how = ", ".join(f"{number} {name}" for name, number in count.items())
    text = f"ranks: {run.progress.get('state', 'starting')}; samplers: {how}"
    if deaths := state.get("deaths"):
        last = deaths[-1]
        text += f"; last one ended: {last['sampler']} on {last['node']}, {last['reason']}"
    return text


def samples(run: Run) -> Iterator[str]:
    """Yield the newest groups of a run's answers, each with its rewards."""
    for group in files.read_json_lines(run.path / names.ANSWERS)[-_GROUPS:]:
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
