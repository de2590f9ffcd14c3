"""A prepared training set: the files of its directory, and how a recipe names it.

<datasets root>/prepared/<name>/current -> <version>    the newest one, replaced atomically
<datasets root>/prepared/<name>/<version>/
    data/<split>/part-*.parquet      the rows
    card.json                        what a reader needs: format, splits, counts, hashes
    lineage.json                     inputs, recipe, versions, engine, counts of each step
    removed/<step>/part-*.parquet    which rows each step removed, and in favour of which
    bad_rows.jsonl                   what no format could read, with file, line and reason
"""

import re
from pathlib import Path
from typing import Any

from runspec import files
from runspec.files import patient_json

CARD = "card.json"
LINEAGE = "lineage.json"
BAD_ROWS = "bad_rows.jsonl"
DATA = "data"
REMOVED = "removed"
CURRENT = "current"
FOLDER = "prepared"
COMPONENT = "trainer.data.prepared.prepared_dataset"
# The keys of a recipe that take prepared:NAME@SPLIT.
BLOCKS = ("dataset", "dataset_val")
# What an error says of it.
EXAMPLE = "prepared:NAME@SPLIT for a dataset that `cookbook data show` lists, as prepared:faq@train"
# Row ids: the number of the input file, then the line or row in it.
ROW_BITS = 40

_REFERENCE = re.compile(r"prepared:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,63})@(?P<split>\w+)")


def reference(value: Any) -> tuple[str, str] | None:
    """Return (name, split) of a text such as prepared:support@train, None for anything else."""
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return (match["name"], match["split"]) if match else None


def expanded(value: Any, before: Any = None) -> Any:
    """Return the block that a text such as prepared:support@train stands for; else the value.

    before: the block that it replaces, whose packing stays.
    """
    if (named := reference(value)) is None:
        return value
    kept = ("packed", "split_across_pack", "train_on_input")
    old = before if isinstance(before, dict) else {}
    return {
        "_component_": COMPONENT,
        "data_dir": f"${{datasets_root}}/{FOLDER}/{named[0]}/{CURRENT}/{DATA}/{named[1]}",
        **{key: old[key] for key in kept if key in old},
    }


def version_of(data_dir: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the version of a training set that a block's data_dir is in, with its card."""
    data = data_dir.resolve().parent
    card = patient_json(data.parent / CARD) if data.name == DATA else None
    return None if card is None else (data.parent, card)


def changes(data_dir: Path) -> list[str]:
    """Say what differs between a split's files and its card; a touched file is hashed again."""
    if (found := version_of(data_dir)) is None:
        return [f"{data_dir} has no {CARD}"]
    version, card = found
    split = data_dir.resolve().name
    noted = {each["file"]: each for each in card["splits"].get(split, {}).get("files", [])}
    there = {str(path.relative_to(version)) for path in data_dir.resolve().glob("*.parquet")}
    texts = [f"{name} is gone" for name in sorted(set(noted) - there)]
    texts += [f"{name} was added" for name in sorted(there - set(noted))]
    for name in sorted(there & set(noted)):
        facts, known = (version / name).stat(), noted[name]
        same = facts.st_size == known["bytes"]
        if same and facts.st_mtime_ns != known["mtime_ns"]:
            same = files.sha256(version / name) == known["sha256"]
        if not same:
            texts.append(f"{name} has changed")
    return texts
