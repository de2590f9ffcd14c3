"""What generates the answers of a sampler: transformers' class in this process, or a vLLM server.

Both load versions of the weights that the trainer writes (plugins/rl/transfer.py).
"""

import json
import os
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

from plugins.rl import gathered, transfer
from plugins.rl.recipe_keys import GrpoConfig
from plugins.rl.rollouts import sample
from plugins.rl.samplers import Request, Sampled
from plugins.serve import backends
from runspec import client
from runspec.adapters import name_of
from runspec.devices import VISIBLE, share_beside, visible
from runspec.files import patient_json
from runspec.processes import end_with_parent
from trainer.checkpoint import adapter
from trainer.config import instantiate
from trainer.errors import ConfigError, RolloutError
from trainer.models.build import DTYPES, build
from trainer.parallel import world as distributed

# vLLM's health answers at once, or it hangs.
_HEALTH_S = 5.0
# Connections to vLLM, which decides itself how many answers it generates at once.
_ANSWERS = 256


def made(config: GrpoConfig, folder: Path, device: torch.device, in_turns: bool) -> "Backend":
    """What the config names; `folder` is where versions are."""
    if config.rollout_engine == "vllm":
        return VllmBackend(config, folder, device, in_turns)
    return TransformersBackend(config, folder, device)


class TransformersBackend:
    """transformers' own class on one device; requests are answered one after another."""

    at_once = 1
    is_well = True

    def __init__(self, config: GrpoConfig, folder: Path, device: torch.device) -> None:
        self._config, self._folder = config, folder
        self._adapted: Adapted | None = None
        self._generator = gathered.Generator(device)
        self._ends = gathered.Ends.of(instantiate("tokenizer", config.tokenizer))

    def load(self, version: str) -> None:
        """Take the weights of a version."""
        generator = self._generator
        if name_of(self._config.model) is not None and self._adapted is None:
            self._adapted = Adapted(self._config, generator.device)
        path = transfer.path_of(self._folder, self._config, version)
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors: Iterator[tuple[str, torch.Tensor]]
            if self._adapted is None:
                tensors = ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
            else:
                tensors = self._adapted.tensors(file, generator.device)
            own: dict[str, torch.nn.Parameter] = {}
            for name, tensor in tensors:
                if generator.model is None:
                    with generator.device:
                        generator.model = gathered.transformers_model(
                            self._config.model_folder, tensor.dtype
                        ).eval()
                own = own or dict(generator.model.named_parameters())
                own[name].data = tensor.to(generator.device)

    def generate(self, asked: Request) -> Sampled:
        """Answer a request by the weights that were loaded last."""
        return sample(self._generator, asked, self._ends)


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
        return gathered.tensors(self._model, True, device)


