"""A replica on a rollout node, which generates answers: python -m trainer.replica <run>/train.yaml

slurm/rollout.py starts it, with ROLLOUT_INDEX, ROLLOUT_LOCAL_RANK (its GPU) and ROLLOUT_ADDRESS
set. It says in the run's folder where it listens, and answers ranks over HTTP, with the run's
secret: trainer/objectives/replicas.py. One that nobody asks for its health any more ends itself.
"""

import hmac
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from runspec import files
from runspec.adapters import name_of
from runspec.keys.grpo import GrpoConfig
from trainer import config as configs
from trainer.config import instantiate
from trainer.models.build import DTYPES, build
from trainer.objectives import whole
from trainer.objectives.replicas import TRIES, Request, trained
from trainer.objectives.reward_model import RewardModel, served
from trainer.objectives.rollouts import sample
from trainer.parallel import world as distributed
from trainer.parallel.device import choose
from trainer.storage import adapter

# slurm/rollout.py asks every few seconds.
LEASE_S = 20.0


class Adapted:
    """The base model with the policy's adapter, merged as the trainer does it.

    On a GPU it takes at most a third of the memory; else it is on the CPU.
    """

    def __init__(self, config: GrpoConfig, device: torch.device) -> None:
        computed = DTYPES[config.dtype]
        alone = replace(
            config,
            tensor_parallel_dim=1,
            data_parallel_replicate_dim=1,
            expert_parallel_dim=1,
            fsdp_cpu_offload=False,
            compile=False,
            enable_fp8_training=False,
            # With their values, which no optimizer changes.
            dtype="fp32" if config.master_weights else config.dtype,
            master_weights=None,
        )
        size = sum(path.stat().st_size for path in config.model_folder.glob("*.safetensors"))
        if device.type == "cuda":
            most = torch.cuda.get_device_properties(device).total_memory / 3
            device = device if size < most else torch.device("cpu")
        world = replace(distributed.start("cpu"), device=device)
        self._model = replace(build(alone, world), dtype=computed)
        if config.checkpointer.get("adapter_checkpoint") is not None:
            adapter.load(self._model, config)
        self._trained = dict(trained(self._model))

    def tensors(self, file: Any, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole weights, by their names in transformers' class."""
        for name, parameter in self._trained.items():
            parameter.data = file.get_tensor(name).to(parameter.device)
        return whole.tensors(self._model, True, device)


class Replica:
    """A model with the weights of one version, and reward models.

    The one generates and the others score one request at a time, each beside the other.
    """

    def __init__(self, config: GrpoConfig, folder: Path, device: torch.device) -> None:
        self._config, self._folder = config, folder
        self._adapted: Adapted | None = None
        self._engine = whole.Engine(device)
        self._ends = whole.Ends.of(instantiate("tokenizer", config.tokenizer))
        self._lock, self.version = threading.Lock(), ""
        self._judging, self._scoring_since = threading.Lock(), math.inf
        self._judges = {
            name: RewardModel(path, config.dtype, device)
            for name, path in served(config.rewards).items()
        }

    def weights(self, version: str) -> dict[str, Any]:
        """Have the weights of a version, which the trainer has written."""
        with self._lock:
            self._load(version)
        return {"version": self.version}

    def generate(self, version: str, **asked: Any) -> dict[str, Any]:
        """Answer a request by the weights of a version."""
        with self._lock:
            self._load(version)
            sampled = sample(self._engine, Request(**asked), self._ends)
        return {**sampled._asdict(), "version": version}

    def score(self, name: str, documents: list[list[int]]) -> dict[str, Any]:
        """The scores of documents, given by their tokens, by the reward model of this name."""
        with self._judging:
            self._scoring_since = time.monotonic()
            try:
                return {"scores": self._judges[name].scores(documents)}
            finally:
                self._scoring_since = math.inf

    @property
    def hangs(self) -> bool:
        """Whether a reward model is at a request that every rank has given up by now."""
        return time.monotonic() - self._scoring_since > TRIES * self._config.reward_timeout

    def _load(self, version: str) -> None:
        if version == self.version:
            return
        engine, self.version = self._engine, ""
        if name_of(self._config.model) is not None and self._adapted is None:
            self._adapted = Adapted(self._config, engine.device)
        path = self._folder / files.WEIGHTS.format(version)
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors: Iterator[tuple[str, torch.Tensor]]
            if self._adapted is None:
                tensors = ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
            else:
                tensors = self._adapted.tensors(file, engine.device)
            own: dict[str, torch.nn.Parameter] = {}
            for name, tensor in tensors:
                if engine.model is None:
                    with engine.device:
                        engine.model = whole.transformers_model(
                            self._config.model_folder, tensor.dtype
                        ).eval()
                own = own or dict(engine.model.named_parameters())
                own[name].data = tensor.to(engine.device)
        self.version = version


class Server(ThreadingHTTPServer):
    """Answers health at any time, and requests to a model in order."""

    daemon_threads = True

    def __init__(self, address: str, replica: Replica, secret: str) -> None:
        family, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        self.replica, self.secret, self.asked = replica, secret, time.monotonic()
        super().__init__(("::" if family == socket.AF_INET6 else "0.0.0.0", 0), Handler)
        self.host = str(place[0])


class Handler(BaseHTTPRequestHandler):
    """One request: GET /health, POST /weights, POST /generate, POST /score."""

    server: Server

    def do_GET(self) -> None:
        if self._allowed():
            self.server.asked = time.monotonic()
            replica = self.server.replica
            self._send(503 if replica.hangs else 200, {"version": replica.version})

    def do_POST(self) -> None:
        if not self._allowed():
            return
        replica = self.server.replica
        calls: dict[str, Callable[..., dict[str, Any]]]
        calls = {
            "/weights": replica.weights,
            "/generate": replica.generate,
            "/score": replica.score,
        }
        if (call := calls.get(self.path)) is None:
            self._send(404, {"error": f"there is no {self.path}"})
            return
        try:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(200, call(**body))
        except Exception as error:
            print(f"{self.path}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            self._send(500, {"error": f"{type(error).__name__}: {error}"})

    def _allowed(self) -> bool:
        given = str(self.headers.get("Authorization"))
        if hmac.compare_digest(given.encode(), f"Bearer {self.server.secret}".encode()):
            return True
        self._send(401, {"error": "the run's secret is missing"})
        return False

    def _send(self, status: int, value: dict[str, Any]) -> None:
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
    folder = config.output_dir / files.ROLLOUT
    secret = (folder / files.ROLLOUT_SECRET).read_text(encoding="utf-8").strip()
    server = Server(os.environ["ROLLOUT_ADDRESS"], Replica(config, folder, device), secret)
    threading.Thread(target=_end_without_lease, args=[server], daemon=True).start()
    node = os.environ.get("NODE_NAME") or socket.gethostname()
    known = {"host": server.host, "port": server.server_port, "node": node, "pid": os.getpid()}
    files.write_json(folder / files.REPLICA.format(index), known)
    print(f"rollout replica {index} on {node} listens at port {server.server_port}", flush=True)
    server.serve_forever()
    return 0


def _end_without_lease(server: Server) -> None:
    while time.monotonic() - server.asked < LEASE_S:
        time.sleep(1)
    print("nobody asks for this replica any more: it ends", flush=True)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
