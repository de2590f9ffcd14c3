"""Whether to train on GPUs or on CPUs, and why GPUs that are there cannot be used."""

import os
import re
from pathlib import Path

import torch
from torch.distributed import Store

from runspec import devices
from trainer.errors import BadNodeError, ConfigError, Fault, PeerError

DRIVER = Path("/proc/driver/nvidia/version")


def choose(device: str) -> str:
    """Return cuda or cpu for `device`: auto, cuda or cpu.

    scaled_dot_product_attention of this process does not use cuDNN from here on. It would on H100
    and B200, and would make a new graph for each length, which takes tenths of a second
    (pytorch#155958): for each batch of padded rows, and for each token that is generated.

    Raises:
        ConfigError: auto, on a node whose GPUs this torch cannot use. It would train on the CPUs of
            a GPU node, which nobody wants, for hours before anybody sees it.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    if device != "auto":
        return device
    if torch.cuda.is_available():
        return "cuda"
    if gpus := devices.gpus():
        raise ConfigError(
            f"device: this node has GPUs ({', '.join(gpus)}), and torch {torch.__version__} cannot "
            f"use them: {_why()}; install a build for the driver (bash setup.sh --torch cu126, or "
            "another build: bash setup.sh --help), or set device=cpu to train on CPUs"
        )
    return "cpu"


def own(asked: str) -> torch.device:
    """This rank's device, by `choose`; its GPU is the current one of the process from here on.

    What names no GPU, such as a stream or a kernel of Triton's, would else use the first of the
    node, together with all other ranks.

    Raises:
        ConfigError: see `choose`; or GPUs cannot be used, or are fewer than local ranks.
    """
    if choose(asked) == "cpu":
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if not torch.cuda.is_available():
        raise ConfigError("device: cuda is asked for, but this host shows no GPU; set device=auto")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"device: local rank {local_rank} needs GPU {local_rank}, but this host shows "
            f"{torch.cuda.device_count()}; lower resources.gpus_per_node"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def agree(device: str, store: Store, rank: int, ranks: int) -> None:
    """Raise an error on every rank if some of `ranks` are on CPUs and others on GPUs.

    They would wait for each other forever. This is said over the rendezvous' store, because
    neither gloo nor NCCL can be asked before the ranks agree.

    Raises:
        BadNodeError: on the ranks on CPUs, whose nodes have no GPU that torch finds.
        PeerError: on the others.
    """
    node = os.environ.get("NODE_NAME", "this host")
    store.set(f"device/{device}", f"{rank} {node}")
    if store.add("device/ranks", 1) == ranks:
        store.set("device/known", "")
    store.wait(["device/known"])
    if not all(store.check([f"device/{kind}"]) for kind in ("cpu", "cuda")):
        return
    if device == "cpu":
        raise BadNodeError(_without_gpu(node))
    number, _, name = store.get("device/cpu").decode().partition(" ")
    raise PeerError({int(number): Fault.of(BadNodeError(_without_gpu(name)))})


def _without_gpu(node: str) -> str:
    message = f"node {node} shows torch no GPU, and other nodes of this run do"
    return f"{message}: nvidia-smi on it says why"


def described(device: torch.device) -> str:
    """Return the name of a device for people: a GPU's by its driver, or CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _why() -> str:
    built = torch.version.cuda or torch.version.hip
    if built is None:
        return "it is a build for CPUs"
    driver = re.search(r"Module\s+([\d.]+)", DRIVER.read_text()) if DRIVER.is_file() else None
    shown = f"the driver is {driver[1]}" if driver else "the driver's version cannot be read"
    return f"it is built for {'CUDA' if torch.version.cuda else 'ROCm'} {built}, and {shown}"
