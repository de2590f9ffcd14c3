"""Versions of the weights over the network: from the first node's memory to the rollout nodes.

Each rollout node sends on to the next one what arrives, so that the first node sends every byte
once, however many there are. A replica whose neighbour fails asks the first node. Replicas of one
node share the files of one of them.
"""

import errno
import hmac
import http.client
import json
import mmap
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from runspec import files
from trainer.errors import RolloutError

# A source that sends nothing for so long has failed. A neighbour may begin so much later.
STALL_S, BEGIN_S = 20.0, 5.0
POLL_S = 0.02
# One connection does not fill a fast network.
_STRIPES, _STRIPE_BYTES, _CHUNK_BYTES = 4, 64 << 20, 4 << 20
# Versions that a replica keeps: late requests are for the one before the newest.
_KEPT = 2


def before(folder: Path, index: int, node: str) -> list[dict[str, Any]]:
    """The replica that another one asks first, if there is one: the first of its own node, or of
    the node before.

    Args:
        folder: where replicas say how they are reached.
    """
    each = [files.peek(folder / files.REPLICA.format(n)) for n in range(index)]
    known = [one for one in each if one]
    beside = [one for one in known if one["node"] == node]
    return (beside or [one for one in known if one["node"] == known[-1]["node"]])[:1]