class VllmBackend:
    """A vLLM server on this sampler's GPUs, in the recipe's environment; concurrent requests.

    An adapter is loaded by its files, whole weights by a reload from theirs. vLLM has the endpoints
    for that with VLLM_SERVER_DEV_MODE and VLLM_ALLOW_RUNTIME_LORA_UPDATING (0.30:
    vllm/entrypoints/serve/dev and lora). It listens on a Unix socket in a private folder.

    In turns with the ranks it starts with the first weights, when the ranks wait for answers, and
    sleeps between rollouts.

    Args:
        device: the first of its GPUs.
        in_turns: whether ranks have these GPUs, too.

    Raises:
        ConfigError: it is not known how much memory the ranks leave.
    """

    at_once = _ANSWERS

    def __init__(
        self,
        config: GrpoConfig,
        folder: Path,
        device: torch.device,
        in_turns: bool = False,
    ) -> None:
        self._config, self._folder = config, folder
        self._ends = gathered.Ends.of(instantiate("tokenizer", config.tokenizer))
        place = tempfile.mkdtemp(prefix="vllm-", dir=os.environ.get("RANK_SOCKETS"))
        self._socket, self._model = Path(place) / "engine.sock", "base"
        self._adapters: list[str] = []
        settings = patient_json(config.model_folder / "config.json") or {}
        self._vocab_size = int((settings.get("text_config") or settings)["vocab_size"])
        self._own = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_NO_USAGE_STATS": "1",
        }
        self._more = [str(each) for each in config.rollout_engine_args or ()]
        memory = 0
        if device.type == "cuda":
            first = device.index or 0
            places = range(first, first + config.rollout_gpus)
            self._own[VISIBLE] = visible(places, os.environ.get(VISIBLE))
            memory = torch.cuda.get_device_properties(device).total_memory
        if (share := memory_share(config, memory, in_turns)) is not None:
            self._more = ["--gpu-memory-utilization", f"{share:.2f}", *self._more]
        if in_turns:
            self._more.append("--enable-sleep-mode")
            if allocator := os.environ.get("PYTORCH_ALLOC_CONF"):
                # Asleep, vLLM 0.30 would keep its memory with these, and sees to it for the older
                # variable only (device_allocator/cumem.py).
                self._own["PYTORCH_ALLOC_CONF"] = allocator.replace(
                    "expandable_segments:True", "expandable_segments:False"
                )
        # Level 2 keeps no weights, and vLLM 0.30 does not wake up from it with --enable-lora
        # (vllm-project/vllm#48337); level 1 keeps them in the CPU's memory.
        self._level = 1 if transfer.lora_rank(config) else 2
        # The kernel ends vLLM with the thread that has started it.
        self._starter = ThreadPoolExecutor(1)
        self._process: subprocess.Popen[bytes] | None = None
        # awake, asleep, or between them
        self._state = "awake"
        if not in_turns:
            self._start()

    def _start(self) -> None:
        argv = [*backends.python(self._own), *_arguments(self._config, self._socket)]

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [*argv, *self._more],
                stdin=subprocess.DEVNULL,
                # If this process is killed, vLLM must not keep the GPU.
                preexec_fn=end_with_parent,
            )

        self._socket.unlink(missing_ok=True)
        process = self._starter.submit(start).result()
        while not self._answers(process):
            time.sleep(0.2)
        self._process = process
        threading.Thread(target=_end_with, args=[process], daemon=True).start()

    @property
    def is_well(self) -> bool:
        """Whether it answers, if it has been started.

        Raises:
            RolloutError: it has ended.
        """
        return self._process is None or self._answers(self._process)

    def _answers(self, process: subprocess.Popen[bytes]) -> bool:
        if (status := process.poll()) is not None:
            raise RolloutError(f"vLLM ended with status {status}: see the sampler's log")
        with suppress(OSError):
            return self._call("/health", None, _HEALTH_S).status == 200
        return False

    def drop(self) -> None:
        """Answer nobody any more."""
        self._done("/abort_requests")

    def sleep(self) -> None:
        """Give up the GPU's memory until weights are loaded; nobody is answered meanwhile."""
        if self._state == "between":
            # It cannot sleep again, and ends with this process.
            print("vLLM did not wake up: it is restarted", flush=True)
            os._exit(1)
        if self._process is not None and self._state == "awake":
            self._done(f"/sleep?level={self._level}")
            self._state = "asleep"

    def load(self, version: str) -> None:
        """Take the weights of a version; nobody is answered meanwhile."""
        if self._process is None:
            self._start()
        path = transfer.path_of(self._folder, self._config, version)
        is_adapter = (path / adapter.SETTINGS).exists()
        if sleeps := self._state != "awake":
            self._state = "between"
            # The keys and values of answers get their memory once the weights have theirs.
            self._done("/wake_up" if is_adapter else "/wake_up?tags=weights")
        if is_adapter:
            self._state = "awake"
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
        if sleeps:
            self._done("/wake_up?tags=kv_cache")
            self._state = "awake"
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
            if choice["finish_reason"] == "abort":
                raise RolloutError("vLLM has dropped an answer")
            tokens, log_probs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            if len(tokens) != len(log_probs):
                raise RolloutError(f"vLLM gave {len(log_probs)} log-probabilities of {len(tokens)}")
            return tokens, log_probs

        with ThreadPoolExecutor(self.at_once) as threads:
            answers = list(threads.map(answer, asked.prompts, seeds))
        return Sampled([tokens for tokens, _ in answers], [values for _, values in answers])

    def _done(self, path: str, **body: Any) -> Any:
        """What it answers; RolloutError if it refuses."""
        answer = self._call(path, body, self._config.rollout_timeout)
        text = answer.body.decode()
        if answer.status != 200:
            raise RolloutError(f"vLLM refused {path} with status {answer.status}: {text[:500]}")
        try:
            return json.loads(text)
        except ValueError:
            return text

    def _call(self, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> client.Answer:
        url = f"http://engine{path}"
        return client.send(url, body, timeout_s=timeout_s, unix_socket=self._socket)


def memory_share(config: GrpoConfig, memory: int, in_turns: bool) -> float | None:
    """The share of a GPU's memory that vLLM takes; None for its own default.

    Args:
        memory: of the GPU; 0 without one.

    Raises:
        ConfigError: in turns, if it is not known what ranks have of it (ROLLOUT_BESIDE_GIB, by the
            estimate in the job script).
    """
    if (given := config.rollout_gpu_memory_utilization) or not memory or not in_turns:
        return given
    if not (beside := os.environ.get("ROLLOUT_BESIDE_GIB")):
        raise ConfigError(
            "rollout_gpu_memory_utilization: what the trainer leaves of a GPU cannot be computed "
            "for this model; set it, such as 0.4"
        )
    return share_beside(float(beside), memory / 2**30)


def _end_with(process: subprocess.Popen[bytes]) -> None:
    """End this process with vLLM: plugins/rl/slurm/samplers.py starts both again."""
    print(f"vLLM ended with status {process.wait()}: see the lines above", flush=True)
    os._exit(1)


def _arguments(config: GrpoConfig, socket: Path) -> list[str]:
    dtype = str(DTYPES[config.dtype]).removeprefix("torch.")
    argv = ["-m", "vllm.entrypoints.cli.main", "serve", str(config.model_folder)]
    argv += ["--uds", str(socket), "--served-model-name", "base", "--dtype", dtype]
    # As the trainer's softmax at the temperature, over all tokens: no top_k or top_p of the
    # model's generation_config.json.
    argv += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    argv += ["--tensor-parallel-size", str(config.rollout_gpus)]
    if length := config.tokenizer.get("max_seq_len"):
        argv += ["--max-model-len", str(length)]
    if rank := transfer.lora_rank(config):
        argv += backends.vllm_lora(rank)
    return argv


Backend = TransformersBackend | VllmBackend
