"""Datasets of the hub, copied into Parquet files once."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from plugins.data import parquet
from plugins.data.errors import DataError, first_line
from plugins.data.inputs import Input
from runspec import files, publish
from runspec.files import patient_json

# Rows of a stored file.
_STORED_ROWS = 200_000


def copied(
    source: Mapping[str, Any],
    name: str,
    folder: Path,
    where: str,
    limit: int | None,
    say: Callable[[str], None],
) -> list[Input]:
    """Copy a dataset into Parquet files unless they exist, and return them.

    limit: maximum number of rows.
    """
    note = folder / "_origin.json"
    asked = {key: source.get(key) for key in ("repository", "split")} | {"limit": limit}
    known = patient_json(note) or {}
    if known.get("asked") != asked:
        say(f"{where}: fetching its rows once")
        with publish.folder(folder, "replace", flush=True) as temporary:
            origin = _store(source, temporary, where, limit)
            files.write_json(temporary / note.name, {"asked": asked, "origin": origin})
        known = files.read_json(note)
    made = []
    for place, path in enumerate(sorted(folder.glob("*.parquet"))):
        rows, blocks = parquet.checked(path, where)
        facts, digest, origin = path.stat(), files.sha256(path), str(known["origin"])
        what = name, str(path), "parquet", facts.st_size, digest, origin, rows
        first = 1 + place * _STORED_ROWS
        made.append(Input(*what, first, facts.st_mtime_ns, tuple(blocks)))
    return made


def _store(source: Mapping[str, Any], folder: Path, where: str, limit: int | None) -> str:
    """Write the rows as Parquet files of _STORED_ROWS each; return the name of their origin."""
    from datasets import load_dataset

    name, _, revision = str(source["repository"]).partition("@")
    split = str(source.get("split") or "train")
    try:
        dataset = load_dataset(name, split=split, revision=revision or None)
    except Exception as error:
        raise DataError(
            f"{where}: {name} (split {split}) cannot be loaded: {first_line(error)}: compute nodes "
            "often reach no hub; run it once on the login node"
        ) from None
    count = min(len(dataset), limit or len(dataset))
    if not count:
        raise DataError(f"{where}: has no rows")
    for number, begin in enumerate(range(0, count, _STORED_ROWS)):
        part = dataset.select(range(begin, min(begin + _STORED_ROWS, count)))
        part.to_parquet(folder / f"part-{number:05d}.parquet")
    checksums = sorted(dataset.info.download_checksums or {})
    return f"{name}@{revision or 'main'} {split} {' '.join(checksums[:3])}".strip()
