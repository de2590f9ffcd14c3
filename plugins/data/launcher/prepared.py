"""What is known of prepared training sets: their cards and lineage."""

from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from launcher.errors import UsageFault, nearest
from launcher.look.text import plain
from runspec import files
from runspec.prepared import CARD, CURRENT, DATA, FOLDER, LINEAGE, ROW_BITS, changes


@dataclass(frozen=True)
class PreparedSet:
    """One version of a set."""

    name: str
    path: Path
    card: dict[str, Any]
    lineage: dict[str, Any]


def every(root: Path) -> list[dict[str, Any]]:
    """Return name, version, rows, splits and time of the newest version of each set."""
    sets = []
    for folder in sorted((root / "datasets" / FOLDER).glob("*/")):
        if card := files.peek(folder / CURRENT / CARD):
            splits = {name: each["rows"] for name, each in card["splits"].items()}
            version = (folder / CURRENT).resolve().name
            known = {"name": folder.name, "version": version, "rows": card["rows"]}
            sets.append({**known, "splits": splits, "created": card["created"]})
    return sets


def table(sets: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a list of sets."""
    lines = [f"{'NAME':24} {'ROWS':>12}  {'MADE':16}  SPLITS"]
    for each in sets:
        made = f"{datetime.fromtimestamp(each['created'], UTC):%Y-%m-%d %H:%M}"
        splits = ", ".join(f"{name} {rows:,}" for name, rows in each["splits"].items())
        lines.append(f"{each['name']:24} {each['rows']:>12,}  {made:16}  {splits}")
    return lines


def find(root: Path, text: str) -> PreparedSet:
    """Return a set by NAME, or by NAME@ and the beginning of a version."""
    name, _, version = text.partition("@")
    folder = root / "datasets" / FOLDER / name
    versions = sorted(path.parent.name for path in folder.glob(f"[!.]*/{CARD}"))
    versions = [each for each in versions if each != CURRENT]
    if not versions:
        hint = nearest(name, [each["name"] for each in every(root)])
        raise UsageFault(
            f"there is no prepared set {name!r}{hint}: list them with: cookbook data show"
        )
    fitting = [each for each in versions if each.startswith(version)] if version else [CURRENT]
    if len(fitting) != 1:
        raise UsageFault(
            f"{len(fitting)} versions of {name} begin with {version!r}; there are "
            f"{', '.join(versions)}"
        )
    path = (folder / fitting[0]).resolve()
    card, lineage = (files.read_object(path / each) for each in (CARD, LINEAGE))
    if card is None or lineage is None:
        raise UsageFault(
            f"{path} has no {CARD} and {LINEAGE}: prepare it again with: cookbook prepare"
        )
    return PreparedSet(name, path, card, lineage)


def story(one: PreparedSet) -> list[str]:
    """Return the description of a set, line by line."""
    card, lineage = one.card, one.lineage
    made = datetime.fromtimestamp(card["created"], UTC)
    lines = [f"{one.name}@{one.path.name}: {card['rows']:,} rows, format {card['format']}"]
    lines += [
        f"  made     {made:%Y-%m-%d %H:%M} UTC with {lineage['engine']}",
        f"  folder   {one.path}",
    ]
    for name, split in card["splits"].items():
        share = 100 * split["rows"] / card["rows"]
        lines.append(f"  split    {name:8} {split['rows']:>12,} rows  {share:5.2f} %")
    lines.append(f"  columns  {', '.join(card['columns'])}")
    for name, parts in _parts(one).items():
        many = f"  {len(parts):,} parts" if len(parts) > 1 else ""
        size = sum(each["bytes"] for each in parts)
        shown = f"  {size:,} bytes" if size else ""
        lines.append(f"  input    {plain(name)}{many}{shown}  {_digest(parts)[:12]}")
    if lineage["bad_rows"]:
        lines.append(
            f"  bad      {lineage['bad_rows']:,} rows could not be read: {one.path}/bad_rows.jsonl"
        )
    for step in lineage["steps"]:
        lines.append(
            f"  step     {step['step']:22} {step['rows_in']:>12,} -> {step['rows_out']:>12,}"
        )
    for name in card["splits"]:
        lines += [f"  warning  {name}: {fault}" for fault in changes(one.path / DATA / name)]
    return lines


def origin(one: PreparedSet, row: int) -> str:
    """Say which record a row was made of, from its id."""
    number, line = row >> ROW_BITS, row & (2**ROW_BITS - 1)
    inputs = {each["number"]: each for each in one.lineage["inputs"]}
    if number not in inputs or line < 1:
        raise UsageFault(f"{row} is not an id of {one.name}: read one from the column id")
    source = inputs[number]
    if source.get("first"):
        # It was read from a copy, which is gone.
        return f"row {source['first'] - 1 + line} of {source['origin']}"
    return f"{source['file']}, {'row' if source['type'] == 'parquet' else 'line'} {line}"


def _parts(one: PreparedSet) -> dict[str, list[dict[str, Any]]]:
    """Return the inputs of a set: each file, and the copies of each table, query or dataset."""
    by_origin: dict[str, list[dict[str, Any]]] = {}
    for each in one.lineage["inputs"]:
        by_origin.setdefault(each["origin"] or each["file"], []).append(each)
    return by_origin


def _digest(parts: list[dict[str, Any]]) -> str:
    hashes = [each["sha256"] for each in parts]
    return hashes[0] if len(hashes) == 1 else sha256("".join(hashes).encode()).hexdigest()
