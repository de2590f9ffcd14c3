"""What is different between two runs: configuration, code, packages, data, outcome."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from launcher import paths
from launcher.look.outcome import configuration
from launcher.look.results import compare, table
from launcher.look.text import plain
from launcher.run.directory import Run

_CHANGES = "uncommitted changes"


@dataclass(frozen=True)
class Difference:
    """One thing that differs. part: configuration, code, packages, system, model or data."""

    part: str
    name: str
    before: Any
    after: Any

    @property
    def text(self) -> str:
        return f"{self.name}  {self._shown(self.before)} -> {self._shown(self.after)}"

    def _shown(self, value: Any) -> str:
        if self.name == _CHANGES and value != "none":
            return f"{len(str(value).splitlines())} lines"
        return "(not set)" if value is None else str(value)


def differences(one: Run, other: Run) -> list[Difference]:
    """Return what two runs were given that was not the same."""
    before, after = _facts(one), _facts(other)
    first, second = one.provenance, other.provenance
    left_out = set()
    if (used := _block(first, "kit").get("sha256")) and used == _block(second, "kit").get("sha256"):
        left_out.add("code")  # the same code, whatever was committed meanwhile
    if not ("data" in first and "data" in second):
        left_out.add("data")  # a run of an earlier version has no record of it
    return [
        Difference(*key, before.get(key), after.get(key))
        for key in {**before, **after}
        if before.get(key) != after.get(key) and key[0] not in left_out
    ]


def _facts(run: Run) -> dict[tuple[str, str], Any]:
    """Return all that a run was given, by part and name."""
    record = run.provenance
    kit, model = _block(record, "kit"), _block(record, "model")
    parts: dict[str, Mapping[str, Any]] = {
        "configuration": configuration(run),
        "code": {
            "commit": kit.get("commit"),
            _CHANGES: str(kit.get("diff") or "none"),
            "untracked files": ", ".join(map(str, kit.get("untracked") or [])) or "none",
        },
        "packages": dict(str(each).partition("==")[::2] for each in _list(record, "packages")),
        "system": {name: record.get(name) for name in ("python", "slurm")},
        "model": {name: model.get(name) for name in ("folder", "revision")},
        "data": {
            paths.own_name(str(each.get("file"))): each.get("sha256") or each.get("bytes")
            for each in _list(record, "data")
            if isinstance(each, dict)
        },
    }
    return {(part, name): value for part, block in parts.items() for name, value in block.items()}


def _block(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def _list(record: Mapping[str, Any], name: str) -> list[Any]:
    value = record.get(name)
    return value if isinstance(value, list) else []


def verdict(changed: list[Difference]) -> str:
    """Say whether only one thing changed, so that it explains the outcome."""
    if not changed:
        return "nothing recorded differs: differences in the outcome are random"
    # One commit may change many things, and so may a package; each counts as one here.
    if len(changed) == 1:
        return f"one thing changed: {changed[0].part}, {changed[0].text}"
    counts = Counter(each.part for each in changed)
    counted = ", ".join(f"{count} in {part}" for part, count in counts.items())
    return f"{len(changed)} things changed ({counted}): the outcome cannot be attributed to one"


def lines(one: Run, other: Run) -> Iterator[str]:
    """Yield the comparison of two runs for a person to read."""
    yield plain(f"A  {one.name}")
    yield plain(f"B  {other.name}")
    changed = differences(one, other)
    for part in dict.fromkeys(each.part for each in changed):
        yield part
        for each in changed:
            if each.part == part:
                yield plain(f"  {each.text}")
    yield "outcome"
    rows, _ = compare([one, other])
    rows.sort(key=lambda row: bool(row["run"] != one.name))
    yield from (f"  {line}" for line in table(rows, ()))
    yield plain(verdict(changed))
