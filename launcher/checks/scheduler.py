"""What Slurm would refuse, or take and let wait for ever."""

from __future__ import annotations

import grp
import os
import re

from launcher import slurm
from launcher.checks import Context, Skipped
from launcher.errors import SlurmFault, SlurmMissing, SlurmTimeout, nearest
from launcher.limits import Association, Limits, Rights, Rules
from launcher.recipe import Resources, time_limit_s
from launcher.render import job_script
from launcher.runs import runs_root

# What sinfo prints for a limit; "infinite" and "n/a" are none.
_TIME = re.compile(r"(?:\d+-)?\d+(?::\d+){0,2}\Z")

_ELSEWHERE = "or choose another --partition"
_SHORTER = "lower --time (the run goes on in a new job)"
_TOGETHER = "gives all its jobs together {}"
# Slurm's trackable resources (TRES), and what changes how much of them is asked for.
_THINGS = {"node": "nodes", "cpu": "CPUs", "mem": "MiB of memory", "gres/gpu": "GPUs"}
_LOWER = {
    "node": "lower --nodes",
    "cpu": "lower resources.cpus_per_gpu or --nodes",
    "mem": "lower resources.mem or --nodes",
    "gres/gpu": "lower --nodes or --gpus-per-node",
}


def limits(context: Context) -> list[str] | str:
    """What Slurm would take and then let wait for ever, or refuse, whatever the nodes' states."""
    if context.local:
        raise Skipped("--local: no Slurm is asked")
    known, rules, resources = context.partitions, slurm.rules(), context.resources
    wanted = resources.partition.split(",") if resources.partition else []
    shown = ", ".join(name for name in known if _open(rules.get(name)))
    found = [
        f"there is no partition {name!r} on this cluster{nearest(name, known)}: choose one of "
        f"{shown} with --partition"
        for name in wanted
        if name not in known
    ]
    chosen = [known[name] for name in wanted if name in known]
    chosen = chosen or [each for each in known.values() if each.default]
    if not chosen:
        return found or [
            f"this cluster has no default partition: choose one of {shown} with --partition"
        ]
    found += account_faults(context.rights, resources.account, resources.qos)
    jobs = [_Job(context, each, rules.get(each.name)) for each in chosen]
    refused = [job.faults() for job in jobs]
    if all(refused):  # one that takes the job is enough
        found += dict.fromkeys(fault for faults in refused for fault in faults)
    found += _node_shape(context, chosen)
    names = (each.name if each.up else f"{each.name} (down now: jobs wait)" for each in chosen)
    return found or f"partition {', '.join(names)}"


def _open(rules: Rules | None) -> bool:
    return rules is None or not (rules.hidden or _outside(rules.groups))


def _outside(groups: tuple[str, ...]) -> bool:
    """Whether this user is in none of the groups that a partition is for, if it is for some."""
    if not groups or os.getuid() == 0:
        return False
    return all(grp_id not in (os.getgid(), *os.getgroups()) for grp_id in map(_group_id, groups))


