"""What the two sides send each other: messages, then the records of a command's output.

A message is one line of JSON, with the number of the bytes that follow it. A record is a kind, a
length and data. Records are only ever appended, so a place in them is a number of bytes, from which
a broken stream continues.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any, Protocol

# Both sides must have the same.
PROTOCOL = 1
# The first line of the cluster's side: what a login shell prints comes before it.
GREETING = b"cookbook-remote "
CHUNK = 2**20
_LONGEST_LINE = 2**16
# Kinds of records: the exit status, the command's output and messages, where a server listens, and
# what the command wrote into the file that -o names.
END, OUT, ERR, FORWARD, FILE = range(5)
_HEAD = struct.Struct(">BI")


class Reader(Protocol):
    """What messages are read from."""

    def readline(self, limit: int, /) -> bytes: ...
    def read(self, count: int, /) -> bytes: ...


class Writer(Protocol):
    """What messages are written to."""

    def write(self, data: bytes, /) -> Any: ...
    def flush(self) -> Any: ...


def send(stream: Writer, header: dict[str, Any], payload: bytes = b"") -> None:
    """Write one message."""
    line = json.dumps({**header, "bytes": len(payload)})
    stream.write(line.encode() + b"\n" + payload)
    stream.flush()


def receive(stream: Reader) -> tuple[dict[str, Any], bytes]:
    """Return the next message; EOFError if the stream ends before or within it."""
    line = stream.readline(_LONGEST_LINE)
    if not line.endswith(b"\n"):
        raise EOFError
    header: dict[str, Any] = json.loads(line)
    wanted = header.pop("bytes")
    payload = stream.read(wanted) if wanted else b""
    if len(payload) < wanted:
        raise EOFError
    return header, payload


def packed(value: Any) -> bytes:
    """Return a value as compressed JSON, for a payload."""
    return zlib.compress(json.dumps(value).encode())


def unpacked(payload: bytes) -> Any:
    """Return the value of a packed payload."""
    return json.loads(zlib.decompress(payload))


def record(kind: int, data: bytes) -> bytes:
    """Return one record."""
    return _HEAD.pack(kind, len(data)) + data


class Records:
    """The records in a stream of bytes that comes in parts."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the records that are complete now."""
        self._rest += data
        while len(self._rest) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._rest)
            end = _HEAD.size + length
            if len(self._rest) < end:
                return
            data, self._rest = self._rest[_HEAD.size : end], self._rest[end:]
            yield kind, data
