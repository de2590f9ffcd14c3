"""What each gate says of a version, from the evaluations that count for it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher.errors import nearest
from plugins.evaluate.launcher.evaluation import answered, compared_settings, figures
from plugins.registry.launcher.gates import Evidence, Gates, task_of
from runspec.weights import content_sha256

_SHOWN_OF_HASH = 12


@dataclass(frozen=True)
class Verdict:
    """One gate's answer."""

    passed: bool
    # With the figures, and the next command if it failed.
    text: str
    # The run of the evaluation that it follows from.
    evaluation: str | None = None


@dataclass(frozen=True)
class JudgedVersion:
    """A version as gates see it."""

    name: str
    number: int
    folder: Path
    # Its evaluations, newest first.
    results: Sequence[Mapping[str, Any]]
    # By alias: the folder of the version that it names.
    aliases: Mapping[str, Path] = field(default_factory=dict)
    # By alias: the hash of that version's weights when it passed the gates, if it is known.
    promoted_sha256: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def weights_sha256(self) -> str:
        """The hash of the weights as they are now; they are read once, and only if a gate asks."""
        return content_sha256(self.folder)

    def command(self, suite: str) -> str:
        """Return the command that evaluates it on a suite."""
        return f"cookbook eval models:/{self.name}/{self.number} --suite {suite}"


def judge(gates: Gates, version: JudgedVersion) -> Iterator[Verdict]:
    """Yield what each gate says of a version."""
    for gate in gates.gates:
        if "size_gib_at_most" in gate:
            yield _size(gate, version)
            continue
        task = task_of(gate)
        evidence = gates.evaluations[task]
        counting = [
            each for each in version.results if not _differences(evidence, task, each, version)
        ]
        yield from _metric(gate, version, evidence, counting)


def _block(result: Mapping[str, Any], task: str) -> Mapping[str, Any] | None:
    """Return what a result says of suite.task, None if it is of another suite or lacks the task."""
    suite, _, name = task.partition(".")
    if result.get("suite") != suite:
        return None
    block: Mapping[str, Any] | None = (result.get("tasks") or {}).get(name)
    return block


def _differences(
    evidence: Evidence, task: str, result: Mapping[str, Any], version: JudgedVersion
) -> list[str]:
    """Return why an evaluation does not count for a gate; [] if it counts."""
    block = _block(result, task)
    if block is None:
        return ["it is of another suite or task"]
    reasons = []
    data = block.get("data_sha256")
    if data != evidence.data_sha256:
        reasons.append(f"its samples are others (data_sha256 {_short(data)})")
    count = answered(block)
    if count < evidence.min_samples:
        reasons.append(f"it has {count:,} samples, fewer than {evidence.min_samples:,}")
    reasons += _other_settings(evidence, result, block)
    weights = (result.get("candidate") or {}).get("weights_sha256")
    if weights is None:
        reasons.append("it does not say which weights it evaluated")
    elif not reasons and weights != version.weights_sha256:
        reasons.append("the weights have changed since")
    return reasons


def _other_settings(
    evidence: Evidence, result: Mapping[str, Any], block: Mapping[str, Any]
) -> Iterator[str]:
    for key, default, given in compared_settings(result, block):
        asked = evidence.settings.get(key, default)
        if given != asked:
            yield f"{key} is {given!r}, not {asked!r}"


def _short(sha256: Any) -> str:
    return str(sha256)[:_SHOWN_OF_HASH] if sha256 else "not recorded"


def _missing(name: str, version: JudgedVersion, evidence: Evidence) -> Verdict:
    """Return the verdict on a gate without an evaluation, with what the newest one lacks."""
    task = ".".join(name.split(".", 2)[:2])
    hint = f"make it with: {version.command(task.partition('.')[0])}"
    for result in version.results:
        if _block(result, task) is not None:
            why = "; ".join(_differences(evidence, task, result, version))
            text = f"{name}: the evaluation by {result.get('run')} does not count: {why}"
            return Verdict(False, f"{text}: {hint}")
    text = f"{version.name} v{version.number} has no evaluation of {task}"
    return Verdict(False, f"{name}: {text}: {hint}")


def _size(gate: Mapping[str, Any], version: JudgedVersion) -> Verdict:
    size = sum(path.stat().st_size for path in version.folder.glob("*.safetensors")) / 2**30
    limit = gate["size_gib_at_most"]
    return Verdict(size <= limit, f"size {size:.3g} GiB, at most {limit:g}")


def _metric(
    gate: Mapping[str, Any],
    version: JudgedVersion,
    evidence: Evidence,
    counting: Sequence[Mapping[str, Any]],
) -> Iterator[Verdict]:
    name = str(gate["metric"])
    result = next((each for each in counting if name in figures(each)), None)
    if result is None:
        known = sorted({key for each in counting for key in figures(each)})
        if known:
            yield Verdict(False, f"{name}: the evaluation has no such figure{nearest(name, known)}")
        else:
            yield _missing(name, version, evidence)
        return
    value, run = figures(result)[name], _name(result)
    if "at_least" in gate:
        limit = gate["at_least"]
        yield Verdict(value >= limit, f"{name} is {value:.4g}, at least {limit:g}", run)
    if "at_most" in gate:
        limit = gate["at_most"]
        yield Verdict(value <= limit, f"{name} is {value:.4g}, at most {limit:g}", run)
    if "not_worse_than" in gate:
        yield _not_worse(gate, name, version, counting)


def _name(result: Mapping[str, Any]) -> str:
    return str(result.get("run") or result.get("file"))


def _not_worse(
    gate: Mapping[str, Any],
    name: str,
    version: JudgedVersion,
    counting: Sequence[Mapping[str, Any]],
) -> Verdict:
    alias = str(gate["not_worse_than"])
    other = version.aliases.get(alias)
    if other is None:
        return Verdict(True, f"{name}: there is no {alias} yet to compare with")
    weights = content_sha256(other)
    if version.promoted_sha256.get(alias, weights) != weights:
        return Verdict(
            False,
            f"{name}: {other}, the {alias}, has changed since it was promoted: restore it, or move "
            f"the alias back with: cookbook promote {version.name} --rollback {alias}",
        )
    if other.resolve() == version.folder.resolve():
        return Verdict(True, f"{name}: it is the {alias} itself")
    suite, task, metric = name.split(".", 2)
    for result in counting:
        if (result.get("against") or {}).get("weights_sha256") != weights:
            continue
        block = ((result.get("tasks") or {}).get(task) or {}).get("metrics", {}).get(metric, {})
        change = (block.get("all") or {}).get("difference")
        if change:
            return _compared(gate, name, alias, change, _name(result))
    return Verdict(
        False,
        f"{name}: not compared with the present {alias}: {version.command(suite)} "
        f"--against models:/{version.name}@{alias}",
    )


def _compared(
    gate: Mapping[str, Any], name: str, alias: str, change: Mapping[str, Any], run: str
) -> Verdict:
    alpha = float(gate.get("alpha") or 0.05)
    up = gate.get("higher_is_better", not name.endswith(".perplexity"))
    value, p = float(change["value"]), float(change["p"])
    worse = value < 0 if up else value > 0
    text = f"{name} differs from the {alias} by {value:+.4g} (p {p:.3g}, alpha {alpha:g})"
    return Verdict(not (worse and p <= alpha), text, run)
