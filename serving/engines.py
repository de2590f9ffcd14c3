"""The command of each engine, and where it listens: a Unix socket in a private folder.

An engine on a port of the node would answer everybody on that node, without the key.
"""

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runspec import files

_NEEDS = {
    "transformers": ("uvicorn", "bash setup.sh --with serve"),
    "vllm": ("vllm", "pip install vllm, in an environment of its own if it wants another torch"),
    "sglang": ("sglang", "pip install sglang, in an environment of its own"),
}


@dataclass(frozen=True)
class Engine:
    """How an engine is started, what it calls its model, and its address: a socket or a port."""

    argv: list[str]
    model: str
    socket: Path | None
    port: int = 0


def missing(engine: str) -> str:
    """Say what an engine lacks, "" if it can be started."""
    module, install = _NEEDS[engine]
    if importlib.util.find_spec(module):
        return ""
    return f"the engine {engine} needs the package {module}: {install}"


def command(config: Mapping[str, Any], folder: Path, gpus: int, port: int, key: str) -> Engine:
    """Return an engine's command.

    Args:
        folder: private to this user; the socket lies in it.
        gpus: how many the engine may use.
        port: a free one, for an engine that takes no socket.
        key: an engine's own key, for the same.
    """
    socket, model = folder / "engine.sock", str(config["model"])
    more = list(config.get("engine_args") or [])
    adapter = files.read_json_or_none(Path(model) / "adapter_config.json")
    base = str(adapter["base_model_name_or_path"]) if isinstance(adapter, dict) else model
    if config["engine"] == "vllm":
        argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", base]
        argv += ["--uds", str(socket), "--tensor-parallel-size", str(max(1, gpus))]
        argv += ["--served-model-name", str(config["endpoint"]), "--dtype", str(config["dtype"])]
        if adapter:
            argv += ["--enable-lora", "--lora-modules", f"{config['endpoint']}={model}"]
        return Engine([*argv, *more], str(config["endpoint"]), socket)
    if config["engine"] == "sglang":
        argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", base]
        argv += ["--host", "127.0.0.1", "--port", str(port), "--api-key", key]
        argv += ["--served-model-name", str(config["endpoint"]), "--tp-size", str(max(1, gpus))]
        if adapter:
            argv += ["--lora-paths", f"{config['endpoint']}={model}"]
        return Engine([*argv, *more], str(config["endpoint"]), None, port)
    argv = [sys.executable, "-m", "serving.transformers_engine", str(socket), model]
    argv += ["--device", str(config["device"]), "--dtype", str(config["dtype"])]
    return Engine([*argv, *more], model, socket)
