"""The gates of an alias: what a version must show before it gets it. Files in configs/gates/."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import yamlfile
from launcher.errors import RecipeFault, UsageFault, nearest
from launcher.tracking.facts import figures
from runspec.keys.key import Key, faults

_KEYS = {
    key.name: key
    for key in (
        Key("description", "text", "One line about the gates."),
        Key("aliases", "texts", "The aliases that they guard.", ["staging", "champion"]),
        Key("gates", "list", "The gates."),
    )
}
_GATE = {
    key.name: key
    for key in (
        Key("metric", "text", "suite.task.metric of an evaluation."),
        Key("at_least", "any", "Lowest value that passes."),
        Key("at_most", "any", "Highest value that passes."),
        Key("not_worse_than", "text", "An alias; its version is compared by a paired test."),
        Key("higher_is_better", "flag", "Of not_worse_than.", True),
        Key("alpha", "number", "Of not_worse_than: a worse mean passes if p is above it.", 0.05),
        Key("size_gib_at_most", "number", "Size of the weights."),
        Key("latency_p95_s_at_most", "number", "Of the answers of `task`."),
        Key("task", "text", "suite.task, of latency and forbidden."),
        Key("forbidden", "texts", "Regular expressions that no answer of `task` may hold."),
    )
}
_KINDS = ("metric", "size_gib_at_most", "latency_p95_s_at_most", "forbidden")


@dataclass(frozen=True)
class Verdict:
    """One gate's answer: whether it is passed, and the words with the figures."""

    passed: bool
    words: str


@dataclass(frozen=True)
class Subject:
    """What gates judge: a version's folder and its evaluations, newest first.

    compared: the folder of the version behind each alias, None if the alias names none.
    """

    label: str
    folder: Path
    results: Sequence[Mapping[str, Any]]
    compared: Mapping[str, Path | None]