def _group_id(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return -1


def account_faults(rights: Rights | None, account: str | None, qos: str | None) -> list[str]:
    """Say what is wrong with the names of an account and a QoS, None for the user's defaults.

    Only what the cluster enforces counts: else Slurm takes any name.
    """
    if rights is None or "associations" not in rights.enforced:
        return []
    accounts = sorted({each.account for each in rights.mine})
    if not accounts:
        return [
            "you have no account on this cluster, which refuses jobs without one: ask its "
            "administrators for one"
        ]
    if account and account not in accounts:
        return [
            f"you have no account {account!r}{nearest(account, accounts)} on this cluster: choose "
            f"one of {', '.join(accounts)} with --account"
        ]
    usable = [
        each for each in rights.mine if (each.account == account if account else each.default)
    ]
    names = sorted({name for each in usable for name in each.qos})
    if qos and names and qos not in names and "qos" in rights.enforced:
        return [
            f"account {usable[0].account} may not use the QoS {qos!r}{nearest(qos, names)}: choose "
            f"one of {', '.join(names)} with --qos"
        ]
    return []


class _Job:
    """What is asked of one partition, and what it and the user's account and QoS say to that."""

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
        self.node = _tres_of_a_node(context)
        nodes = self.resources.nodes
        self.tres = {"node": nodes} | {key: nodes * each for key, each in self.node.items()}

    def faults(self) -> list[str]:
        """Return why this partition would not take the job, or never start it."""
        name, over = self.partition.name, self._over(self.qos if self.usable else "")
        return [
            *(f"partition {name} {each}, {_ELSEWHERE}" for each in self._closed()),
            *(f"{each}, {_ELSEWHERE}" for each in self._too_large()),
            *(f"{each}, {self._otherwise(each, over)}" for each in over),
        ]

    def _closed(self) -> list[str]:
        """Whether the partition is shut, or shut to this user, account or QoS."""
        rules, found = self.rules, []
        if rules is None:
            return []
        if rules.state in ("DRAIN", "INACTIVE"):
            found.append(f"takes no new jobs now (its state is {rules.state}): wait")
        if rules.root_only and os.getuid() != 0:
            found.append("is for administrators alone: ask them")
        if rules.reservation_only and not self.resources.reservation:
            found.append("takes only jobs of a reservation: set resources.reservation=")
        if _outside(rules.groups):
            names = ", ".join(rules.groups)
            found.append(f"is only for members of {names}, and you are none: ask to become one")
        if self.rights and self.place:
            account = self.place.account
            if not _taken(self.rights.lineage(account), rules.accounts, rules.denied_accounts):
                text = _only("account", rules.accounts, account)
                found.append(f"{text}: choose another --account")
        by_qos = bool(self.rights and self.qos and "qos" in self.rights.enforced and self.usable)
        if by_qos and not _taken([self.qos], rules.allowed_qos, rules.denied_qos):
            found.append(f"{_only('QoS', rules.allowed_qos, self.qos)}: choose another --qos")
        return found

    def _too_large(self) -> list[str]:
        """Whether the partition has, and gives a job, as many nodes and as much time."""
        nodes, partition, rules = self.resources.nodes, self.partition, self.rules
        qos = self.rights.qos.get(self.qos) if self.rights else None
        flags = qos.flags if qos else frozenset()
        asked, found = f"{nodes} nodes are asked for, and partition {partition.name}", []
        if nodes > partition.nodes:
            text = f"{asked} has {partition.nodes}: the job would wait for ever: lower --nodes"
            found.append(text)
        elif rules and nodes > (rules.max_nodes or nodes) and "PartitionMaxNodes" not in flags:
            found.append(f"{asked} gives a job {rules.max_nodes}: lower --nodes")
        if rules and nodes < rules.min_nodes and "PartitionMinNodes" not in flags:
            found.append(f"{asked} takes jobs on {rules.min_nodes} or more: raise --nodes")
        limit = partition.time_limit
        if self._longer_than(limit) and "PartitionTimeLimit" not in flags:
            time = f"a time limit of {self.resources.time} is asked for"
            found.append(f"{time}, and partition {partition.name} has {limit}: {_SHORTER}")
        return found

    def _longer_than(self, limit: str) -> bool:
        asked = self.resources.time_s
        return bool(asked and _TIME.match(limit) and asked > time_limit_s(limit))

    def _over(self, qos: str) -> list[str]:
        """Say which limits of accounting the job would break with a QoS.

        Slurm's order: the partition's QoS, the job's, then the user's place in the account; for
        each resource the first that limits it counts. What all jobs together may use is also
        limited by every account above.
        """
        if self.rights is None or "limits" not in self.rights.enforced:
            return []
        named = [self.rules.qos if self.rules else None, qos]
        levels = [self.rights.qos[name] for name in named if name in self.rights.qos]
        if levels and "OverPartQOS" in levels[-1].flags:
            levels.reverse()
        above = self._accounts()
        place = levels + above[:1]
        limited = {name for each in levels for name in each.together}
        free = {name: amount for name, amount in self.tres.items() if name not in limited}
        found = [
            *self._more(self.tres, "job", "gives one job {}", place),
            *self._more(self.node, "node", "gives a job {} a node", place),
            *self._more(self.tres, "user", "gives one user {}", levels),
            *self._more(self.tres, "account", "gives one account {}", levels),
            *self._less(levels),
            *self._more(self.tres, "together", _TOGETHER, levels),
        ]
        for each in above:
            found += self._more(free, "together", _TOGETHER, [each])
        limit = next((each for each in place if each.time), None)
        if limit and self._longer_than(limit.time):
            found.append(
                f"a time limit of {self.resources.time} is asked for, and {limit.owner} gives "
                f"{limit.time}: {_SHORTER}"
            )
        return found + self._budget(above)

    def _accounts(self) -> list[Limits]:
        """The user's place in the account, the account, and those above it."""
        if self.rights is None or self.place is None:
            return []
        own = self.rights.own.get((self.place.account, self.place.partition), Limits("nobody"))
        names = self.rights.lineage(self.place.account)
        return [own, *(self.rights.groups[name] for name in names if name in self.rights.groups)]

    def _otherwise(self, fault: str, faults: list[str]) -> str:
        """Name the QoS that take this fault away and add none, else say to change the account."""
        others = self.place.qos if self.place else ()
        rest = set(faults) - {fault}
        fit = [name for name in others if name != self.qos and set(self._over(name)) <= rest]
        return f"or choose --qos {' or '.join(fit[:3])}" if fit else "or choose another --account"

    def _more(
        self, asked: dict[str, int], kind: str, gives: str, levels: list[Limits]
    ) -> list[str]:
        found = []
        for name, amount in asked.items():
            first = next((each for each in levels if name in getattr(each, kind)), None)
            most = getattr(first, kind)[name] if first else amount
            if first and amount > most:
                found.append(
                    f"{_amount(name, amount)} asked for, and {first.owner} {gives.format(most)}: "
                    f"the job would never start: {_LOWER.get(name, _LOWER['gres/gpu'])}"
                )
        return found

    def _less(self, levels: list[Limits]) -> list[str]:
        found = []
        for name, amount in self.tres.items():
            first = next((each for each in levels if name in each.least), None)
            if first and amount < first.least[name]:
                found.append(
                    f"{_amount(name, amount)} asked for, and {first.owner} takes jobs of "
                    f"{first.least[name]} or more: ask for more"
                )
        return found

    def _budget(self, accounts: list[Limits]) -> list[str]:
        """Whether the account has time left; with "safe", as much as the run may take."""
        found = []
        safe = self.rights is not None and "safe" in self.rights.enforced
        for each in accounts:
            for name, left in each.budget_min.items():
                may_take = self.tres.get(name, 0) * (self.resources.time_s or 0) / 60
                if name in self.tres and (left <= 0 or (safe and may_take > left)):
                    what = f"{_THINGS.get(name, name).removesuffix('s')}-hours"
                    found.append(
                        f"{each.owner} has {max(0, left) / 60:.1f} {what} left, and the run may "
                        f"take {may_take / 60:.1f}: ask the administrators for more"
                    )
        return found


def _default_qos(place: Association) -> str:
    return place.default_qos or ("normal" if "normal" in place.qos else "")


def _taken(names: list[str], allowed: tuple[str, ...], denied: tuple[str, ...]) -> bool:
    """Whether a partition takes one of names: the job's own, then those that stand above it."""
    return bool(set(names) & set(allowed)) if allowed else names[0] not in denied


def _only(what: str, allowed: tuple[str, ...], name: str) -> str:
    if allowed:
        return f"takes only {what} {' or '.join(allowed)}, not {name}"
    return f"does not take {what} {name}"


def _amount(name: str, amount: int) -> str:
    what = _THINGS.get(name, f"GPUs of type {name.rpartition(':')[2]}")
    return f"{amount} {what} are"


def _tres_of_a_node(context: Context) -> dict[str, int]:
    """What is asked of each node, by Slurm's names; what the recipe leaves open is left out."""
    resources = context.resources
    gpus = 0 if context.cluster.gpu_request == "none" else resources.gpus_per_node
    found = {
        "cpu": (resources.cpus_per_gpu or 0) * resources.gpus_per_node,
        "mem": _megabytes(resources.mem),
        "gres/gpu": gpus,
        f"gres/gpu:{resources.gpu_type}": gpus if resources.gpu_type else 0,
    }
    return {name: amount for name, amount in found.items() if amount}


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
            f"{slurm.with_meaning(line)}: change what is asked for; where nodes are down only for "
            "now, submit with --no-check"
            for line in fault.faults
        ]
