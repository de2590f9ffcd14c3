"""What a partition, a QoS and an account allow, from scontrol and sacctmgr."""

import os
import pwd
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from launcher.errors import SlurmFault
from launcher.slurm.command import run

_ASSOCIATION_FIELDS = "cluster,account,partition,qos,defaultqos,defaultaccount"
# The order is that of Limits.
_QOS_FIELDS = (
    "name,flags,maxwall,maxtresperjob,maxtrespernode,maxtresperuser,maxtresperaccount,grptres"
)


@dataclass(frozen=True)
class Rules:
    """How large the jobs of a partition may be; None if it does not limit that.

    qos: the name of the QoS whose limits hold for all jobs in it.
    """

    max_nodes: int | None
    min_nodes: int
    qos: str | None


@dataclass(frozen=True)
class Limits:
    """What a QoS, an account or a user's place in an account allows; owner names it in messages.

    TRES by Slurm's names (node, cpu, mem in MiB, gres/gpu ...): for one job, one node of it, all
    jobs of a user, all of an account, and all together; budget_min: the remaining TRES x minutes.
    time is a job's longest time limit, "" for none.
    """

    owner: str
    flags: frozenset[str] = frozenset()
    time: str = ""
    job: dict[str, int] = field(default_factory=dict)
    node: dict[str, int] = field(default_factory=dict)
    user: dict[str, int] = field(default_factory=dict)
    account: dict[str, int] = field(default_factory=dict)
    together: dict[str, int] = field(default_factory=dict)
    budget_min: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Association:
    """An account that this user may use, in all partitions ("") or in one, and its QoS.

    default_qos is that of a job that names none, "" if Slurm says none.
    """

    account: str
    partition: str
    qos: tuple[str, ...]
    default_qos: str
    default: bool

    def serves(self, account: str | None) -> bool:
        """Whether a job of an account (None: the default one) has it."""
        return self.account == account if account else self.default


@dataclass(frozen=True)
class Rights:
    """What accounting lets this user do.

    enforced: associations, limits, qos, safe ... as AccountingStorageEnforce has them. own: the
    limits of each association by account and partition; groups: those of the accounts by name;
    parents: the account above each.
    """

    enforced: frozenset[str]
    mine: tuple[Association, ...]
    qos: dict[str, Limits]
    own: dict[tuple[str, str], Limits]
    groups: dict[str, Limits]
    parents: dict[str, str]

    def place(self, account: str | None, partition: str) -> Association | None:
        """Return the association that a job of an account (None: the default one) would have."""
        serving = (each for each in self.mine if each.serves(account))
        fitting = (each for each in serving if each.partition in ("", partition))
        return max(fitting, key=lambda each: each.partition, default=None)

    def lineage(self, account: str) -> list[str]:
        """Return an account and all above it, the nearest first."""
        accounts = []
        while account and account not in accounts:
            accounts.append(account)
            account = self.parents.get(account, "")
        return accounts


def rules() -> dict[str, Rules]:
    """Return the rules of every partition by name, also of those that are hidden from this user."""
    text = run(["scontrol", "--all", "--oneliner", "show", "partition"])
    partitions = map(_pairs, text.splitlines())
    return {each["PartitionName"]: _rules(each) for each in partitions if "PartitionName" in each}


def _rules(values: dict[str, str]) -> Rules:
    return Rules(
        max_nodes=int(most) if (most := values.get("MaxNodes", "")).isdigit() else None,
        min_nodes=int(values.get("MinNodes", "0")),
        qos=next(iter(_names(values.get("QoS"))), None),
    )


def keeps_accounting(configured: dict[str, str]) -> bool:
    """Whether the cluster has a database of accounts."""
    return configured.get("AccountingStorageType", "").endswith("/slurmdbd")