def load(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the aliases that a file of gates guards, and its gates.

    Raises:
        RecipeFault: every fault of the file.
    """
    config = yamlfile.load(path)
    found = [fault.text for fault in faults(config, _KEYS)]
    gates = config.get("gates")
    for number, gate in enumerate(gates if isinstance(gates, list) else [], 1):
        where = f"gate {number}"
        if not isinstance(gate, dict):
            found.append(f"{where} must be a block of 'key: value' lines")
            continue
        found += [f"{fault.text} in {where}" for fault in faults(gate, _GATE)]
        kinds = [kind for kind in _KINDS if kind in gate]
        if len(kinds) != 1:
            found.append(f"{where} must have one of {', '.join(_KINDS)}, and has {len(kinds)}")
        elif kinds == ["metric"] and not {"at_least", "at_most", "not_worse_than"} & set(gate):
            found.append(f"{where} needs at_least, at_most or not_worse_than")
        elif kinds[0] in ("forbidden", "latency_p95_s_at_most") and not gate.get("task"):
            found.append(f"{where} needs task: suite.task")
        found += [
            f"{where}: {key} must be a number, got {gate[key]!r}"
            for key in ("at_least", "at_most")
            if key in gate and type(gate[key]) not in (int, float)
        ]
        patterns = gate.get("forbidden")
        for pattern in patterns if isinstance(patterns, list) else []:
            try:
                re.compile(str(pattern))
            except re.error as error:
                found.append(f"{where}: forbidden holds {pattern!r}: {error}")
    if found:
        raise RecipeFault([f"{text}, in {path}" for text in found])
    return list(config.get("aliases") or ["staging", "champion"]), list(gates or [])


def judge(gates: Sequence[Mapping[str, Any]], subject: Subject) -> Iterator[Verdict]:
    """Yield what each gate says of a version."""
    for gate in gates:
        if "size_gib_at_most" in gate:
            yield _size(gate, subject)
        elif "forbidden" in gate:
            yield _forbidden(gate, subject)
        elif "latency_p95_s_at_most" in gate:
            yield _latency(gate, subject)
        else:
            yield from _metric(gate, subject)


def _size(gate: Mapping[str, Any], subject: Subject) -> Verdict:
    size = sum(path.stat().st_size for path in subject.folder.glob("*.safetensors")) / 2**30
    limit = gate["size_gib_at_most"]
    return Verdict(size <= limit, f"size {size:.3g} GiB, at most {limit:g}")


def _make_it(name: str) -> str:
    """Return the command that makes the figures of suite.task or suite.task.metric."""
    return f"make it with: cookbook eval ... --suite {name.partition('.')[0]}"


def _metric(gate: Mapping[str, Any], subject: Subject) -> Iterator[Verdict]:
    name = str(gate["metric"])
    for result in subject.results:
        known = figures(result)
        if name in known:
            break
    else:
        every = sorted({key for result in subject.results for key in figures(result)})
        hint = nearest(name, every) if every else ""
        words = f"{name}: {subject.label} has no such figure{hint}"
        yield Verdict(False, f"{words}: {_make_it(name)}")
        return
    value = known[name]
    if "at_least" in gate:
        limit = gate["at_least"]
        yield Verdict(value >= limit, f"{name} is {value:.4g}, at least {limit:g}")
    if "at_most" in gate:
        limit = gate["at_most"]
        yield Verdict(value <= limit, f"{name} is {value:.4g}, at most {limit:g}")
    if "not_worse_than" in gate:
        yield _not_worse(gate, name, subject)


def _not_worse(gate: Mapping[str, Any], name: str, subject: Subject) -> Verdict:
    alias = str(gate["not_worse_than"])
    other = subject.compared.get(alias)
    if other is None:
        return Verdict(True, f"{name}: there is no {alias} yet to be compared with")
    if other.resolve() == subject.folder.resolve():
        return Verdict(True, f"{name}: it is the {alias} itself")
    suite, task, metric = name.split(".", 2)
    for result in subject.results:
        against = result.get("against") or {}
        if result.get("suite") != suite or against.get("folder") != str(other.resolve()):
            continue
        block = ((result.get("tasks") or {}).get(task) or {}).get("metrics", {}).get(metric, {})
        found = (block.get("all") or {}).get("difference")
        if found:
            return _compared(gate, name, alias, found, metric)
    return Verdict(
        False,
        f"{name}: not compared with the present {alias}: cookbook eval ... --suite {suite} "
        f"--against models:/NAME@{alias}",
    )


def _compared(
    gate: Mapping[str, Any], name: str, alias: str, found: Mapping[str, Any], metric: str
) -> Verdict:
    alpha = float(gate.get("alpha") or 0.05)
    up = gate.get("higher_is_better", metric != "perplexity")
    change, p = float(found["value"]), float(found["p"])
    worse = change < 0 if up else change > 0
    words = f"{name} differs from the {alias} by {change:+.4g} (p {p:.3g}, alpha {alpha:g})"
    return Verdict(not (worse and p <= alpha), words)


def _of_task(gate: Mapping[str, Any], subject: Subject) -> tuple[Mapping[str, Any], str] | None:
    suite, _, task = str(gate["task"]).partition(".")
    for result in subject.results:
        if result.get("suite") == suite and task in (result.get("tasks") or {}):
            return result, task
    return None


def _latency(gate: Mapping[str, Any], subject: Subject) -> Verdict:
    found, limit = _of_task(gate, subject), gate["latency_p95_s_at_most"]
    speed = (found[0]["tasks"][found[1]].get("speed") or {}).get("candidate") if found else None
    if not speed:
        words = f"{gate['task']}: {subject.label} has no measured latency of it"
        return Verdict(False, f"{words}: {_make_it(gate['task'])}")
    value = float(speed["latency_p95_s"])
    return Verdict(
        value <= limit, f"{gate['task']}: latency p95 is {value:.3g} s, at most {limit:g}"
    )


def _forbidden(gate: Mapping[str, Any], subject: Subject) -> Verdict:
    found = _of_task(gate, subject)
    if found is None:
        words = f"{gate['task']}: {subject.label} has no answers of it"
        return Verdict(False, f"{words}: {_make_it(gate['task'])}")
    path = Path(str(found[0].get("file", ""))).with_suffix("")
    samples = path.with_name(f"{path.name}.samples.jsonl")
    patterns, count, hits, first = [re.compile(p) for p in gate["forbidden"]], 0, 0, ""
    try:
        with open(samples, encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                if row.get("task") != found[1]:
                    continue
                count += 1
                answer = str((row.get("candidate") or {}).get("answer", ""))
                match = next((p.pattern for p in patterns if p.search(answer)), None)
                if match is not None:
                    hits += 1
                    first = first or f", first sample {row['index']} by {match!r}"
    except (OSError, ValueError) as error:
        return Verdict(False, f"{gate['task']}: {samples} cannot be read: {error}")
    if not count:
        return Verdict(False, f"{gate['task']}: {samples} holds no answer of it")
    return Verdict(
        hits == 0, f"{gate['task']}: {hits} of {count} answers hold what is forbidden{first}"
    )


def find(folder: Path, name: str) -> Path:
    """Return the file of gates of a name or path; UsageFault if there is none."""
    path = Path(name).expanduser() if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.is_file():
        known = sorted(each.stem for each in folder.glob("*.yaml"))
        raise UsageFault(
            f"there are no gates {name!r}{nearest(name, known)}: one of "
            f"{', '.join(known)}, or a path"
        )
    return path
