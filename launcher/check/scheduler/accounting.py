"""Checks a job against the limits and budgets of Slurm's accounting."""

from collections.abc import Iterator
from dataclasses import replace

from launcher.check import Finding, failed
from launcher.check.scheduler.partition import SHORTER, SUBJECT, Job
from launcher.slurm.limits import Limits, Rights

# Slurm's trackable resources (TRES), and what changes how much of them is asked for.
_THINGS = {
    "node": ("nodes", "--nodes"),
    "cpu": ("CPUs", "resources.cpus_per_gpu or --nodes"),
    "mem": ("MiB of memory", "resources.mem or --nodes"),
    "gres/gpu": ("GPUs", "--nodes or --gpus-per-node"),
}
_TOGETHER = "gives all its jobs together {}"


def limit_faults(job: Job) -> list[Finding]:
    """Return the limits that the job would break, each with the QoS that would allow it."""
    over = list(_over(job, job.qos))
    return [replace(each, remedy=f"{each.remedy}, {_otherwise(job, each, over)}") for each in over]


def _otherwise(job: Job, fault: Finding, faults: list[Finding]) -> str:
    """Name the QoS that take this fault away and add none, else say to change the account."""
    others = job.place.qos if job.place else ()
    rest = set(faults) - {fault}
    fit = [name for name in others if name != job.qos and set(_over(job, name)) <= rest]
    return f"or choose --qos {' or '.join(fit[:3])}" if fit else "or choose another --account"


def _over(job: Job, qos: str) -> Iterator[Finding]:
    """Yield the limits of accounting that the job would break with a QoS.

    Slurm's order: the partition's QoS, the job's, then the user's place in the account; for
    each resource the first that limits it counts. What all jobs together may use is also
    limited by every account above.
    """
    rights = job.rights
    if rights is None or "limits" not in rights.enforced:
        return
    named = [job.rules.qos if job.rules else None, qos]
    levels = [rights.qos[name] for name in named if name in rights.qos]
    if levels and "OverPartQOS" in levels[-1].flags:
        levels.reverse()
    above = _accounts(job, rights)
    place = levels + above[:1]
    limited = {name for each in levels for name in each.together}
    free = {name: amount for name, amount in job.tres.items() if name not in limited}
    yield from _more(job.tres, "job", "gives one job {}", place)
    yield from _more(job.per_node, "node", "gives a job {} per node", place)
    yield from _more(job.tres, "user", "gives one user {}", levels)
    yield from _more(job.tres, "account", "gives one account {}", levels)
    yield from _more(job.tres, "together", _TOGETHER, levels)
    for each in above:
        yield from _more(free, "together", _TOGETHER, [each])
    limit = next((each for each in place if each.time), None)
    if limit and job.longer_than(limit.time):
        asked = f"a time limit of {job.resources.time} is asked for"
        yield failed(SUBJECT, f"{asked}, and {limit.owner} gives {limit.time}", SHORTER)
    yield from _budget(job, above, "safe" in rights.enforced)


def _accounts(job: Job, rights: Rights) -> list[Limits]:
    """Return the limits of the user's place in the account, the account, and those above it."""
    if job.place is None:
        return []
    own = rights.own.get((job.place.account, job.place.partition), Limits("nobody"))
    names = rights.lineage(job.place.account)
    return [own, *(rights.groups[name] for name in names if name in rights.groups)]


def _more(asked: dict[str, int], kind: str, gives: str, levels: list[Limits]) -> Iterator[Finding]:
    for name, amount in asked.items():
        first = next((each for each in levels if name in getattr(each, kind)), None)
        most = getattr(first, kind)[name] if first else amount
        if first and amount > most:
            message = f"{_amount(name, amount)} asked for, and {first.owner} {gives.format(most)}"
            _, lower = _THINGS.get(name, _THINGS["gres/gpu"])
            yield failed(SUBJECT, f"{message}: the job would never start", f"lower {lower}")


def _budget(job: Job, accounts: list[Limits], safe: bool) -> Iterator[Finding]:
    """Whether the account has time left; with "safe", as much as the run may take."""
    for each in accounts:
        for name, left in each.budget_min.items():
            may_take = job.tres.get(name, 0) * (job.resources.time_s or 0) / 60
            if name in job.tres and (left <= 0 or (safe and may_take > left)):
                what = f"{_THINGS.get(name, [name])[0].removesuffix('s')}-hours"
                message = f"{each.owner} has {max(0, left) / 60:.1f} {what} left, and the run may"
                remedy = "ask the administrators for more"
                yield failed(SUBJECT, f"{message} take {may_take / 60:.1f}", remedy)


def _amount(name: str, amount: int) -> str:
    what = _THINGS.get(name, [f"GPUs of type {name.rpartition(':')[2]}"])[0]
    return f"{amount} {what} are"
