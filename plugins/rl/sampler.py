"""A sampler, which generates answers: python -m plugins.rl.sampler <run>/train.yaml

plugins/rl/slurm/samplers.py starts it, with ROLLOUT_INDEX, ROLLOUT_LOCAL_RANK (its GPU) and
ROLLOUT_ADDRESS set. It says in the run's folder where it listens, and answers ranks over HTTP, with
the run's secret: plugins/rl/samplers.py. A sampler whose health nobody asks for any more exits.
"""

import hmac
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from plugins.rl import backends, names
from plugins.rl.backends import Backend
from plugins.rl.recipe_keys import GrpoConfig
from plugins.rl.samplers import Request
from runspec import files
from trainer import config as configs
from trainer.parallel.device import choose

# plugins/rl/slurm/samplers.py asks every few seconds.
LEASE_S = 20.0


class Sampler:
    """A backend with the weights of one version: requests for it are answered together, others
    wait.

    version: of its weights; "" before it has some.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend, self.version = backend, ""
        self._changed, self._answering = threading.Condition(), 0

    def weights(self, version: str) -> dict[str, Any]:
        """Have the weights of a version, which the trainer has written."""
        with self._holding(version):
            return {"version": version}

    def generate(self, version: str, **asked: Any) -> dict[str, Any]:
        """Answer a request by the weights of a version."""
        with self._holding(version):
            sampled = self.backend.generate(Request(**asked))
        return {**sampled._asdict(), "version": version}

    @contextmanager
    def _holding(self, version: str) -> Iterator[None]:
        """Have the weights of a version inside."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    not self._answering
                    or (self.version == version and self._answering < self.backend.at_once)
                )
            )
            if self.version != version:
                self.version = ""
                self.backend.load(version)
                self.version = version
            self._answering += 1
        try:
            yield
        finally:
            with self._changed:
                self._answering -= 1
                self._changed.notify_all()


class Server(ThreadingHTTPServer):
    """Answers health at any time, and requests to a model in order, at a port that is free.

    Args:
        address: by which other nodes reach this one.

    host: it, as a number.
    """

    daemon_threads = True

    def __init__(self, address: str, sampler: Sampler, secret: str) -> None:
        self.sampler, self.secret, self.asked = sampler, secret, time.monotonic()
        family, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self.address_family, self.host = family, str(place[0])
        super().__init__(("::" if family == socket.AF_INET6 else "0.0.0.0", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    """One request with the run's secret: GET /health; POST /weights, /generate."""

    server: Server

    def do_GET(self) -> None:
        if self.path != "/health":
            self.send(404, {"error": f"there is no {self.path}"})
        elif self.is_allowed():
            self.server.asked = time.monotonic()
            sampler = self.server.sampler
            self.send(200 if sampler.backend.is_well else 503, {"version": sampler.version})

    def do_POST(self) -> None:
        if not self.is_allowed():
            return
        sampler = self.server.sampler
        calls: dict[str, Callable[..., dict[str, Any]]]
        calls = {"/weights": sampler.weights, "/generate": sampler.generate}
        if (call := calls.get(self.path)) is None:
            self.send(404, {"error": f"there is no {self.path}"})
            return
        try:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send(200, call(**body))
        except Exception as error:
            print(f"{self.path}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            self.send(500, {"error": f"{type(error).__name__}: {error}"})

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


def main(arguments: list[str]) -> int:
    """Serve until the job ends it."""
    config = configs.load(Path(arguments[0]), GrpoConfig)
    index, local = int(os.environ["ROLLOUT_INDEX"]), int(os.environ["ROLLOUT_LOCAL_RANK"])
    device = torch.device("cpu")
    if choose(config.device) == "cuda":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    folder = config.output_dir / names.ROLLOUT
    secret = (folder / names.SECRET).read_text(encoding="utf-8").strip()
    node = os.environ.get("NODE_NAME") or socket.gethostname()
    sampler = Sampler(backends.made(config, folder, device))
    server = Server(os.environ["ROLLOUT_ADDRESS"], sampler, secret)
    threading.Thread(target=_end_without_lease, args=[server], daemon=True).start()
    port = server.server_port
    known = {"host": server.host, "port": port, "node": node, "pid": os.getpid()}
    files.write_json(folder / names.SAMPLER.format(index), known)
    print(f"sampler {index} on {node} listens at port {port}", flush=True)
    server.serve_forever()
    return 0


def _end_without_lease(server: Server) -> None:
    while time.monotonic() - server.asked < LEASE_S:
        time.sleep(1)
    print("nobody asks for this sampler any more: it ends", flush=True)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
