"""What a partition's own rules say to a job: who may use it, how many nodes, how long."""

from __future__ import annotations

import grp
import os
from collections.abc import Iterator

from launcher.checks.finding import Finding, failed
from launcher.checks.scheduler.job import SHORTER, SUBJECT, Job
from launcher.executors.slurm.limits import Rules


def is_open(rules: Rules | None) -> bool:
    """Whether this user sees the partition and may use it."""
    return rules is None or not (rules.hidden or _outside(rules.groups))


def faults(job: Job) -> list[Finding]:
    """Return why this partition would not take the job, or never start it."""
    name = job.partition.name
    found = [(f"partition {name} {words}", remedy) for words, remedy in _closed(job)]
    found += _too_large(job)
    return [failed(SUBJECT, words, f"{fix}, or choose another --partition") for words, fix in found]


def _closed(job: Job) -> Iterator[tuple[str, str]]:
    """Whether the partition is shut, or shut to this user, account or QoS."""
    rules, rights = job.rules, job.rights
    if rules is None:
        return
    if rules.state in ("DRAIN", "INACTIVE"):
        yield f"takes no new jobs now (its state is {rules.state})", "wait"
    if rules.root_only and os.getuid() != 0:
        yield "is only for administrators", "ask them"
    if rules.reservation_only and not job.resources.reservation:
        yield "takes only jobs of a reservation", "set resources.reservation="
    if _outside(rules.groups):
        words = f"is only for members of {', '.join(rules.groups)}, and you are none"
        yield words, "ask to become one"
    if rights and job.place:
        account = job.place.account
        if not _taken(rights.lineage(account), rules.accounts, rules.denied_accounts):
            yield _only("account", rules.accounts, account), "choose another --account"
    by_qos = rights and job.qos and "qos" in rights.enforced and job.usable
    if by_qos and not _taken([job.qos], rules.allowed_qos, rules.denied_qos):
        yield _only("QoS", rules.allowed_qos, job.qos), "choose another --qos"


def _too_large(job: Job) -> Iterator[tuple[str, str]]:
    """Whether the partition has, and gives a job, as many nodes and as much time."""
    nodes, partition, rules = job.resources.nodes, job.partition, job.rules
    qos = job.rights.qos.get(job.qos) if job.rights else None
    flags = qos.flags if qos else frozenset()
    asked = f"{nodes} nodes are asked for, and partition {partition.name}"
    if nodes > partition.nodes:
        yield f"{asked} has {partition.nodes}: the job would wait forever", "lower --nodes"
    elif rules and nodes > (rules.max_nodes or nodes) and "PartitionMaxNodes" not in flags:
        yield f"{asked} gives a job {rules.max_nodes}", "lower --nodes"
    if rules and nodes < rules.min_nodes and "PartitionMinNodes" not in flags:
        yield f"{asked} takes jobs on {rules.min_nodes} or more", "raise --nodes"
    limit = partition.time_limit
    if job.longer_than(limit) and "PartitionTimeLimit" not in flags:
        time = f"a time limit of {job.resources.time} is asked for"
        yield f"{time}, and partition {partition.name} has {limit}", SHORTER


def _outside(groups: tuple[str, ...]) -> bool:
    """Whether a partition is only for some groups, and this user is in none of them."""
    if not groups or os.getuid() == 0:
        return False
    return all(grp_id not in (os.getgid(), *os.getgroups()) for grp_id in map(_group_id, groups))


def _group_id(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return -1


def _taken(names: list[str], allowed: tuple[str, ...], denied: tuple[str, ...]) -> bool:
    """Whether a partition takes one of names: the job's own, then its parents'."""
    return bool(set(names) & set(allowed)) if allowed else names[0] not in denied


def _only(what: str, allowed: tuple[str, ...], name: str) -> str:
    if allowed:
        return f"takes only {what} {' or '.join(allowed)}, not {name}"
    return f"does not take {what} {name}"
