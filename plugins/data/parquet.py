"""Reads Parquet in batches: a file as it is, or with the schema of its Delta or Iceberg table."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plugins.data.errors import DataError

BATCH_ROWS = 20_000
# A larger file is cut at its row groups into tasks of about half of this.
LARGE = 256 * 2**20
FIELD_ID = b"PARQUET:field_id"


@dataclass(frozen=True)
class Layout:
    """How a file of a Delta or Iceberg table stores the columns of the table."""

    # The table's, in Arrow.
    schema: Any
    # For each path of names in it, such as ("messages", "role"), the field's name in files, or its
    # id as text.
    keys: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    # Keys are field ids.
    by_id: bool = False
    # Values of columns that a file may lack.
    constants: Mapping[str, Any] = field(default_factory=dict)
    # A NumPy file with a flag per row, None for all rows.
    kept: str | None = None

    def key(self, path: tuple[str, ...]) -> str:
        """Return the name of a field of the table in its files."""
        return self.keys.get(path, path[-1])

    def columns(self, schema: Any) -> dict[str, str]:
        """Return {column of the table: column of the file} for those that a file has."""
        there = {_key(each, self.by_id): each.name for each in schema}
        wanted = {name: self.key((name,)) for name in self.schema.names}
        return {name: there[key] for name, key in wanted.items() if key in there}

    def conformed(self, name: str, values: Any) -> Any:
        """Return a file's column with the table's type, and the table's names of its fields."""
        import pyarrow as pa

        want = self.schema.field(name).type
        if values.type == want:
            return values
        try:
            # The same bytes under the table's names; the cast fills fields that the file lacks.
            named = values.view(self._renamed(values.type, want, (name,)))
            return named.cast(want, safe=pa.types.is_nested(want))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(
                f"column {name!r} is {values.type} and in its table {want}, which it cannot be "
                f"converted to ({str(error).splitlines()[0]}): rewrite the table"
            ) from None

    def _renamed(self, have: Any, want: Any, path: tuple[str, ...]) -> Any:
        import pyarrow as pa

        if pa.types.is_struct(have) and pa.types.is_struct(want):
            names = {self.key((*path, each.name)): each for each in want}
            fields = []
            for place, each in enumerate(have):
                known = names.get(_key(each, self.by_id))
                if known is None:
                    # It must not be read as a field of the table with the same name.
                    fields.append(pa.field(f"dropped {place}", each.type))
                    continue
                kind = self._renamed(each.type, known.type, (*path, known.name))
                fields.append(pa.field(known.name, kind))
            return pa.struct(fields)
        if pa.types.is_list(have) and pa.types.is_list(want):
            return pa.list_(self._renamed(have.value_type, want.value_type, (*path, "element")))
        return have


def _key(each: Any, by_id: bool) -> str:
    return (each.metadata or {}).get(FIELD_ID, b"").decode() if by_id else str(each.name)


@contextmanager
def opened(path: str) -> Iterator[Any]:
    """Open a Parquet file, on this host or on a filesystem that Arrow supports."""
    import pyarrow.fs as fs
    import pyarrow.parquet as pq

    if "://" in path:
        system, inner = fs.FileSystem.from_uri(path)
        with system.open_input_file(inner) as source, pq.ParquetFile(source) as file:
            yield file
        return
    with pq.ParquetFile(path) as file:
        yield file


def batches(block: Mapping[str, Any], wanted: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """Yield (row numbers, batch) of a block: the wanted columns, or all if one is missing.

    Row numbers count from 1, deleted rows too.
    """
    import numpy as np
    import pyarrow as pa

    with opened(str(block["file"])) as file:
        layout: Layout = block.get("layout") or Layout(file.schema_arrow)
        known = layout.schema.names
        chosen = list(wanted) if set(wanted) <= set(known) else list(known)
        places = layout.columns(file.schema_arrow)
        in_file = [places[name] for name in chosen if name in places]
        kept = None if layout.kept is None else np.load(layout.kept, "r")
        row = int(block.get("line", 1))
        groups = block.get("row_groups")
        for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=in_file):
            numbers = np.arange(row, row + batch.num_rows)
            row += batch.num_rows
            batch = _of_table(batch, chosen, places, layout)
            if kept is not None:
                flags = np.array(kept[numbers[0] - 1 : row - 1]) if len(numbers) else kept[:0]
                numbers, batch = numbers[flags], batch.filter(pa.array(flags))
            if len(numbers):
                yield numbers, batch


def _of_table(batch: Any, chosen: list[str], places: Mapping[str, str], layout: Layout) -> Any:
    import pyarrow as pa

    columns = []
    for name in chosen:
        kind = layout.schema.field(name).type
        if name in places:
            columns.append(layout.conformed(name, batch.column(places[name])))
        else:
            # A column that was added to the table after the file was written is null in it.
            value = pa.scalar(layout.constants.get(name), kind)
            columns.append(pa.repeat(value, batch.num_rows))
    return pa.record_batch(columns, names=chosen)


def checked(path: Path, where: str) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of rows of a Parquet file and its blocks.

    Raises:
        DataError: it has no footer, for example because it is incomplete.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        footer = pq.read_metadata(path)
    except pa.ArrowInvalid as error:
        reason = str(error).partition(". ")[0].rstrip(".")
        raise DataError(
            f"{where}: {path} is not a complete Parquet file ({reason}): copy it again, or set "
            "type="
        ) from None
    return footer.num_rows, cut(footer, path.stat().st_size)


def cut(footer: Any, size: int) -> list[dict[str, Any]]:
    """Return the blocks of a Parquet file: row groups, number of the first row, number of rows."""
    if size <= LARGE or footer.num_row_groups < 2:
        return [{"line": 1, "rows": footer.num_rows}]
    blocks: list[dict[str, Any]] = []
    row, held = 1, 0
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        if not blocks or held >= LARGE // 2:
            blocks.append({"line": row, "rows": 0, "row_groups": []})
            held = 0
        blocks[-1]["row_groups"].append(number)
        blocks[-1]["rows"] += group.num_rows
        held += size * group.num_rows // max(footer.num_rows, 1)
        row += group.num_rows
    return blocks
