"""Reads Parquet files in batches, large ones in blocks of row groups."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from plugins.data.errors import DataError

BATCH_ROWS = 20_000
# A larger file is cut at its row groups into tasks of about half of this.
LARGE = 256 * 2**20


def batches(block: Mapping[str, Any], wanted: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """Yield (row numbers, batch) of a block: the wanted columns, or all if one is missing."""
    import numpy as np
    import pyarrow.parquet as pq

    with pq.ParquetFile(str(block["file"])) as file:
        known = file.schema_arrow.names
        chosen = list(wanted) if set(wanted) <= set(known) else known
        row = int(block.get("line", 1))
        groups = block.get("row_groups")
        for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=chosen):
            if batch.num_rows:
                yield np.arange(row, row + batch.num_rows), batch
            row += batch.num_rows


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
