"""What laptops have sent: each content once, and the trees made of it; on the cluster.

    <shared folder>/sent-<uid>/files/<sha256>.<x|->    read-only contents
    <shared folder>/sent-<uid>/trees/<sha256>/         working trees, of links to them

Two clients that send the same content write the same bytes to the same places of one file, which
counts only once its hash is right; so they need no lock, and a broken transfer continues.
"""

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from launcher import paths
from launcher.errors import UsageFault
from launcher.remote import wire

# Path in the tree, SHA-256 of the content, and whether it may be executed.
Entry = tuple[str, str, bool]


def private(root: Path, name: str) -> Path:
    """Return a folder of what laptops have sent, made if it is not there; only this user enters it.

    By the mode of the folder around it: by a umask, all that a command makes would be private too.
    """
    root.mkdir(parents=True, exist_ok=True)
    paths.sent(root).mkdir(mode=0o700, exist_ok=True)
    folder = paths.sent(root) / name
    folder.mkdir(exist_ok=True)
    return folder


class Store:
    """What was sent to one shared folder."""

    def __init__(self, root: Path) -> None:
        self._files, self.trees = private(root, "files"), private(root, "trees")

    def tree(self, entries: Sequence[Entry]) -> Path:
        """Return where a tree lies, whether it does already or not."""
        text = json.dumps(sorted(map(list, entries)))
        return self.trees / hashlib.sha256(text.encode()).hexdigest()

    def missing(self, entries: Sequence[Entry]) -> dict[str, int]:
        """Return the contents that are not here, with the bytes of each that are."""
        missing = {}
        for sha256 in {entry[1] for entry in entries}:
            if not self._has(sha256):
                part = self._part(sha256)
                missing[sha256] = part.stat().st_size if part.is_file() else 0
        return missing

    def _content(self, sha256: str, runs: bool) -> Path:
        return self._files / f"{sha256}.{'x' if runs else '-'}"

    def _has(self, sha256: str) -> bool:
        return any(self._content(sha256, runs).is_file() for runs in (False, True))

    def _part(self, sha256: str) -> Path:
        if not (len(sha256) == 64 and sha256.isalnum()):
            raise UsageFault(f"{sha256!r} is not a hash")
        return self._files / f"{sha256}.part"

    def receive(self, stream: wire.Reader) -> None:
        """Read contents from a stream until it says that it has sent all."""
        while True:
            header, payload = wire.receive(stream)
            if header.get("all"):
                return
            part = self._part(header["sha256"])
            if self._has(header["sha256"]):  # another client was faster
                part.unlink(missing_ok=True)
                continue
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
            with open(descriptor, "r+b") as file:
                file.seek(header["offset"])
                file.write(zlib.decompress(payload))
            if header.get("last"):
                self._finish(part, header["sha256"])

    def _finish(self, part: Path, sha256: str) -> None:
        with suppress(FileNotFoundError):  # another client has finished it
            with open(part, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != sha256:
                part.unlink()
                if self._has(sha256):
                    return
                raise UsageFault("a file changed while it was sent: run the command again")
            part.chmod(0o400)
            part.rename(self._content(sha256, False))

    def build(self, entries: Sequence[Entry]) -> Path:
        """Make a tree of contents that are all here, and return it."""
        final = self.tree(entries)
        if final.is_dir():
            os.utime(final)
            return final
        temporary = self.trees / f".tmp-{final.name}-{os.getpid()}"
        try:
            temporary.mkdir()
            for name, sha256, runs in entries:
                target = temporary / name
                if Path(name).is_absolute() or ".." in Path(name).parts:
                    raise UsageFault(f"{name!r} is no path inside a tree")
                target.parent.mkdir(parents=True, exist_ok=True)
                _link(self._source(sha256, runs), target)
            try:
                temporary.rename(final)
            except OSError:
                if not final.is_dir():  # else another client has made it
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return final

    def _source(self, sha256: str, runs: bool) -> Path:
        """Return a content with the right permissions: a link shares those of its file."""
        wanted, other = self._content(sha256, runs), self._content(sha256, not runs)
        if not wanted.is_file():
            copy = wanted.with_name(f"{wanted.name}.{os.getpid()}")
            shutil.copyfile(other, copy)
            copy.chmod(0o500 if runs else 0o400)
            copy.rename(wanted)
        return wanted


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:  # a filesystem without hard links, or too many of one file
        shutil.copy2(source, target)
