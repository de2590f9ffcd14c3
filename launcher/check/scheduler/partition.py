"""What a run asks of a partition, and what the partition's rules and nodes say to that."""

import re
from collections.abc import Iterator
from functools import cached_property

from launcher import slurm
from launcher.check import Context, Finding, failed
from launcher.errors import nearest
from launcher.recipe.model import time_limit_s
from launcher.slurm.limits import Rules

SUBJECT = "Slurm limits"
SHORTER = "lower --time (the run goes on in a new job)"
# What sinfo prints for a limit; "infinite" and "n/a" are none.
_TIME = re.compile(r"(?:\d+-)?\d+(?::\d+){0,2}\Z")
# By Slurm's name: the resource in words, and what lowers how much is asked for.
_LOWER = {
    "gres/gpu": ("GPUs", "--gpus-per-node"),
    "cpu": ("CPUs", "resources.cpus_per_gpu"),
    "mem": ("MiB of memory", "resources.mem"),
}


class Job:
    """A run as a job of one partition; rules and rights are None if Slurm does not say any."""

    def __init__(self, context: Context, partition: slurm.Partition, rules: Rules | None) -> None:
        self.resources = context.resources
        self.partition, self.rules = partition, rules
        rights = context.rights
        self.rights = rights if rights and "associations" in rights.enforced else None
        account = self.resources.account
        self.place = self.rights.place(account, partition.name) if self.rights else None
        self.qos = self.resources.qos or (self.place.default_qos if self.place else "")
        self.per_node = tres_per_node(context)

    @cached_property
    def tres(self) -> dict[str, int]:
        """Slurm's trackable resources (TRES) of the whole job, by Slurm's names."""
        nodes = self.resources.allocated_nodes
        return {"node": nodes} | {key: nodes * each for key, each in self.per_node.items()}

    def longer_than(self, limit: str) -> bool:
        asked = self.resources.time_s
        return bool(asked and _TIME.match(limit) and asked > time_limit_s(limit))


def tres_per_node(context: Context) -> dict[str, int]:
    """Return the request to each node, by Slurm's names, without keys that the recipe omits."""
    resources = context.resources
    gpus = 0 if context.cluster.gpu_request == "none" else resources.gpus_per_node
    amounts = {
        "cpu": (resources.cpus_per_gpu or 0) * resources.gpus_per_node,
        "mem": megabytes(resources.mem),
        "gres/gpu": gpus,
        f"gres/gpu:{resources.gpu_type}": gpus if resources.gpu_type else 0,
    }
    return {name: amount for name, amount in amounts.items() if amount}


def megabytes(memory: str | None) -> int:
    """Return Slurm's --mem in MiB; 0, and nothing, ask for no more than a node has."""
    if not memory:
        return 0
    unit = memory[-1] if memory[-1].isalpha() else "M"
    return int(memory.rstrip("KMGT")) * int(1024 ** "KMGT".index(unit)) // 1024


def faults(job: Job) -> list[Finding]:
    """Return why this partition would never start the job."""
    return [
        failed(SUBJECT, reason, f"{fix}, or choose another --partition")
        for reason, fix in _too_large(job)
    ]


def _too_large(job: Job) -> Iterator[tuple[str, str]]:
    """Whether the partition has, and gives a job, as many nodes and as much time."""
    nodes, partition, rules = job.resources.allocated_nodes, job.partition, job.rules
    qos = job.rights.qos.get(job.qos) if job.rights else None
    flags = qos.flags if qos else frozenset()
    generating, lower = "", "lower --nodes"
    if rollout := job.resources.rollout:
        generating, lower = f", {rollout} of them for rollouts", f"{lower} or resources.rollout"
    asked = f"{nodes} nodes are asked for{generating}, and partition {partition.name}"
    if nodes > partition.nodes:
        yield f"{asked} has {partition.nodes}: the job would wait forever", lower
    elif rules and nodes > (rules.max_nodes or nodes) and "PartitionMaxNodes" not in flags:
        yield f"{asked} gives a job {rules.max_nodes}", lower
    if rules and nodes < rules.min_nodes and "PartitionMinNodes" not in flags:
        yield f"{asked} takes jobs on {rules.min_nodes} or more", "raise --nodes"
    limit = partition.time_limit
    if job.longer_than(limit) and "PartitionTimeLimit" not in flags:
        time = f"a time limit of {job.resources.time} is asked for"
        yield f"{time}, and partition {partition.name} has {limit}", SHORTER


def node_faults(context: Context, chosen: list[slurm.Partition]) -> Iterator[Finding]:
    """Yield what no node of the chosen partitions has."""
    gpu_type, asked = context.resources.gpu_type, tres_per_node(context)
    kinds = [kind for each in chosen for kind in each.kinds]
    names = ", ".join(each.name for each in chosen)
    known = sorted({name for kind in kinds for name in kind.gpus if name})
    if gpu_type and "gres/gpu" in asked and gpu_type not in known:
        asked.pop("gres/gpu")
        message = f"no node of partition {names} has GPUs of type {gpu_type!r}"
        message += f"{nearest(gpu_type, known)}: it has {', '.join(known) or 'none with a type'}"
        yield failed(SUBJECT, message, "set resources.gpu_type=")
    for name, (what, change) in _LOWER.items():
        most = max((_on(kind, name, gpu_type) for kind in kinds), default=0)
        if asked.get(name, 0) > most:
            message = f"{asked[name]} {what} per node are asked for, and the nodes of partition"
            remedy = f"lower {change}, or choose another --partition"
            yield failed(SUBJECT, f"{message} {names} have at most {most}", remedy)


def _on(kind: slurm.Nodes, name: str, gpu_type: str | None) -> int:
    """Return how much of a trackable resource a node has."""
    if name == "gres/gpu":
        return kind.gpus.get(gpu_type, 0) if gpu_type else sum(kind.gpus.values())
    return kind.cpus if name == "cpu" else kind.memory_mb