def rights(configured: dict[str, str]) -> Rights | None:
    """Return what accounting lets this user do; None if the cluster keeps none or does not answer.

    configured is the controller's configuration. The database says what may be used. The
    controller, which enforces the accounts' limits, says what they are and how much is left.
    """
    if not keeps_accounting(configured):
        return None
    user = pwd.getpwuid(os.getuid()).pw_name
    listed = ["sacctmgr", "--noheader", "--parsable2", "show"]
    questions = (
        [*listed, "user", f"name={user}", "withassoc", f"format={_ASSOCIATION_FIELDS}"],
        [*listed, "qos", f"format={_QOS_FIELDS}"],
        ["scontrol", "--oneliner", "show", "assoc_mgr", f"users={user}", "flags=assoc"],
    )
    try:
        # At once: the database needs its time for each.
        with ThreadPoolExecutor() as pool:
            places, qos, accounts = pool.map(partial(run, timeout_s=10), questions)
    except SlurmFault:
        return None
    enforced = frozenset(_names(configured.get("AccountingStorageEnforce", "none").lower()))
    mine = tuple(_associations(places, configured.get("ClusterName", "")))
    return Rights(enforced, mine, _qos_limits(qos), *_limits(accounts))


def _pairs(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def _names(text: str | None) -> tuple[str, ...]:
    return () if text in (None, "", "ALL", "N/A", "(null)") else tuple(str(text).split(","))


def _rows(text: str, fields: str) -> list[list[str]]:
    """Return sacctmgr's rows that have all fields."""
    rows = (line.split("|") for line in text.splitlines())
    return [row for row in rows if len(row) == fields.count(",") + 1]


def _associations(text: str, cluster: str) -> Iterable[Association]:
    for of_cluster, account, partition, named, default_qos, default in _rows(
        text, _ASSOCIATION_FIELDS
    ):
        if of_cluster == cluster:
            qos = _names(named)
            default_qos = default_qos or ("normal" if "normal" in qos else "")
            yield Association(account, partition, qos, default_qos, account == default)


def _qos_limits(text: str) -> dict[str, Limits]:
    return {
        name: Limits(f"QoS {name}", frozenset(_names(flags)), time_limit, *map(_tres, tres))
        for name, flags, time_limit, *tres in _rows(text, _QOS_FIELDS)
    }


def _limits(text: str) -> tuple[dict[tuple[str, str], Limits], dict[str, Limits], dict[str, str]]:
    """Return the limits of associations and of accounts, and each account's parent."""
    own, groups, parents = {}, {}, {}
    for values in map(_pairs, text.splitlines()):
        if "Account" not in values or "GrpTRES" not in values:
            continue
        account, user = values["Account"], values.get("UserName")
        limits = Limits(
            owner=f"your place in account {account}" if user else f"account {account}",
            time=_clock(values.get("MaxWallPJ", "")),
            job=_tres(values.get("MaxTRESPJ", "")),
            node=_tres(values.get("MaxTRESPN", "")),
            together=_tres(values["GrpTRES"]),
            budget_min=_tres(values.get("GrpTRESMins", ""), left=True),
        )
        if user:
            own[account, values.get("Partition", "")] = limits
        else:
            groups[account] = limits
            parents[account] = values.get("ParentAccount", "").partition("(")[0]
    return own, groups, parents


def _clock(minutes: str) -> str:
    return f"{int(minutes) // 60:02d}:{int(minutes) % 60:02d}:00" if minutes.isdigit() else ""


def _tres(text: str, left: bool = False) -> dict[str, int]:
    """Read "cpu=4,mem=2G,node=N(0),gres/gpu=8(2)", memory as MiB; N is no limit.

    left: what is not used yet, in place of the limit.
    """
    amounts = {}
    for name, value, unit, used in re.findall(r"([^=,]+)=(\d+)([KMGTP]?)(?:\((\d+)\))?", text):
        amount = int(value) * 1024 ** "KMGTP".index(unit) // 1024 if unit else int(value)
        amounts[name] = amount - int(used or 0) if left else amount
    return amounts
