"""Opens files of sources, plain or compressed: complete, by lines or by blocks."""

import bz2
import codecs
import gzip
import hashlib
import io
import lzma
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from plugins.data.errors import DataError

# One task of the reader: about a second of work.
BLOCK_BYTES = 16 * 2**20
_PIECE = 2**20
UTF8_MARK = codecs.BOM_UTF8
# UTF-32's first mark begins with one of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (UTF8_MARK, "utf-8-sig"),
)


def stream(path: str) -> IO[bytes]:
    """Open a file for its uncompressed bytes."""
    suffix = Path(path).suffix
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if suffix == ".bz2":
        return bz2.open(path, "rb")
    if suffix == ".xz":
        return lzma.open(path, "rb")
    if suffix == ".zst":
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(path), "zstd"))
    return open(path, "rb")


def encoding_of(path: Path, given: object, where: str) -> str:
    """Return the encoding of a text file: as given, else by its byte order mark, else UTF-8.

    Raises:
        DataError: the file looks like UTF-16 or UTF-32 without a byte order mark.
    """
    with _named(path), stream(str(path)) as file:
        first = file.read(4)
    if given:
        # UTF-8 with a mark is UTF-8 too.
        is_utf8 = codecs.lookup(str(given)).name == "utf-8"
        return "utf-8-sig" if is_utf8 and first.startswith(UTF8_MARK) else str(given)
    for mark, name in _MARKS:
        if first.startswith(mark):
            return name
    if b"\0" in first:
        little = "le" if first[1:2] == b"\0" else "be"
        raise DataError(
            f"{where}: {path} has zero bytes in its text and no byte order mark: set "
            f"encoding=utf-16-{little} of the source if it is UTF-16, or type="
        )
    return "utf-8"


def ends_lines_as_ascii(encoding: str) -> bool:
    """Whether a line ends with the byte of a newline, so that a file can be split there."""
    return "a\n".encode(encoding).endswith(b"a\n")


def whole(block: Mapping[str, Any]) -> bytes:
    """Return all uncompressed bytes of a file."""
    with _named(block["file"]), stream(str(block["file"])) as file:
        return file.read()


def lines(block: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the lines of a block without line ends, as UTF-8 if a newline has several bytes."""
    begin, encoding = int(block.get("begin") or 0), str(block["encoding"])
    left = None if block.get("end") is None else int(block["end"]) - begin
    with _named(block["file"]), stream(str(block["file"])) as file:
        if not ends_lines_as_ascii(encoding):
            for text in io.TextIOWrapper(file, encoding=encoding, newline="\n"):
                yield text.rstrip("\r\n").encode("utf-8", "surrogatepass")
            return
        if begin:
            file.seek(begin) if file.seekable() else file.read(begin)
        for line in file:
            if left is not None:
                if left <= 0:
                    return
                left -= len(line)
            yield line.rstrip(b"\r\n")


@contextmanager
def _named(file: object) -> Iterator[None]:
    """Turn an error of a broken file into one line that names it."""
    try:
        yield
    except UnicodeError as error:
        encoding = getattr(error, "encoding", "text")
        raise DataError(f"{file}: is not {encoding}: set encoding= of the source") from None
    except (OSError, EOFError, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{file}: cannot be read: {reason}: fix or replace it") from None


def survey(path: Path, cut: bool) -> tuple[str, list[dict[str, Any]]]:
    """Read a file once: its SHA-256, and its blocks if it can be split at lines.

    Returns:
        The hash, and blocks with begin, end (bytes), line (number of the first, from 1) and lines
        (their number).
    """
    digest = hashlib.sha256()
    blocks: list[dict[str, Any]] = []
    begin = position = 0
    line = seen = 1
    with _named(path), open(path, "rb") as file:
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
    if cut:
        begins = [block["line"] for block in blocks] + [seen]
        for block, end in zip(blocks, begins[1:], strict=True):
            block["lines"] = end - block["line"]
    return digest.hexdigest(), blocks
