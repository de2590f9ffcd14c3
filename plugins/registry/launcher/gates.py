"""Files of gates, in configs/gates/: what a version must show before it gets an alias."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher import yamlfile
from launcher.errors import RecipeFault, nearest
from plugins.evaluate.recipe_keys import COMPARED, COMPARED_OF_TASK
from runspec.keys.key import REQUIRED, Key, faults, table

_KEYS = table(
    Key("description", "text", "One line about the gates."),
    Key("aliases", "texts", "The aliases that they guard.", ["staging", "champion"]),
    Key("evaluations", "open block", "By suite.task: the evaluation that counts."),
    Key("gates", "list", "The gates."),
)
_EVALUATION = table(
    Key("data_sha256", "text", "Hash of the samples.", REQUIRED),
    Key("min_samples", "positive", "Fewest samples that the model answered.", REQUIRED),
    Key("settings", "open block", "Settings of the suite; the others have their defaults."),
)
_GATE = table(
    Key("metric", "text", "suite.task.metric of an evaluation."),
    Key("at_least", "any", "Lowest value that passes."),
    Key("at_most", "any", "Highest value that passes."),
    Key("not_worse_than", "text", "An alias; its version is compared by a paired test."),
    Key("higher_is_better", "flag", "Of not_worse_than.", True),
    Key("alpha", "number", "Of not_worse_than: a worse mean passes if p is above it.", 0.05),
    Key("size_gib_at_most", "number", "Size of the weights."),
)
_KINDS = ("metric", "size_gib_at_most")


@dataclass(frozen=True)
class Evidence:
    """The evaluation of a task that counts."""

    # Of its samples.
    data_sha256: str
    # How many samples the model answered at least.
    min_samples: int
    # Of the suite and the task; those that are not listed have their defaults.
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Gates:
    """A file of gates."""

    # The aliases that they guard.
    aliases: list[str]
    # By suite.task.
    evaluations: Mapping[str, Evidence]
    gates: list[dict[str, Any]]
    # The file's path, and its content.
    origin: str
    text: str


def load(path: Path) -> Gates:
    """Return a file of gates.

    Raises:
        RecipeFault: every fault of the file.
    """
    yamlfile.load(path)
    return of_text(path.read_text(encoding="utf-8"), str(path.absolute()))


def of_text(text: str, origin: str) -> Gates:
    """Return the gates in the text of a file.

    Raises:
        RecipeFault: every fault of the text.
    """
    config = yamlfile.parse(text, origin)
    texts = [fault.text for fault in faults(config, _KEYS)]
    evaluations = config.get("evaluations")
    evaluations = evaluations if isinstance(evaluations, dict) else {}
    for task, block in evaluations.items():
        texts += _faults_of_evaluation(str(task), block)
    gates = config.get("gates")
    for number, gate in enumerate(gates if isinstance(gates, list) else [], 1):
        where = f"gate {number}"
        if not isinstance(gate, dict):
            texts.append(f"{where} must be a block of 'key: value' lines")
            continue
        texts += _faults_of_gate(where, gate)
        task = task_of(gate)
        if task and task not in evaluations:
            texts.append(
                f"{where} is about {task}, and evaluations has no block {task}: print one from a "
                "finished evaluation with: cookbook eval MODEL --results --as-gates"
            )
    if texts:
        raise RecipeFault([f"{fault}, in {origin}" for fault in texts])
    counting = {
        str(task): Evidence(**{key: value for key, value in block.items() if value is not None})
        for task, block in evaluations.items()
    }
    aliases = list(config.get("aliases") or ["staging", "champion"])
    return Gates(aliases, counting, list(gates or []), origin, text)


def task_of(gate: Mapping[str, Any]) -> str:
    """Return the suite.task that a gate is about, '' for one about the weights alone."""
    return ".".join(str(gate.get("metric") or "").split(".", 2)[:2])


def _faults_of_evaluation(task: str, block: Any) -> Iterator[str]:
    where = f"evaluations.{task}"
    if task.count(".") != 1:
        yield f"{where}: the name must be suite.task"
    if not isinstance(block, dict):
        yield f"{where} must be a block of 'key: value' lines"
        return
    for fault in faults(block, _EVALUATION):
        yield f"{fault.text} in {where}"
    settings = block.get("settings")
    known = (*COMPARED, *COMPARED_OF_TASK)
    for key in settings if isinstance(settings, dict) else ():
        if key not in known:
            yield f"{where}.settings: unknown key {key!r}{nearest(str(key), known)}"


def _faults_of_gate(where: str, gate: Mapping[str, Any]) -> Iterator[str]:
    for fault in faults(gate, _GATE):
        yield f"{fault.text} in {where}"
    kinds = [kind for kind in _KINDS if kind in gate]
    if len(kinds) != 1:
        yield f"{where} must have one of {', '.join(_KINDS)}, and has {len(kinds)}"
    elif kinds == ["metric"] and not {"at_least", "at_most", "not_worse_than"} & set(gate):
        yield f"{where} needs at_least, at_most or not_worse_than"
    for key in ("at_least", "at_most"):
        if key in gate and type(gate[key]) not in (int, float):
            yield f"{where}: {key} must be a number, got {gate[key]!r}"
