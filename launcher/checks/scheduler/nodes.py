"""Whether one kind of node has all that a run asks of a node."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.checks import Context
from launcher.checks.finding import Finding, failed
from launcher.checks.scheduler.job import SUBJECT, tres_per_node
from launcher.errors import nearest
from launcher.executors import slurm

# By Slurm's name: the resource in words, and what lowers how much is asked for.
_LOWER = {
    "gres/gpu": ("GPUs", "--gpus-per-node"),
    "cpu": ("CPUs", "resources.cpus_per_gpu"),
    "mem": ("MiB of memory", "resources.mem"),
}


def faults(context: Context, chosen: list[slurm.Partition]) -> Iterator[Finding]:
    """Yield what no node of the chosen partitions has."""
    gpu_type, asked = context.resources.gpu_type, tres_per_node(context)
    kinds = [kind for each in chosen for kind in each.kinds]
    names = ", ".join(each.name for each in chosen)
    known = sorted({name for kind in kinds for name in kind.gpus if name})
    if gpu_type and "gres/gpu" in asked and gpu_type not in known:
        asked.pop("gres/gpu")
        words = f"no node of partition {names} has GPUs of type {gpu_type!r}"
        words += f"{nearest(gpu_type, known)}: it has {', '.join(known) or 'none with a type'}"
        yield failed(SUBJECT, words, "set resources.gpu_type=")
    for name, (what, change) in _LOWER.items():
        most = max((_on(kind, name, gpu_type) for kind in kinds), default=0)
        if asked.get(name, 0) > most:
            words = f"{asked[name]} {what} per node are asked for, and the nodes of partition"
            remedy = f"lower {change}, or choose another --partition"
            yield failed(SUBJECT, f"{words} {names} have at most {most}", remedy)


def _on(kind: slurm.Nodes, name: str, gpu_type: str | None) -> int:
    """Return how much of a trackable resource a node has."""
    if name == "gres/gpu":
        return kind.gpus.get(gpu_type, 0) if gpu_type else sum(kind.gpus.values())
    return kind.cpus if name == "cpu" else kind.memory_mb
