"""What a partition, a QoS and an account allow, read from what scontrol and sacctmgr print."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

PLACE_FIELDS = "cluster,account,partition,qos,defaultqos,defaultaccount"
QOS_FIELDS = (
    "name,flags,maxwall,maxtresperjob,maxtrespernode,maxtresperuser,maxtresperaccount,"
    "mintresperjob,grptres"
)


@dataclass(frozen=True)
class Rules:
    """Whom and what a partition takes; None and () where it limits nothing.

    state: UP, DOWN (jobs wait), DRAIN or INACTIVE (jobs are refused). qos: the name of the QoS
    whose limits hold for all jobs in it.
    """

    state: str
    hidden: bool
    max_nodes: int | None
    min_nodes: int
    groups: tuple[str, ...]
    accounts: tuple[str, ...]
    denied_accounts: tuple[str, ...]
    allowed_qos: tuple[str, ...]
    denied_qos: tuple[str, ...]
    qos: str | None
    reservation_only: bool
    root_only: bool


@dataclass(frozen=True)
class Limits:
    """What a QoS, an account or a user's place in an account allows; owner names it in messages.

    TRES by Slurm's names (node, cpu, mem in MiB, gres/gpu ...): for one job, one node of it, all
    jobs of a user, all of an account, and all together; least: what one job has to ask for;
    budget_min: what is left of TRES x minutes. time is a job's longest time limit, "" for none.
    """

    owner: str
    flags: frozenset[str] = frozenset()
    time: str = ""
    job: dict[str, int] = field(default_factory=dict)
    node: dict[str, int] = field(default_factory=dict)
    user: dict[str, int] = field(default_factory=dict)
    account: dict[str, int] = field(default_factory=dict)
    together: dict[str, int] = field(default_factory=dict)
    least: dict[str, int] = field(default_factory=dict)
    budget_min: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Association:
    """An account that this user may use, in all partitions ("") or in one, and its QoS."""

    account: str
    partition: str
    qos: tuple[str, ...]
    default_qos: str
    default: bool


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
        found = [
            each
            for each in self.mine
            if (each.account == account if account else each.default)
            and each.partition in ("", partition)
        ]
        return max(found, key=lambda each: each.partition, default=None)

    def lineage(self, account: str) -> list[str]:
        """Return an account and all above it, the nearest first."""
        found = []
        while account and account not in found:
            found.append(account)
            account = self.parents.get(account, "")
        return found


def read_rules(text: str) -> dict[str, Rules]:
    """Read `scontrol --oneliner show partition`."""
    found = {}
    for line in text.splitlines():
        told = _pairs(line)
        if "PartitionName" not in told:
            continue
        found[told["PartitionName"]] = Rules(
            state=told.get("State", "UP"),
            hidden=told.get("Hidden") == "YES",
            max_nodes=int(most) if (most := told.get("MaxNodes", "")).isdigit() else None,
            min_nodes=int(told.get("MinNodes", "0")),
            groups=_names(told.get("AllowGroups")),
            accounts=_names(told.get("AllowAccounts")),
            denied_accounts=_names(told.get("DenyAccounts")),
            allowed_qos=_names(told.get("AllowQos")),
            denied_qos=_names(told.get("DenyQos")),
            qos=next(iter(_names(told.get("QoS"))), None),
            reservation_only=told.get("ReqResv") == "YES",
            root_only=told.get("RootOnly") == "YES",
        )
    return found


def read_rights(configured: dict[str, str], places: str, qos: str, accounts: str) -> Rights:
    """Read the configuration, sacctmgr's users and QoS, and the controller's associations."""
    own, groups, parents = _account_limits(accounts)
    enforced = configured.get("AccountingStorageEnforce", "none").lower()
    return Rights(
        enforced=frozenset(_names(enforced)),
        mine=tuple(_associations(places, configured.get("ClusterName", ""))),
        qos=_qos_limits(qos),
        own=own,
        groups=groups,
        parents=parents,
    )


def _pairs(line: str) -> dict[str, str]:
    return {
        key: value
        for key, equals, value in (word.partition("=") for word in line.split())
        if equals
    }


def _names(text: str | None) -> tuple[str, ...]:
    return () if text in (None, "", "ALL", "N/A", "(null)") else tuple(str(text).split(","))


def _associations(text: str, cluster: str) -> Iterable[Association]:
    for row in (line.split("|") for line in text.splitlines()):
        if len(row) == 6 and row[0] == cluster:
            _, account, partition, qos, default_qos, default = row
            yield Association(account, partition, _names(qos), default_qos, account == default)


def _qos_limits(text: str) -> dict[str, Limits]:
    found = {}
    for row in (line.split("|") for line in text.splitlines()):
        if len(row) == 9:
            name, flags, time_limit, job, node, user, account, least, together = row
            found[name] = Limits(
                owner=f"QoS {name}",
                flags=frozenset(_names(flags)),
                time=time_limit,
                job=_tres(job),
                node=_tres(node),
                user=_tres(user),
                account=_tres(account),
                together=_tres(together),
                least=_tres(least),
            )
    return found


def _account_limits(
    text: str,
) -> tuple[dict[tuple[str, str], Limits], dict[str, Limits], dict[str, str]]:
    own, groups, parents = {}, {}, {}
    for told in map(_pairs, text.splitlines()):
        if "Account" not in told or "GrpTRES" not in told:
            continue
        account, user = told["Account"], told.get("UserName")
        limits = Limits(
            owner=f"your place in account {account}" if user else f"account {account}",
            time=_clock(told.get("MaxWallPJ", "")),
            job=_tres(told.get("MaxTRESPJ", "")),
            node=_tres(told.get("MaxTRESPN", "")),
            together=_tres(told["GrpTRES"]),
            budget_min=_tres(told.get("GrpTRESMins", ""), left=True),
        )
        if user:
            own[account, told.get("Partition", "")] = limits
        else:
            groups[account] = limits
            parents[account] = told.get("ParentAccount", "").partition("(")[0]
    return own, groups, parents


def _clock(minutes: str) -> str:
    return f"{int(minutes) // 60:02d}:{int(minutes) % 60:02d}:00" if minutes.isdigit() else ""


def _tres(text: str, left: bool = False) -> dict[str, int]:
    """Read "cpu=4,mem=2G,node=N(0),gres/gpu=8(2)", memory as MiB; N is no limit.

    left: what is not used yet, in place of the limit.
    """
    found = {}
    for name, value, unit, used in re.findall(r"([^=,]+)=(\d+)([KMGTP]?)(?:\((\d+)\))?", text):
        amount = int(value) * 1024 ** "KMGTP".index(unit) // 1024 if unit else int(value)
        found[name] = amount - int(used or 0) if left else amount
    return found
