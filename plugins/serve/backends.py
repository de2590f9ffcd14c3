"""How each backend is started, for serving and for rollouts: its command and its address.

A backend listens on a Unix socket in a private folder: on a port, every user of the node could use
it without a key.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runspec.files import patient_json

VISIBLE = "CUDA_VISIBLE_DEVICES"
# The lines are the words of a command that starts Python in the recipe's environment.
STARTS_PYTHON = "COOKBOOK_BACKEND"
# vLLM's values of --max-lora-rank; its default is 16 (vllm.config.lora.MaxLoRARanks).
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Beside its socket, why a backend of the kit's does not start.
REASON = "reason.txt"


@dataclass(frozen=True)
class Backend:
    """How a backend is started and addressed."""

    # The arguments of what python() starts.
    argv: list[str]
    # Its name of the model.
    model: str
    socket: Path


@dataclass(frozen=True)
class Model:
    """The folder of the weights, and that of an adapter with its rank."""

    base: Path
    adapter: Path | None = None
    rank: int = 0

    @staticmethod
    def of(folder: Path) -> "Model":
        """Return the model of a folder of weights, or of an adapter."""
        adapter = patient_json(folder / "adapter_config.json")
        if adapter is None:
            return Model(folder)
        ranks = (adapter.get("r") or 8, *(adapter.get("rank_pattern") or {}).values())
        return Model(Path(str(adapter["base_model_name_or_path"])), folder, int(max(ranks)))


def command(config: Mapping[str, Any], folder: Path, gpus: int) -> Backend:
    """Return a backend's command.

    Args:
        folder: for the socket; private to this user.
        gpus: number of GPUs for the backend.
    """
    model, name = Model.of(Path(str(config["model"]))), str(config["endpoint"])
    place = folder / "backend.sock"
    own = ["--dtype", str(config["dtype"]), *map(str, config.get("engine_args") or [])]
    if config["engine"] == "transformers":
        name = str(model.adapter or model.base)
        argv = ["-m", "plugins.serve.transformers_backend", str(place), name]
        return Backend([*argv, "--device", str(config["device"]), *own], name, place)
    argv = ["-m", "vllm.entrypoints.cli.main", "serve", str(model.base)]
    argv += ["--uds", str(place), "--tensor-parallel-size", str(max(1, gpus))]
    # The base and the adapter need different names, or the base would answer for the adapter.
    argv += ["--served-model-name", f"{name}-base" if model.adapter else name]
    if model.adapter:
        argv += [*vllm_lora(model.rank), "--lora-modules", f"{name}={model.adapter}"]
        if (model.adapter / "generation_config.json").is_file():
            # The adapter may have learnt to end its answers by another token than the base.
            argv += ["--generation-config", str(model.adapter)]
    return Backend([*argv, *own], name, place)


def python(variables: Mapping[str, str]) -> list[str]:
    """Return the words of the command that starts the backend's Python, with these variables."""
    lines = os.environ.get(STARTS_PYTHON, "").splitlines() or [sys.executable]
    # Of the server's own variables, a container gets those that the node's script had.
    return [*lines[:-1], "env", *(f"{k}={v}" for k, v in variables.items()), lines[-1]]


def vllm_lora(rank: int) -> list[str]:
    """Return vLLM's options for adapters of this rank."""
    most = next((each for each in _VLLM_RANKS if each >= rank), _VLLM_RANKS[-1])
    return ["--enable-lora", "--max-lora-rank", str(most)]


def visible(gpus: Sequence[int], given: str | None) -> str:
    """Return CUDA_VISIBLE_DEVICES for a replica's GPUs, of those that the job has.

    Args:
        given: the job's own value; None: all GPUs of the node. Empty, it hides them.
    """
    names = given.split(",") if given else []
    return "" if given == "" else ",".join(names[k] if names else str(k) for k in gpus)
