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


@dataclass(frozen=True)
class Difference:
    """One thing that differs. part: configuration, code, packages, system, model or data."""

    part: str
    name: str
    before: Any
    after: Any

    @property
    def text(self) -> str:
        return f"{self.name}  {_value(self.before)} -> {_value(self.after)}"


def _value(value: Any) -> str:
    return "(not set)" if value is None else str(value)


def differences(one: Run, other: Run) -> list[Difference]:
    """Return what two runs were given that was not the same."""
    first, second = one.provenance, other.provenance
    changed = list(mapped("configuration", configuration(one), configuration(other)))
    changed += _code(_block(first, "kit"), _block(second, "kit"))
    changed += mapped("packages", packages_of(first), packages_of(second))
    system = ("python", "slurm")
    changed += mapped("system", _some(first, system), _some(second, system))
    model = ("folder", "revision")
    changed += mapped(
        "model", _some(_block(first, "model"), model), _some(_block(second, "model"), model)
    )
    # A run of an earlier version has no record of its data.
    if "data" in first and "data" in second:
        changed += mapped("data", _data(first), _data(second))
    return changed


def mapped(part: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield what differs between two mappings."""
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            yield Difference(part, name, before.get(name), after.get(name))


def _block(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def _some(record: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: record.get(name) for name in names}


def packages_of(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of the packages in a run's provenance by name."""
    given = record.get("packages")
    pairs = (str(each).partition("==")[::2] for each in given) if isinstance(given, list) else ()
    return dict(pairs)


def _data(record: Mapping[str, Any]) -> dict[str, Any]:
    given = record.get("data")
    listed = given if isinstance(given, list) else []
    files = [each for each in listed if isinstance(each, dict)]
    name = paths.own_name
    return {name(str(each.get("file"))): each.get("sha256") or each.get("bytes") for each in files}


def _code(before: dict[str, Any], after: dict[str, Any]) -> Iterator[Difference]:
    if before.get("sha256") and before.get("sha256") == after.get("sha256"):
        return  # the same code, whatever was committed meanwhile
    yield from mapped("code", _some(before, ("commit",)), _some(after, ("commit",)))
    old, new = str(before.get("diff") or ""), str(after.get("diff") or "")
    if old != new:
        yield Difference("code", "uncommitted changes", _size(old), _size(new))
    if before.get("untracked") != after.get("untracked"):
        yield Difference("code", "untracked files", _names(before), _names(after))


def _size(diff: str) -> str:
    return f"{len(diff.splitlines())} lines" if diff else "none"


def _names(kit: dict[str, Any]) -> str:
    return ", ".join(map(str, kit.get("untracked") or [])) or "none"


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
