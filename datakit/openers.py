"""Opens files of sources: plain or compressed, whole, by lines or by blocks."""

import bz2
import gzip
import hashlib
import io
import lzma
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from datakit.errors import DataError

# One task of the reader: about a second of work.
BLOCK_BYTES = 16 * 2**20
_PIECE = 2**20


def stream(path: str) -> IO[bytes]:
    """Open a file for its uncompressed bytes."""
    suffix = Path(path).suffix
    if suffix == ".gz":
        return gzip.open(path, "rb")
    if suffix == ".bz2":
        return bz2.open(path, "rb")
    if suffix == ".xz":
        return lzma.open(path, "rb")
    if suffix == ".zst":
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(path), "zstd"))
    return open(path, "rb")


def whole(block: Mapping[str, Any]) -> bytes:
    """Return all uncompressed bytes of a file."""
    with _told(block), stream(str(block["file"])) as file:
        return file.read()


def lines(block: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the lines of a block, without their ends."""
    limit = block.get("max_rows")
    with _told(block), stream(str(block["file"])) as file:
        if block.get("begin"):
            file.seek(int(block["begin"]))
        left = None if block.get("end") is None else int(block["end"]) - int(block.get("begin", 0))
        for number, line in enumerate(file, 1):
            if left is not None:
                if left <= 0:
                    return
                left -= len(line)
            yield line.rstrip(b"\r\n")
            if limit is not None and number >= limit:
                return


class _told:
    """Turns an error of a broken file into one line that names it."""

    def __init__(self, block: Mapping[str, Any]) -> None:
        self._file = str(block["file"])

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, (OSError, EOFError, lzma.LZMAError)):
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"{self._file}: cannot be read: {reason}: fix or replace it") from None


def check_parquet(path: Path, where: str) -> None:
    """Raise DataError unless a file ends as Parquet does, which a file that was cut does not."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        pq.read_metadata(path)
    except pa.ArrowInvalid as error:
        reason = str(error).partition(". ")[0].rstrip(".")
        raise DataError(
            f"{where}: {path} is no whole Parquet file ({reason}): copy it again, or set type="
        ) from None


def survey(path: Path, cut: bool) -> tuple[str, list[dict[str, Any]]]:
    """Read a file once: its SHA-256, and its blocks if it can be cut at lines.

    Returns:
        The hash, and blocks with begin, end (bytes) and line (of the first, from 1).
    """
    digest = hashlib.sha256()
    blocks: list[dict[str, Any]] = []
    begin = position = 0
    line = seen = 1
    with _told({"file": path}), open(path, "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            if cut:
                last = piece.rfind(b"\n")
                if last >= 0 and position + last + 1 - begin >= BLOCK_BYTES:
                    end = position + last + 1
                    blocks.append({"begin": begin, "end": end, "line": line})
                    line = seen + piece.count(b"\n", 0, last + 1)
                    begin = end
                seen += piece.count(b"\n")
            position += len(piece)
    if not cut or position > begin or not blocks:
        blocks.append({"begin": begin, "end": position if cut else None, "line": line})
    return digest.hexdigest(), blocks


def rows_of(block: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the records of a block that an earlier reader holds or stored."""
    yield from block["rows"]