class _File:
    """A file that is here, or arrives in stripes, each from its begin to its end."""

    def __init__(self, path: Path, size: int, is_here: bool, descriptor: int | None = None) -> None:
        self.path, self.size, self.descriptor = path, size, descriptor
        count = min(_STRIPES, max(1, size // _STRIPE_BYTES))
        bounds = [size * place // count for place in range(count + 1)]
        self.ends = bounds[1:]
        self.begins = bounds[:-1]
        self.reached = list(self.ends if is_here else self.begins)


class _Version:
    """The files of a version, by their paths in a store's folder."""

    def __init__(self, named: Mapping[str, _File]) -> None:
        self.files, self.changed, self.has_failed = named, threading.Condition(), False

    @property
    def is_here(self) -> bool:
        return all(file.reached == file.ends for file in self.files.values())

    def wait_for(self, file: _File, place: int, at: int) -> int:
        """How far a stripe has arrived, beyond `at` unless it has failed."""
        with self.changed:
            self.changed.wait_for(lambda: self.has_failed or file.reached[place] > at, STALL_S)
            return at if self.has_failed else file.reached[place]

    @property
    def arrived(self) -> int:
        return sum(
            at - begin
            for file in self.files.values()
            for at, begin in zip(file.reached, file.begins, strict=True)
        )


class Store:
    """Versions in this node's memory, which others may fetch: Handler answers them.

    The kernel gives the memory back when this process ends, however that is.

    Args:
        secret: of the run, for both directions.
        node: the name of this node.

    node: as given. folder: where the files have names.
    """

    def __init__(self, secret: str, node: str) -> None:
        self._secret, self.node = secret, node
        place = tempfile.mkdtemp(prefix="weights-", dir=os.environ.get("RANK_SOCKETS"))
        self.folder = Path(place)
        self._versions: dict[str, _Version] = {}
        self._fetching = threading.Lock()

    def create(self, path: Path) -> int:
        """Make an empty file in memory, with this name; return its descriptor."""
        descriptor = os.memfd_create(path.name)
        path.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        return descriptor

    def add(self, version: str, path: Path) -> None:
        """Offer a version that was written to `path` in the folder: a file or a folder."""
        each = sorted(path.iterdir()) if path.is_dir() else [path]
        self._versions[version] = _Version(
            {
                str(p.relative_to(self.folder)): _File(p, p.stat().st_size, True, _descriptor(p))
                for p in each
            }
        )

    def fetch(self, version: str, sources: Sequence[Mapping[str, Any]]) -> None:
        """Have a version, by the first source that has it.

        Args:
            sources: host and port of each.

        Raises:
            RolloutError: no source gave it.
        """
        with self._fetching:
            own = self._versions.get(version)
            if own and own.is_here and all(file.path.exists() for file in own.files.values()):
                return
            faults = []
            for source in sources:
                try:
                    self._fetch(version, source)
                    break
                except (OSError, http.client.HTTPException, ValueError) as error:
                    self._remove(version)
                    faults.append(f"from {source['host']}: {error}")
            else:
                raise RolloutError(f"weights {version} did not arrive: {'; '.join(faults)}")
            for old in list(self._versions)[:-_KEPT]:
                self._remove(old)

    def _fetch(self, version: str, source: Mapping[str, Any]) -> None:
        began = time.monotonic()
        while (listed := self._listing(version, source)) is None:
            if time.monotonic() - began > BEGIN_S:
                raise OSError("it does not have them")
            time.sleep(POLL_S)
        names = listed["files"]
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name in names):
            raise ValueError("it has files outside of its folder")
        there = Path(listed["folder"])
        if listed["node"] == self.node and there.is_dir():
            self._share(version, source, there)
        else:
            self._receive(version, source, names)

    def _share(self, version: str, source: Mapping[str, Any], there: Path) -> None:
        """Use the files of a replica on this node, once it has them."""
        moved, since = -1, time.monotonic()
        while not (listed := self._listing(version, source) or {}).get("is_here"):
            if listed.get("arrived", moved) != moved:
                moved, since = listed["arrived"], time.monotonic()
            if not listed or time.monotonic() - since > STALL_S:
                raise OSError("it gave them up")
            time.sleep(POLL_S)
        for top in self._tops(listed["files"]):
            top.symlink_to(there / top.name)
        self._versions[version] = _Version(
            {name: _File(self.folder / name, size, True) for name, size in listed["files"].items()}
        )

    def _receive(self, version: str, source: Mapping[str, Any], names: Mapping[str, int]) -> None:
        arriving = {name: _File(self.folder / name, size, False) for name, size in names.items()}
        own = _Version(arriving)
        _check_room(sum(names.values()))
        try:
            for file in arriving.values():
                file.path.parent.mkdir(exist_ok=True)
                file.descriptor = self.create(file.path)
                os.ftruncate(file.descriptor, file.size)
        finally:
            self._versions[version] = own
        stripes = [
            (name, place) for name, file in arriving.items() for place in range(len(file.ends))
        ]

        def receive(name: str, place: int) -> None:
            file = arriving[name]
            at, end = file.begins[place], file.ends[place]
            if at == end:
                return
            path = f"/weights/{version}/{place}/{name}"
            with self._asked(source, path) as response, _mapped(file) as memory:
                if response.status != 200:
                    raise OSError(f"status {response.status} for {name}")
                while at < end:
                    if not (got := response.readinto(memory[at : min(end, at + _CHUNK_BYTES)])):
                        raise OSError(f"it ended {end - at:,} bytes before the end of {name}")
                    at += got
                    with own.changed:
                        file.reached[place] = at
                        own.changed.notify_all()

        with ThreadPoolExecutor(2 * _STRIPES) as threads:
            for done in [threads.submit(receive, *each) for each in stripes]:
                done.result()

    def _listing(self, version: str, source: Mapping[str, Any]) -> dict[str, Any] | None:
        with self._asked(source, f"/weights/{version}") as response:
            listed = json.loads(response.read())
            if response.status not in (200, 404):
                raise OSError(listed["error"])
            return listed if response.status == 200 else None

    @contextmanager
    def _asked(self, source: Mapping[str, Any], path: str) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(source["host"], source["port"], timeout=STALL_S)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self._secret}"})
            yield connection.getresponse()
        finally:
            connection.close()

    def remove_all_but(self, kept: str) -> None:
        """Remove every version but one."""
        for old in [version for version in self._versions if version != kept]:
            self._remove(old)

    def _remove(self, version: str) -> None:
        if own := self._versions.pop(version, None):
            with own.changed:
                own.has_failed = True
                own.changed.notify_all()
            for path in self._tops(own.files):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
            # Last: a name must not lead to another file that gets the same descriptor.
            for file in own.files.values():
                if file.descriptor is not None:
                    os.close(file.descriptor)

    def _tops(self, names: Iterable[str]) -> set[Path]:
        """The files and folders in the store's own that hold these."""
        return {self.folder / Path(name).parts[0] for name in names}

    def listing(self, version: str) -> dict[str, Any] | None:
        """What Handler answers of a version: its files, and whether they have arrived."""
        if (own := self._versions.get(version)) is None:
            return None
        return {
            "node": self.node,
            "folder": str(self.folder),
            "files": {name: file.size for name, file in own.files.items()},
            "arrived": own.arrived,
            "is_here": own.is_here,
        }

    def send(self, handler: BaseHTTPRequestHandler, version: str, place: int, name: str) -> bool:
        """Send a stripe of a file, as it arrives; return whether there is one."""
        own = self._versions.get(version)
        file = own.files.get(name) if own is not None else None
        if own is None or file is None or place >= len(file.ends):
            return False
        at, end = file.begins[place], file.ends[place]
        with open(file.path, "rb") as content:
            handler.send_response(200)
            handler.send_header("Content-Length", str(end - at))
            handler.end_headers()
            handler.connection.settimeout(STALL_S)
            # If it breaks off, the one that asked sees that it has too little.
            with suppress(OSError):
                while (reached := own.wait_for(file, place, at)) > at < end:
                    at += handler.connection.sendfile(content, at, reached - at)
        return True


@contextmanager
def _mapped(file: _File) -> Iterator[memoryview]:
    with open(file.path, "r+b") as opened, mmap.mmap(opened.fileno(), file.size) as mapped:
        view = memoryview(mapped)
        try:
            yield view
        finally:
            view.release()


def _descriptor(path: Path) -> int | None:
    """That of a file that Store.create made."""
    return int(path.readlink().name) if path.is_symlink() else None


def _check_room(size: int) -> None:
    """Raise OSError if this node's memory has no room for so many bytes: it would end processes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:") and (free := int(line.split()[1]) * 1024) < size:
            message = f"{size / 2**30:,.1f} GiB of weights, and {free / 2**30:,.1f} of memory free"
            raise OSError(errno.ENOMEM, message)


class Server(ThreadingHTTPServer):
    """Listens on all interfaces, at a port that is free.

    Args:
        address: by which other nodes reach this one.

    host: it, as a number.
    """

    daemon_threads = True

    def __init__(
        self,
        address: str,
        secret: str,
        handler: type["Handler"],
        store: Store | None = None,
    ) -> None:
        family, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        self.secret, self.store = secret, store
        super().__init__(("::" if family == socket.AF_INET6 else "0.0.0.0", 0), handler)
        self.host = str(place[0])

    @property
    def source(self) -> dict[str, Any]:
        """Where others fetch versions."""
        return {"host": self.host, "port": self.server_port}


class Handler(BaseHTTPRequestHandler):
    """One request with the run's secret: GET /weights/VERSION, /weights/VERSION/STRIPE/FILE."""

    server: Server

    def do_GET(self) -> None:
        if not self.is_allowed():
            return
        store, (_, *given) = self.server.store, self.path.split("/", 4)
        if store is not None and given[0] == "weights":
            if len(given) == 2 and (listed := store.listing(given[1])):
                self.send(200, listed)
                return
            if len(given) == 4 and store.send(self, given[1], int(given[2]), given[3]):
                return
        self.send(404, {"error": f"there is no {self.path}"})

    def is_allowed(self) -> bool:
        """Whether the request has the secret; else it is answered."""
        given = str(self.headers.get("Authorization"))
        if hmac.compare_digest(given.encode(), f"Bearer {self.server.secret}".encode()):
            return True
        self.send(401, {"error": "the run's secret is missing"})
        return False

    def send(self, status: int, value: Mapping[str, Any]) -> None:
        """Answer with JSON."""
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Each request is no line of the log."""
