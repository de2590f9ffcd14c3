"""What generates the answers of a replica: transformers' class in this process, or a vLLM server.

Both load versions of the weights that the trainer writes (trainer/objectives/transfer.py).
"""

import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from runspec import engine_start, files
from runspec.adapters import name_of
from runspec.devices import VISIBLE, visible
from runspec.keys.grpo import GrpoConfig
from trainer.config import instantiate
from trainer.errors import RolloutError
from trainer.models.build import DTYPES, build
from trainer.objectives import transfer, whole
from trainer.objectives.replicas import Request, Sampled
from trainer.objectives.rollouts import sample
from trainer.parallel import world as distributed
from trainer.storage import adapter

_PR_SET_PDEATHSIG = 1
# vLLM's health answers at once, or it hangs.
_HEALTH_S = 5.0
# Connections to vLLM, which decides itself how many answers it generates at once.
_ANSWERS = 256
# Of a GPU's memory, if a reward model is on it, too; vLLM's own default is more.
_SHARE = 0.9


class TransformersEngine:
    """transformers' own class on one device; one request at a time."""

    at_once = 1
    is_well = True

    def __init__(self, config: GrpoConfig, folder: Path, device: torch.device) -> None:
        self._config, self._folder = config, folder
        self._adapted: Adapted | None = None
        self._engine = whole.Engine(device)
        self._ends = whole.Ends.of(instantiate("tokenizer", config.tokenizer))

    def load(self, version: str) -> None:
        """Take the weights of a version."""
        engine = self._engine
        if name_of(self._config.model) is not None and self._adapted is None:
            self._adapted = Adapted(self._config, engine.device)
        path = transfer.path_of(self._folder, self._config, version)
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

    def generate(self, asked: Request) -> Sampled:
        """Answer a request by the weights that were loaded last."""
        return sample(self._engine, asked, self._ends)


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
        self._trained = dict(transfer.trained(self._model))

    def tensors(self, file: Any, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole weights, by their names in transformers' class."""
        for name, parameter in self._trained.items():
            parameter.data = file.get_tensor(name).to(parameter.device)
        return whole.tensors(self._model, True, device)


class VllmEngine:
    """A vLLM server on this replica's GPUs, in the recipe's environment; many requests at a time.

    An adapter is loaded by its files, whole weights by a reload from theirs. vLLM has the endpoints
    for that with VLLM_SERVER_DEV_MODE and VLLM_ALLOW_RUNTIME_LORA_UPDATING (0.30:
    vllm/entrypoints/serve/dev and lora). It listens on a Unix socket in a private folder.

    Args:
        device: the first of its GPUs.
        held: bytes of that one that this process has.
    """

    at_once = _ANSWERS

    def __init__(
        self, config: GrpoConfig, folder: Path, device: torch.device, held: int = 0
    ) -> None:
        self._config, self._folder = config, folder
        self._ends = whole.Ends.of(instantiate("tokenizer", config.tokenizer))
        place = tempfile.mkdtemp(prefix="vllm-", dir=os.environ.get("RANK_SOCKETS"))
        self._socket, self._model = Path(place) / "engine.sock", "base"
        self._adapters: list[str] = []
        settings = dict(files.read_json_or_none(config.model_folder / "config.json") or {})
        self._vocab_size = int((settings.get("text_config") or settings)["vocab_size"])
        own = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_NO_USAGE_STATS": "1",
        }
        more = [str(each) for each in config.rollout_engine_args or ()]
        if device.type == "cuda":
            first = device.index or 0
            places = range(first, first + config.rollout_gpus)
            own[VISIBLE] = visible(places, os.environ.get(VISIBLE))
            if held and "--gpu-memory-utilization" not in more:
                total = torch.cuda.get_device_properties(device).total_memory
                more += ["--gpu-memory-utilization", f"{_SHARE - held / total:.2f}"]
        prctl = ctypes.CDLL(None).prctl
        self._process = subprocess.Popen(
            [*engine_start.python(own), *_arguments(config, self._socket), *more],
            stdin=subprocess.DEVNULL,
            # If this process is killed, vLLM must not keep the GPU.
            preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        while not self.is_well:
            time.sleep(0.2)
        threading.Thread(target=self._end_with_it, daemon=True).start()

    def _end_with_it(self) -> None:
        """End this process with vLLM: slurm/rollout.py starts both again."""
        status = self._process.wait()
        print(f"vLLM ended with status {status}: see the lines above", flush=True)
        os._exit(1)

    @property
    def is_well(self) -> bool:
        """Whether it answers.

        Raises:
            RolloutError: it has ended.
        """
        if (status := self._process.poll()) is not None:
            raise RolloutError(f"vLLM ended with status {status}: see the lines above")
        with suppress(OSError, http.client.HTTPException):
            return self._call("GET", "/health", None, _HEALTH_S)[0] == 200
        return False

    def load(self, version: str) -> None:
        """Take the weights of a version; nobody is answered meanwhile."""
        path = transfer.path_of(self._folder, self._config, version)
        if (path / adapter.SETTINGS).exists():
            if version not in self._adapters:
                self._done("/v1/load_lora_adapter", lora_name=version, lora_path=str(path))
                self._adapters.append(version)
            # Requests may still ask for the version before.
            for old in self._adapters[:-2]:
                self._done("/v1/unload_lora_adapter", lora_name=old)
                self._adapters.remove(old)
            self._model = version
            return
        kwargs = {"weights_path": str(path)}
        self._done("/collective_rpc", method="reload_weights", kwargs=kwargs)
        # What it has kept of prompts is by the weights before.
        answer = self._done("/reset_prefix_cache")
        if isinstance(answer, dict) and answer.get("success") is False:
            raise RolloutError("vLLM did not give up what it kept of prompts by older weights")

    def generate(self, asked: Request) -> Sampled:
        """Answer a request by the weights that were loaded last."""
        none: list[int | None] = [None] * len(asked.prompts)
        seeds = asked.seeds or none
        # vLLM's greedy answers are those of temperature 0.
        temperature = asked.temperature if asked.seeds else 0.0
        never = dict.fromkeys(map(str, range(asked.vocabulary, self._vocab_size)), -100.0)

        def answer(prompt: list[int], seed: int | None) -> tuple[list[int], list[float]]:
            body = {
                "model": self._model,
                "prompt": prompt,
                "seed": seed,
                "temperature": temperature,
                "max_tokens": asked.room,
                # Not by what its own settings call an end.
                "stop_token_ids": self._ends.tokens,
                "ignore_eos": True,
                "logit_bias": never or None,
                "logprobs": 0,
                "return_token_ids": True,
                "skip_special_tokens": False,
            }
            given = {key: value for key, value in body.items() if value is not None}
            (choice,) = self._done("/v1/completions", **given)["choices"]
            tokens, log_probs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            if len(tokens) != len(log_probs):
                raise RolloutError(f"vLLM gave {len(log_probs)} log-probabilities of {len(tokens)}")
            return tokens, log_probs

        with ThreadPoolExecutor(self.at_once) as threads:
            answers = list(threads.map(answer, asked.prompts, seeds))
        return Sampled([tokens for tokens, _ in answers], [values for _, values in answers])

    def _done(self, path: str, **body: Any) -> Any:
        """What it answers; RolloutError if it refuses."""
        status, text = self._call("POST", path, body, self._config.rollout_timeout)
        if status != 200:
            raise RolloutError(f"vLLM refused {path} with status {status}: {text[:500]}")
        try:
            return json.loads(text)
        except ValueError:
            return text

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> tuple[int, str]:
        connection = _UnixConnection(str(self._socket), timeout_s)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("engine", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _arguments(config: GrpoConfig, socket: Path) -> list[str]:
    dtype = str(DTYPES[config.dtype]).removeprefix("torch.")
    argv = ["-m", "vllm.entrypoints.cli.main", "serve", str(config.model_folder)]
    argv += ["--uds", str(socket), "--served-model-name", "base", "--dtype", dtype]
    # Those of the trainer's softmax at the temperature, over all tokens: no top_k or top_p of the
    # model's generation_config.json.
    argv += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    argv += ["--tensor-parallel-size", str(config.rollout_gpus)]
    if length := config.tokenizer.get("max_seq_len"):
        argv += ["--max-model-len", str(length)]
    if rank := transfer.lora_rank(config):
        argv += engine_start.vllm_lora(rank)
    return argv


class Versions:
    """An engine's weights: requests for one version are answered together, others wait."""

    def __init__(self, engine: TransformersEngine | VllmEngine) -> None:
        self.engine, self.version = engine, ""
        self._changed, self._answering = threading.Condition(), 0

    def load(self, version: str) -> None:
        """Have the weights of a version."""
        self._enter(version)
        self._leave()

    def generate(self, version: str, asked: Request) -> Sampled:
        """Answer a request by the weights of a version."""
        self._enter(version)
        try:
            return self.engine.generate(asked)
        finally:
            self._leave()

    def _enter(self, version: str) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    not self._answering
                    or (self.version == version and self._answering < self.engine.at_once)
                )
            )
            if self.version != version:
                self.version = ""
                self.engine.load(version)
                self.version = version
            self._answering += 1

    def _leave(self) -> None:
        with self._changed:
            self._answering -= 1
            self._changed.notify_all()
