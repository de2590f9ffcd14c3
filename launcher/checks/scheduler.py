"""What Slurm would refuse, or take and let wait for ever."""

from __future__ import annotations

import re

from launcher import slurm
from launcher.checks import Context, Skipped
from launcher.errors import SlurmFault, SlurmMissing, SlurmTimeout, nearest
from launcher.recipe import Resources, time_limit_s
from launcher.render import job_script
from launcher.runs import runs_root

# What sinfo prints for a limit; "infinite" and "n/a" are none.
_TIME = re.compile(r"(?:\d+-)?\d+(?::\d+){0,2}\Z")


def limits(context: Context) -> list[str] | str:
    """What Slurm would take and then let wait for ever, or refuse, whatever the nodes' states."""
    if context.local:
        raise Skipped("--local: no Slurm is asked")
    resources = context.resources
    known = slurm.partitions()
    wanted = resources.partition.split(",") if resources.partition else []
    found = [
        f"there is no partition {name!r} on this cluster{nearest(name, known)}: choose one of "
        f"{', '.join(known)} with --partition"
        for name in wanted
        if name not in known
    ]
    chosen = [known[name] for name in wanted if name in known]
    chosen = chosen or [each for each in known.values() if each.default]
    if not chosen:
        return found or [
            "this cluster has no default partition: choose one of "
            f"{', '.join(known)} with --partition"
        ]
    found += _nodes_and_time(resources, chosen) + _node_shape(context, chosen)
    found += _account(resources)
    names = (each.name if each.up else f"{each.name} (down now: jobs wait)" for each in chosen)
    return found or f"partition {', '.join(names)}"


def _nodes_and_time(resources: Resources, chosen: list[slurm.Partition]) -> list[str]:
    found = []
    if all(resources.nodes > each.nodes for each in chosen):
        found.append(
            f"{resources.nodes} nodes are asked for, and {_each(chosen, 'nodes')}: the job would "
            "wait for ever: lower --nodes, or choose another --partition"
        )
    limits = [time_limit_s(each.time_limit) for each in chosen if _TIME.match(each.time_limit)]
    asked = resources.time_s
    if asked and len(limits) == len(chosen) and asked > max(limits):
        found.append(
            f"a time limit of {resources.time} is asked for, and {_each(chosen, 'time_limit')}: "
            "lower --time (the run goes on in a new job), or choose another --partition"
        )
    return found


def _node_shape(context: Context, chosen: list[slurm.Partition]) -> list[str]:
    """Whether one kind of node has all that is asked of a node; else what none has."""
    resources = context.resources
    kinds = [kind for each in chosen for kind in each.kinds]
    gpus = 0 if context.cluster.gpu_request == "none" else resources.gpus_per_node
    cpus = (resources.cpus_per_gpu or 0) * resources.gpus_per_node
    memory_mb = _megabytes(resources.mem)
    names = ", ".join(each.name for each in chosen)
    found = []
    if resources.gpu_type and gpus and all(resources.gpu_type not in kind.gpus for kind in kinds):
        types = sorted({name for kind in kinds for name in kind.gpus if name})
        found.append(
            f"no node of partition {names} has GPUs of type {resources.gpu_type!r}"
            f"{nearest(resources.gpu_type, types)}: it has "
            f"{', '.join(types) or 'none with a type'}; set resources.gpu_type="
        )
    most = {
        "GPUs": (gpus, max((_gpus(kind, resources) for kind in kinds), default=0)),
        "CPUs": (cpus, max((kind.cpus for kind in kinds), default=0)),
        "MiB of memory": (memory_mb, max((kind.memory_mb for kind in kinds), default=0)),
    }
    change = {
        "GPUs": "lower --gpus-per-node",
        "CPUs": "lower resources.cpus_per_gpu",
        "MiB of memory": "lower resources.mem",
    }
    for what, (asked, there) in most.items():
        if asked > there and not (what == "GPUs" and found):
            found.append(
                f"{asked} {what} a node are asked for, and the nodes of partition {names} have "
                f"{there} at most: {change[what]}, or choose another --partition"
            )
    return found


def _gpus(kind: slurm.Nodes, resources: Resources) -> int:
    return kind.gpus.get(resources.gpu_type, 0) if resources.gpu_type else sum(kind.gpus.values())


def _megabytes(memory: str | None) -> int:
    """Slurm's --mem as MiB; 0, and nothing, ask for no more than a node has."""
    if not memory:
        return 0
    unit = memory[-1] if memory[-1].isalpha() else "M"
    return int(memory.rstrip("KMGT")) * int(1024 ** "KMGT".index(unit)) // 1024


def _account(resources: Resources) -> list[str]:
    """Whether accounting, where the cluster keeps any, knows the account and the QoS."""
    mine = slurm.associations() if resources.account or resources.qos else None
    if mine is None:
        return []
    accounts = sorted({each.account for each in mine})
    if resources.account and resources.account not in accounts:
        return [
            f"you have no account {resources.account!r}{nearest(resources.account, accounts)} on "
            f"this cluster: choose one of {', '.join(accounts) or 'none'} with --account"
        ]
    usable = [each for each in mine if resources.account in (None, each.account)]
    qos = sorted({name for each in usable for name in each.qos})
    if resources.qos and qos and resources.qos not in qos:
        return [
            f"your account may not use the QoS {resources.qos!r}{nearest(resources.qos, qos)}: "
            f"choose one of {', '.join(qos)} with --qos"
        ]
    return []


def _each(partitions: list[slurm.Partition], what: str) -> str:
    return " and ".join(f"partition {each.name} has {getattr(each, what)}" for each in partitions)


def test_only(context: Context) -> list[str] | str:
    """Slurm's own word on the very script, which is not queued by it."""
    if context.local:
        raise Skipped("--local: no Slurm is asked")
    run = runs_root(context.cluster.root) / "check"
    script = job_script(context.recipe, context.cluster, run, context.recipe.name)
    try:
        return slurm.test_only(script).removeprefix("sbatch: ")
    except SlurmMissing as missing:
        raise Skipped("there is no Slurm to ask") from missing
    except SlurmTimeout:
        raise
    except SlurmFault as fault:
        return [
            f"{line}: change what is asked for; where nodes are down only for now, submit with "
            "--no-check"
            for line in fault.faults
        ]
