"""What a run asks of a partition, as Slurm counts it."""

from __future__ import annotations

import re
from functools import cached_property

from launcher.checks import Context
from launcher.executors import slurm
from launcher.executors.slurm.limits import Association, Rules
from launcher.recipes.recipe import time_limit_s

SUBJECT = "Slurm limits"
SHORTER = "lower --time (the run goes on in a new job)"
# What sinfo prints for a limit; "infinite" and "n/a" are none.
_TIME = re.compile(r"(?:\d+-)?\d+(?::\d+){0,2}\Z")


class Job:
    """A run as a job of one partition; rules and rights are None if Slurm does not say any."""

    def __init__(self, context: Context, partition: slurm.Partition, rules: Rules | None) -> None:
        self.resources = context.resources
        self.partition, self.rules = partition, rules
        rights = context.rights
        self.rights = rights if rights and "associations" in rights.enforced else None
        account = self.resources.account
        self.place = self.rights.place(account, partition.name) if self.rights else None
        self.qos = self.resources.qos or (_default_qos(self.place) if self.place else "")
        # A QoS that may not be used is a fault already, and says nothing more.
        self.usable = self.place is None or not self.place.qos or self.qos in self.place.qos
        self.per_node = tres_per_node(context)

    @cached_property
    def tres(self) -> dict[str, int]:
        """Slurm's trackable resources (TRES) of the whole job, by Slurm's names."""
        nodes = self.resources.nodes
        return {"node": nodes} | {key: nodes * each for key, each in self.per_node.items()}

    def longer_than(self, limit: str) -> bool:
        asked = self.resources.time_s
        return bool(asked and _TIME.match(limit) and asked > time_limit_s(limit))


def _default_qos(place: Association) -> str:
    return place.default_qos or ("normal" if "normal" in place.qos else "")


def tres_per_node(context: Context) -> dict[str, int]:
    """Return what is asked of each node, by Slurm's names; without what the recipe leaves open."""
    resources = context.resources
    gpus = 0 if context.cluster.gpu_request == "none" else resources.gpus_per_node
    found = {
        "cpu": (resources.cpus_per_gpu or 0) * resources.gpus_per_node,
        "mem": megabytes(resources.mem),
        "gres/gpu": gpus,
        f"gres/gpu:{resources.gpu_type}": gpus if resources.gpu_type else 0,
    }
    return {name: amount for name, amount in found.items() if amount}


def megabytes(memory: str | None) -> int:
    """Return Slurm's --mem in MiB; 0, and nothing, ask for no more than a node has."""
    if not memory:
        return 0
    unit = memory[-1] if memory[-1].isalpha() else "M"
    return int(memory.rstrip("KMGT")) * int(1024 ** "KMGT".index(unit)) // 1024
