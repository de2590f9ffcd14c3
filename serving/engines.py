"""The command and address of each engine; python -m serving.engines NAME: its missing packages.

An engine listens on a Unix socket in a private folder if it can: on a port, every user of the node
could use it without a key. SGLang has no option for a socket, and gets its own key.
"""

import importlib.util
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runspec import files
from runspec.engine_start import vllm_lora
from runspec.keys.serve import ENGINES
from runspec.storage import patient_json

# Beside its socket, why an engine of the kit's does not start.
REASON = "reason.txt"


@dataclass(frozen=True)
class Engine:
    """What Python starts as an engine, its name of the model, and its address: a socket or a port.

    argv: the arguments of python(). key: its API key, None for none.
    """

    argv: list[str]
    model: str
    socket: Path | None
    port: int = 0
    key: str | None = None


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


def missing(engine: str) -> str:
    """Return a message about an engine's missing package, "" if this interpreter can start it."""
    if importlib.util.find_spec(ENGINES[engine]) is not None:
        return ""
    remedy = "bash setup.sh --with serve" if engine == "transformers" else f"--environment {engine}"
    return f"the engine {engine} needs the package {ENGINES[engine]}, which is not there: {remedy}"


def command(config: Mapping[str, Any], folder: Path, gpus: int, port: int, key: str) -> Engine:
    """Return an engine's command.

    Args:
        folder: for the socket; private to this user.
        gpus: number of GPUs for the engine.
        port: a free port, for an engine without a socket.
        key: the engine's own key, for an engine without a socket.
    """
    model = Model.of(Path(str(config["model"])))
    build = {"vllm": _vllm, "sglang": _sglang, "transformers": _transformers}[config["engine"]]
    engine = build(config, model, folder, max(1, gpus), port, key)
    more = [str(each) for each in config.get("engine_args") or []]
    return replace(engine, argv=[*engine.argv, *more])


def _transformers(
    config: Mapping[str, Any], model: Model, folder: Path, gpus: int, port: int, key: str
) -> Engine:
    socket, name = folder / "engine.sock", str(model.adapter or model.base)
    argv = ["-m", "serving.transformers_engine", str(socket), name]
    argv += ["--device", str(config["device"]), "--dtype", str(config["dtype"])]
    return Engine(argv, name, socket)


def _vllm(
    config: Mapping[str, Any], model: Model, folder: Path, gpus: int, port: int, key: str
) -> Engine:
    name, socket = str(config["endpoint"]), folder / "engine.sock"
    argv = ["-m", "vllm.entrypoints.cli.main", "serve", str(model.base)]
    argv += ["--uds", str(socket), "--tensor-parallel-size", str(gpus)]
    argv += ["--dtype", str(config["dtype"])]
    # The base and the adapter need different names, or the base would answer for the adapter.
    argv += ["--served-model-name", f"{name}-base" if model.adapter else name]
    if model.adapter:
        argv += [*vllm_lora(model.rank), "--lora-modules", f"{name}={model.adapter}"]
        if (model.adapter / "generation_config.json").is_file():
            # The adapter may have learnt to end its answers by another token than the base.
            argv += ["--generation-config", str(model.adapter)]
    return Engine(argv, name, socket)


def _sglang(
    config: Mapping[str, Any], model: Model, folder: Path, gpus: int, port: int, key: str
) -> Engine:
    name, settings = str(config["endpoint"]), folder / "sglang.yaml"
    # In a file, because every user of the node can read a process's arguments. JSON is YAML.
    files.write_text(settings, json.dumps({"api-key": key}) + "\n", mode=0o600)
    argv = ["-m", "sglang.launch_server", "--config", str(settings)]
    argv += ["--model-path", str(model.base), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--served-model-name", name, "--tp-size", str(gpus), "--dtype", str(config["dtype"])]
    if not model.adapter:
        return Engine(argv, name, None, port, key)
    argv += ["--enable-lora", "--lora-paths", f"adapter={model.adapter}"]
    # SGLang's name of an adapter in OpenAI's protocol is BASE:ADAPTER.
    return Engine(argv, f"{name}:adapter", None, port, key)


if __name__ == "__main__":
    print(missing(sys.argv[1]))
