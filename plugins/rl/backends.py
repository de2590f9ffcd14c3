"""What generates the answers of a sampler: transformers' class in this process, or a vLLM server.

Both load versions of the weights that the trainer writes (plugins/rl/transfer.py).
"""

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from plugins.rl import gathered, transfer
from plugins.rl.recipe_keys import GrpoConfig
from plugins.rl.rollouts import sample
from plugins.rl.samplers import Request, RolloutError, Sampled
from plugins.serve import backends, client
from runspec.files import patient_json
from runspec.processes import end_with_parent
from trainer.checkpoint import adapter
from trainer.data import tokenizers
from trainer.models.build import DTYPES

# vLLM's health answers at once, or it hangs.
_HEALTH_S = 5.0
# Connections to vLLM, which decides itself how many answers it generates at once.
_ANSWERS = 256


def made(config: GrpoConfig, folder: Path, device: torch.device) -> "Backend":
    """What the config names; `folder` is where versions are."""
    if config.rollout_engine == "vllm":
        return VllmBackend(config, folder, device)
    return TransformersBackend(config, folder, device)


class TransformersBackend:
    """transformers' own class on one device; requests are answered one after another."""

    at_once = 1
    is_well = True

    def __init__(self, config: GrpoConfig, folder: Path, device: torch.device) -> None:
        self._config, self._folder = config, folder
        self._generator = gathered.Generator(device)
        self._ends = gathered.Ends.of(tokenizers.of_block(config.tokenizer))

    def load(self, version: str) -> None:
        """Take the weights of a version."""
        generator = self._generator
        path = transfer.path_of(self._folder, self._config, version)
        with safe_open(path, framework="pt", device="cpu") as file:
            own: dict[str, torch.nn.Parameter] = {}
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
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


class VllmBackend:
    """A vLLM server on this sampler's GPUs, in the recipe's environment; concurrent requests.

    An adapter is loaded by its files, whole weights by a reload from theirs. vLLM has the endpoints
    for that with VLLM_SERVER_DEV_MODE and VLLM_ALLOW_RUNTIME_LORA_UPDATING (0.30:
    vllm/entrypoints/serve/dev and lora). It listens on a Unix socket in a private folder.

    Args:
        device: the first of its GPUs.
    """

    at_once = _ANSWERS

    def __init__(self, config: GrpoConfig, folder: Path, device: torch.device) -> None:
        self._config, self._folder = config, folder
        self._ends = gathered.Ends.of(tokenizers.of_block(config.tokenizer))
        place = tempfile.mkdtemp(prefix="vllm-")
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
        if device.type == "cuda":
            first = device.index or 0
            places = range(first, first + config.rollout_gpus)
            given = os.environ.get(backends.VISIBLE)
            self._own[backends.VISIBLE] = backends.visible(places, given)
        # The kernel ends vLLM with the thread that has started it.
        self._starter = ThreadPoolExecutor(1)
        argv = [*backends.python(self._own), *_arguments(config, self._socket)]

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                # If this process is killed, vLLM must not keep the GPU.
                preexec_fn=end_with_parent,
            )

        self._process = self._starter.submit(start).result()
        while not self.is_well:
            time.sleep(0.2)
        threading.Thread(target=_end_with, args=[self._process], daemon=True).start()

    @property
    def is_well(self) -> bool:
        """Whether it answers.

        Raises:
            RolloutError: it has ended.
        """
        if (status := self._process.poll()) is not None:
            raise RolloutError(f"vLLM ended with status {status}: see the sampler's log")
        with suppress(OSError):
            return self._call("/health", None, _HEALTH_S).status == 200
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
    return [*argv, *map(str, config.rollout_engine_args or ())]


Backend = TransformersBackend | VllmBackend
