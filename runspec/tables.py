"""Tables in text files: which character stands between their cells."""

import codecs
import csv
import io
from pathlib import Path

from runspec.storage import patiently

_READ_BYTES, _ROWS = 1 << 16, 50


def separator(path: Path) -> str:
    """Return the first of comma, semicolon, tab that cuts the first rows into as many cells each.

    A comma where none does, which is so for a table of one column; a tab by the file's name.
    """
    if ".tsv" in (suffix.lower() for suffix in path.suffixes):
        return "\t"
    try:
        read = patiently(_head, path)
        # The last character may be cut.
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(read)
    except (OSError, UnicodeDecodeError):
        return ","  # who opens it next says why; or it is compressed
    return next((each for each in ",;\t" if _fits(text, each, len(read) == _READ_BYTES)), ",")


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_READ_BYTES)


def _fits(text: str, separator: str, is_cut: bool) -> bool:
    try:
        rows = [
            row for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator) if row
        ]
    except csv.Error:
        return False
    widths = {len(row) for row in (rows[:-1] if is_cut else rows)[:_ROWS]}
    return len(widths) == 1 and widths.pop() > 1
