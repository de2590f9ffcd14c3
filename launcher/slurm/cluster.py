"""What Slurm says about the cluster: partitions, nodes, configuration."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.errors import SlurmFault
from launcher.slurm.command import run

# cookbook doctor reports a controller that takes longer than this as one that does not answer.
_QUICK_S = 5


@dataclass(frozen=True)
class Nodes:
    """Nodes of a partition that are alike, as sinfo reports them.

    gpus (by type, "" if Slurm knows none), memory_mb and cpus are per node. reason: why they are
    down or drained.
    """

    count: int
    gpus: dict[str, int]
    memory_mb: int
    cpus: int
    state: str = "idle"
    reason: str = ""

    @property
    def usable(self) -> bool:
        """Whether a job can start on them now or once others have ended."""
        return re.sub(r"[^a-z-]", "", self.state) in ("idle", "mixed", "allocated", "completing")


@dataclass(frozen=True)
class Partition:
    """A partition as sinfo reports it: all its nodes, up or not, and its time limit as text."""

    name: str
    time_limit: str
    default: bool = False
    up: bool = True
    kinds: tuple[Nodes, ...] = ()

    @property
    def nodes(self) -> int:
        return sum(kind.count for kind in self.kinds)


def partitions(hidden: bool = False) -> dict[str, Partition]:
    """Return the partitions that this user may see, by name; hidden: all others too."""
    by_name: dict[str, Partition] = {}
    argv = ["sinfo", "--noheader", "--format=%R|%P|%D|%l|%a|%G|%m|%c|%T|%E"]
    for line in run([*argv, "--all"] if hidden else argv, timeout_s=20).splitlines():
        fields = line.strip().split("|", 9)
        if len(fields) != 10:
            continue
        name, marked, count, limit, available, gres, memory, cpus, *health = fields
        kind = Nodes(_number(count), gpus_of(gres), _number(memory), _number(cpus), *health)
        # Nodes that differ come in several lines.
        kinds = (*by_name[name].kinds, kind) if name in by_name else (kind,)
        by_name[name] = Partition(name, limit, marked.endswith("*"), available == "up", kinds)
    return by_name


def _number(text: str) -> int:
    digits = re.match(r"\d+", text)  # sinfo writes 256+ if alike nodes differ
    return int(digits.group()) if digits else 0


def gpus_of(gres: str) -> dict[str, int]:
    """Return the GPUs of a node by type ("" if Slurm knows no type), from its Gres text."""
    gpus: dict[str, int] = {}
    for kind, count in re.findall(r"(?:^|,)gpu(?::([A-Za-z][\w.-]*))?:(\d+)", gres):
        gpus[kind] = gpus.get(kind, 0) + int(count)
    return gpus


def configuration() -> dict[str, str]:
    """Return slurm.conf as the controller runs it."""
    text = run(["scontrol", "show", "config"], timeout_s=_QUICK_S)
    pairs = (line.partition("=") for line in text.splitlines())
    configured = {key.strip(): value.strip() for key, equals, value in pairs if equals}
    slurm_conf = os.environ.get("SLURM_CONF")
    _identities[slurm_conf] = _identity(configured, slurm_conf)
    return configured


def identity() -> dict[str, str]:
    """Return what tells this cluster from another one, as a job's record keeps it.

    cluster: its name; controller: the first controller's host; slurm_conf: the variable SLURM_CONF,
    if it is set.
    """
    slurm_conf = os.environ.get("SLURM_CONF")
    if slurm_conf not in _identities:
        configuration()
    return _identities[slurm_conf]


# By the variable SLURM_CONF: a cluster does not change its name while a command runs.
_identities: dict[str | None, dict[str, str]] = {}


def _identity(configured: Mapping[str, str], slurm_conf: str | None) -> dict[str, str]:
    controller = configured.get("SlurmctldHost[0]", "").partition("(")[0]
    identity = {"cluster": configured.get("ClusterName", ""), "controller": controller}
    return identity | ({"slurm_conf": slurm_conf} if slurm_conf else {})


def version() -> str | None:
    """Return Slurm's version, such as 22.05.8; None if it is not installed."""
    try:
        return run(["sbatch", "--version"], timeout_s=10).split()[-1]
    except (SlurmFault, IndexError):
        return None
