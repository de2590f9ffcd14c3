"""The kit's HTTP client, for one request at a time; serving has aiohttp, for many.

Standard library only, since a job's supervisor uses it, too, whatever its environment is.
"""

import http.client
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """What a server answers, whatever its status is."""

    status: int
    reason: str
    body: bytes


def send(
    url: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    *,
    timeout_s: float,
    unix_socket: Path | None = None,
) -> Answer:
    """Return what a server answers.

    Args:
        body: what is sent as JSON, by POST; None: nothing, by GET.
        timeout_s: of each part that arrives.
        unix_socket: where the server listens, instead of the URL's host.

    Raises:
        OSError: it cannot be reached, or not in time (TimeoutError), or it answers no HTTP.
        ValueError: this is no URL.
    """
    # The environment's proxies are for servers outside the cluster.
    handlers: list[Any] = [urllib.request.ProxyHandler({})]
    if unix_socket is not None:
        handlers.append(_UnixHandler(unix_socket))
    data = None if body is None else json.dumps(body).encode()
    own = {"User-Agent": "slurm-cookbook", "Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, data, own)
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as answer:
            return Answer(answer.status, answer.reason, answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.reason, error.read())
    except urllib.error.URLError as error:
        raise error.reason if isinstance(error.reason, OSError) else error from None
    except http.client.HTTPException as error:
        raise ConnectionError(f"no answer of HTTP: {type(error).__name__} {error}") from error


def at(host: str, port: int) -> str:
    """Return the URL of a server by its name or the number of its address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _UnixHandler(urllib.request.HTTPHandler):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_UnixConnection, path=self._path), request)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, host: str, timeout: float, path: Path) -> None:
        super().__init__(host, timeout=timeout)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
