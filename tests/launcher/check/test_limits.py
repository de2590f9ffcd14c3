"""Whom a partition takes that names accounts; test_accounting.py asks Slurm of all else."""

from dataclasses import replace

from launcher.check import Context
from launcher.check.scheduler import accounting, partition
from launcher.check.scheduler.partition import Job
from launcher.recipe import load as recipes
from launcher.site import Site
from launcher.slurm.cluster import Nodes, Partition
from launcher.slurm.limits import Association, Rights, Rules

BRIEF = Partition("brief", "20:00", kinds=(Nodes(4, {"": 8}, 0, 0),))
RULES = Rules(None, 0, (), (), (), (), None)
RIGHTS = Rights(
    enforced=frozenset({"associations", "limits", "qos"}),
    mine=(Association("biology", "", ("normal",), "normal", True),),
    qos={},
    own={},
    groups={},
    parents={"biology": "science"},
)


def refused(rules: Rules) -> list[str]:
    """What the partition refuses of a job of five minutes."""
    context = Context(recipes.load("demo", resources={"nodes": 2, "time": "5"}), Site())
    vars(context)["rights"] = RIGHTS
    return [each.message for each in partition.faults(Job(context, BRIEF, rules))]


def test_a_partition_of_an_account_takes_it_and_those_below_it():
    (fault,) = refused(replace(RULES, accounts=("physics",)))
    assert fault == "partition brief takes only account physics, not biology"
    assert refused(replace(RULES, accounts=("physics", "science"))) == []
    assert len(refused(replace(RULES, denied_accounts=("biology",)))) == 1


def test_a_user_without_an_account_is_told():
    (fault,) = accounting.account_faults(replace(RIGHTS, mine=()), None, None)
    assert fault.message.startswith("you have no account on this cluster, which refuses jobs")
