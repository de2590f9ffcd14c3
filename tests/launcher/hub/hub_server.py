"""A small Hugging Face hub on 127.0.0.1: the endpoints that downloading needs, and its faults."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, urlsplit

_PATH = re.compile(
    r"/(?:api/)?(?:(?P<kind>models|datasets)/)?(?P<repo>[\w.-]+/[\w.-]+)"
    r"(?:/(?P<what>revision|tree|resolve|auth-check|paths-info)"
    r"(?:/(?P<revision>[^/]+))?(?:/(?P<file>.+))?)?\Z"
)


@dataclass
class Repository:
    """Files, and what is wrong with the repository or with fetching a file."""

    files: dict[str, bytes]
    gated: bool = False
    large: tuple[str, ...] = (".safetensors", ".model", ".bin", ".pth", ".parquet")
    claimed_size: dict[str, int] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)  # times left that the connection breaks
    corrupt: dict[str, int] = field(default_factory=dict)  # times left that a byte is wrong

    @property
    def sha(self) -> str:
        whole = b"".join(name.encode() + data for name, data in sorted(self.files.items()))
        return hashlib.sha1(whole).hexdigest()

    def entry(self, name: str) -> dict[str, object]:
        data = self.files[name]
        size = self.claimed_size.get(name, len(data))
        blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
        entry: dict[str, object] = {"type": "file", "path": name, "size": size, "oid": blob}
        if name.endswith(self.large):
            sha256 = hashlib.sha256(data).hexdigest()
            entry["lfs"] = {"oid": sha256, "size": size, "pointerSize": 130}
        return entry


@dataclass
class Hub:
    """A running server: its address, its repositories by kind and name, and what was asked."""

    address: str
    repositories: dict[tuple[str, str], Repository]
    tokens: dict[str, str]  # token -> name of its owner
    members: set[str] = field(default_factory=set)  # who may read gated repositories
    requests: list[str] = field(default_factory=list)

    def fetched(self) -> list[str]:
        """Names of the files whose bytes were asked for, in order."""
        return [line.rpartition(" ")[2] for line in self.requests if line.startswith("GET file")]


@contextmanager
def serving(
    repositories: dict[tuple[str, str], Repository], tokens: dict[str, str]
) -> Iterator[Hub]:
    """A hub for as long as the block lasts."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}", repositories, tokens)
    server.hub = hub  # type: ignore[attr-defined]
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        owner = self.hub.tokens.get(token)
        if token and owner is None:
            self.refuse(401, "", "Invalid credentials in Authorization header")
        elif url.path == "/api/whoami-v2":
            self.send_json({"name": owner, "type": "user"})
        elif url.path in ("/api/models", "/api/datasets"):
            wanted = parse_qs(url.query)["search"][0].lower()
            kind = url.path.removeprefix("/api/")
            names = [name for each, name in self.hub.repositories if each == kind]
            self.send_json([{"id": name} for name in names if wanted in name.lower()])
        else:
            self.of_repository(url.path, owner, body)

    def of_repository(self, path: str, owner: str | None, body: bytes) -> None:
        found = _PATH.match(path)
        asked = found.groupdict() if found else {}
        name = asked.get("repo", "")
        repository = self.hub.repositories.get((asked.get("kind") or "models", name))
        if repository is None:
            # As the hub does, so that nobody learns which private names exist.
            self.refuse(404 if owner else 401, "RepoNotFound", "Repository not found")
        elif asked["revision"] not in (None, "main", repository.sha):
            self.refuse(404, "RevisionNotFound", "Invalid rev id")
        elif asked["what"] in ("revision", None):
            self.send_json({"id": name, "sha": repository.sha, "siblings": [], "tags": []})
        elif asked["what"] == "tree":
            self.send_json([repository.entry(each) for each in sorted(repository.files)])
        elif asked["what"] == "paths-info":
            wanted = json.loads(body)["paths"]
            self.send_json([repository.entry(each) for each in wanted if each in repository.files])
        elif repository.gated and owner not in self.hub.members:
            self.refuse(403 if owner else 401, "GatedRepo", f"Access to {name} is restricted")
        elif asked["what"] == "auth-check":
            self.send_json({})
        elif asked["file"] not in repository.files:
            self.refuse(404, "EntryNotFound", "Entry not found")
        else:
            self.send_file(repository, asked["file"])

    def send_file(self, repository: Repository, name: str) -> None:
        data, entry = repository.files[name], repository.entry(name)
        begin = 0
        asked = re.match(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if asked:
            begin = int(asked.group(1))
        self.hub.requests.append(f"{self.command} file {f'from {begin} ' if begin else ''}{name}")
        if self.command == "GET" and repository.corrupt.get(name):
            repository.corrupt[name] -= 1
            data = bytes([data[0] ^ 1]) + data[1:]
        self.send_response(206 if asked else 200)
        self.send_header("X-Repo-Commit", repository.sha)
        lfs = entry.get("lfs")
        self.send_header("ETag", f'"{lfs["oid"] if isinstance(lfs, dict) else entry["oid"]}"')
        self.send_header("Content-Length", str(len(data) - begin))
        if asked:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if repository.cut.get(name):
            repository.cut[name] -= 1
            self.wfile.write(data[begin : begin + (len(data) - begin) // 2])
            self.close_connection = True
            return
        self.wfile.write(data[begin:])

    def send_json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, status: int, code: str, message: str) -> None:
        data = json.dumps({"error": message}).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
