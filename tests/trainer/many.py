"""Several runs one after the other, each in a fork of its own, to pay for the imports once."""

import os
import signal
import socket
import sys
import warnings

# The trainer imports these where it needs them, which would be in every fork again.
import datasets  # noqa: F401
import torch.distributed.checkpoint
import torch.utils.tensorboard  # noqa: F401
from torch.distributed import TCPStore

from trainer import sft


def fork(path: str, port: int) -> int:
    """Do one run in a child, so that nothing of the run before is left; its exit status."""
    # Each run meets at a store of its own: torchrun's would still hold the last run's keys.
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
    # Python from 3.12 on warns of every fork with threads; the child starts none before its run.
    warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
    child = os.fork()
    if child == 0:
        status = sft.main([path])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    ports = [0] * len(sys.argv[1:])
    if "RANK" in os.environ:
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if os.environ["RANK"] == "0":
            store.set("ports", ",".join(str(free_port()) for _ in ports))
        ports = [int(port) for port in store.get("ports").decode().split(",")]
        del store
    for path, port in zip(sys.argv[1:], ports, strict=True):
        if status := fork(path, port):
            sys.exit(status)
