"""Fetching a run's files: each continues where an earlier transfer ended, and is verified."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher import __version__
from launcher.errors import RemoteFault
from launcher.remote import wire
from launcher.remote.client import with_connection
from launcher.remote.ssh import Connection, Session

# A file that is not complete has this after its name.
_PART = ".part"
_MIB = 2**20


def fetch(
    connection: Connection,
    run: str,
    part: str,
    into: Path | None,
    cluster: str | None,
    say: Callable[[str], None],
) -> Path:
    """Fetch a part of a run and return the folder with it.

    Args:
        part: export, adapter or logs.
        into: the folder for the run's files; None for one with the run's name, here.
    """
    transfer = _Transfer({"do": "fetch", "run": run, "part": part, "cluster": cluster})
    name = with_connection(connection, lambda session: transfer.once(session, into))
    folder = into or Path(name)
    say(
        f"{len(transfer.done):,} files, {transfer.size / _MIB:,.1f} MiB, verified by SHA-256; "
        f"{transfer.fetched / _MIB:,.1f} MiB came over the connection"
    )
    return folder


class _Transfer:
    """Files of one folder of the cluster, through as many connections as it takes."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self._asked = {**asked, "protocol": wire.PROTOCOL, "version": __version__}
        self.done: set[str] = set()
        self.size = self.fetched = 0

    def once(self, session: Session, into: Path | None) -> str:
        """Ask for what is not here yet; return the run's name."""
        session.send(self._asked)
        header, payload = session.receive()
        name = str(header["run"])
        listed: list[tuple[str, int]] = wire.unpacked(payload)
        self.size = sum(size for _, size in listed)
        folder = into or Path(name)
        wanted = []
        for path, size in listed:
            if path not in self.done:
                wanted.append([path, *_here(_place(folder, path), size)])
        session.send({}, wire.packed(wanted))
        for _ in wanted:
            self._receive(session, folder)
        return name

    def _receive(self, session: Session, folder: Path) -> None:
        header, _ = session.receive()
        name = str(header["name"])
        place = _place(folder, name)
        part = place.with_name(place.name + _PART)
        place.parent.mkdir(parents=True, exist_ok=True)
        offset, digest = header["offset"], hashlib.sha256()
        if place.is_file() and not part.is_file():
            place.rename(part)  # an older version, or the whole file
        with open(part, "r+b" if part.is_file() else "w+b") as file:
            for data in iter(lambda: file.read(min(wire.CHUNK, offset - file.tell())), b""):
                digest.update(data)
            file.truncate()
            while True:
                header, data = session.receive()
                if "sha256" in header:
                    break
                file.write(data)
                digest.update(data)
                self.fetched += len(data)
        if digest.hexdigest() != header["sha256"]:
            part.unlink()
            raise RemoteFault(f"{place} is not what was sent: run the same command again")
        part.replace(place)
        self.done.add(name)


def _place(folder: Path, name: str) -> Path:
    place = folder / name
    if not place.resolve().is_relative_to(folder.resolve()):
        raise RemoteFault(f"the cluster names {name!r}, which is outside {folder}")
    return place


def _here(place: Path, size: int) -> tuple[int, str]:
    """Return how many bytes of a file are here, and their hash."""
    part = place.with_name(place.name + _PART)
    path = part if part.is_file() else place
    if not path.is_file() or path.stat().st_size > size:
        return 0, hashlib.sha256().hexdigest()
    with open(path, "rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
