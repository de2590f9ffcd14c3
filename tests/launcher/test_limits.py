"""What a partition and an account refuse, as Slurm reports them; test_accounting.py asks Slurm."""

from dataclasses import replace

from launcher.check import Context
from launcher.check.scheduler import accounting, partition
from launcher.check.scheduler.partition import Job
from launcher.recipe import load as recipes
from launcher.site import Site
from launcher.slurm.cluster import Nodes, Partition
from launcher.slurm.limits import Association, Rights, Rules

BRIEF = Partition("brief", "20:00", kinds=(Nodes(4, {"": 8}, 0, 0),))
RULES = Rules("UP", False, None, 0, (), (), (), (), (), None, False, False)
RIGHTS = Rights(
    enforced=frozenset({"associations", "limits", "qos"}),
    mine=(Association("biology", "", ("normal",), "normal", True),),
    qos={},
    own={},
    groups={},
    parents={"biology": "science"},
)


def refused(rules: Rules, time: str) -> list[str]:
    """What the partition refuses of a job of so long."""
    context = Context(recipes.load("demo", resources={"nodes": 2, "time": time}), Site())
    vars(context)["rights"] = RIGHTS
    return [each.message for each in partition.faults(Job(context, BRIEF, rules))]


def test_a_partition_refuses_a_longer_time_than_it_has():
    (fault,) = refused(RULES, "01:00:00")
    assert fault == "a time limit of 01:00:00 is asked for, and partition brief has 20:00"
    assert refused(RULES, "00:20:00") == []


def test_a_partition_of_an_account_takes_it_and_those_below_it():
    (fault,) = refused(replace(RULES, accounts=("physics",)), "5")
    assert fault == "partition brief takes only account physics, not biology"
    assert refused(replace(RULES, accounts=("physics", "science")), "5") == []
    assert len(refused(replace(RULES, denied_accounts=("biology",)), "5")) == 1


def test_an_account_and_a_qos_must_be_the_users():
    (fault,) = accounting.account_faults(RIGHTS, "biolgy", None)
    assert fault.message == "you have no account 'biolgy' (did you mean biology?) on this cluster"
    (fault,) = accounting.account_faults(RIGHTS, None, "high")
    assert fault.message.startswith("account biology may not use the QoS 'high'")
    assert accounting.account_faults(RIGHTS, "biology", "normal") == []
