"""Accounts, QoS and limits of a real slurmdbd: told before the queue, and as Slurm acts on them."""

import getpass
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import check as checks
from launcher import paths, slurm
from launcher import site as cluster
from launcher.check import Finding, scheduler
from launcher.recipe import load as recipes
from launcher.slurm.render import job_script
from tests.conftest import NEEDS_ACCOUNTING, SlurmCluster
from tests.launcher.check.accounting_cases import REFUSED
from tests.launcher.kit import Kit, report, until
from tests.slurm.accounting import ENFORCED, accounting_cluster, restart_controller
from trainer import demo

pytestmark = [pytest.mark.long, NEEDS_ACCOUNTING]

USER = getpass.getuser()
# Each QoS has one limit, by which it is named.
QOS = {
    "job-gpus": "MaxTRESPerJob=gres/gpu=4",
    "job-nodes": "MaxTRESPerJob=node=1",
    "job-cpus": "MaxTRESPerJob=cpu=16",
    "job-memory": "MaxTRESPerJob=mem=100G",
    "node-gpus": "MaxTRESPerNode=gres/gpu=2",
    "user-gpus": "MaxTRESPerUser=gres/gpu=4",
    "account-gpus": "MaxTRESPerAccount=gres/gpu=4",
    "account-many": "GrpTRES=gres/gpu=64",
    "all-gpus": "GrpTRES=gres/gpu=4",
    "all-nodes": "GrpTRES=node=1",
    "time": "MaxWall=00:40:00",
    "one-runs": "MaxJobsPerUser=1",
    "one-queued": "MaxSubmitJobsPerUser=1",
    "strict": "MaxTRESPerJob=gres/gpu=4 Flags=DenyOnLimit",
    "free": "Flags=PartitionMaxNodes,PartitionTimeLimit",
    "over": "MaxTRESPerJob=gres/gpu=4 Flags=OverPartQOS",
    "of-partition": "MaxTRESPerJob=gres/gpu=2",
}
# Each partition has one rule.
PARTITIONS = {
    "narrow": "MaxNodes=1",
    "wide": "MinNodes=2",
    "brief": "MaxTime=00:20:00",
    "for-chemists": "AllowAccounts=chemistry",
    "for-qos": "AllowQos=job-gpus,time",
    "draining": "State=DRAIN",
    "resting": "State=DOWN",
    "limited": "QoS=of-partition",
    "reserved": "ReqResv=YES",
    "unseen": "Hidden=YES",
}


def commands() -> str:
    """What an administrator types into sacctmgr."""
    names = ",".join(["normal", *QOS])
    return "\n".join(
        [
            *(f"add qos {name} {limit}" for name, limit in QOS.items()),
            "add account physics GrpTRES=gres/gpu=8",
            "add account theory parent=physics",
            "add account chemistry",
            "add account spent GrpTRESMins=gres/gpu=0",
            *(f"add user {USER} account={name}" for name in ("theory", "chemistry", "spent")),
            f"modify user {USER} where account=theory set qos={names}",
            f"modify user {USER} where account=chemistry set MaxTRESPerJob=gres/gpu=1",
            f"modify user {USER} set DefaultAccount=theory",
        ]
    )


@pytest.fixture(scope="module")
def site() -> Iterator[SlurmCluster]:
    """A cluster that enforces what its database of accounts says."""
    with accounting_cluster("books", "--set", "MinJobAge=2") as made:
        done = made.run(["sacctmgr", "--immediate"], input=commands())
        assert "error" not in done.stdout.lower() + done.stderr.lower(), done
        for name, rule in PARTITIONS.items():
            made.run(
                ["scontrol", "create", f"PartitionName={name}", "Nodes=ALL", *rule.split()],
                check=True,
            )
        yield made


@pytest.fixture
def selected(site: SlurmCluster, monkeypatch, tmp_path) -> SlurmCluster:
    """The cluster, as this process's own too."""
    monkeypatch.setenv("SLURM_CONF", site.env["SLURM_CONF"])
    monkeypatch.setenv("COOKBOOK_ROOT", str(tmp_path))
    return site


def context(**resources) -> checks.Context:
    given = {"nodes": 2, "gpus_per_node": 4, **resources}
    return checks.Context(recipes.load("demo", [], given), cluster.Site())


def limits(asked: checks.Context) -> list[Finding]:
    return checks.findings("Slurm limits", scheduler.limits, asked)


def submit(asked: checks.Context, folder: Path) -> subprocess.CompletedProcess[str]:
    """Hand Slurm the very script that would be submitted."""
    script = folder / "job.sbatch"
    (folder / "logs").mkdir(exist_ok=True)
    script.write_text(job_script(asked.recipe, asked.cluster, folder, "demo"))
    return subprocess.run(["sbatch", "--parsable", script], capture_output=True, text=True)


def reason(job_id: str) -> str | None:
    """Why Slurm lets a job wait, once its scheduler has looked."""
    (job,) = [each for each in slurm.queue() if each.job_id == job_id]
    assert job.state == "PENDING", job
    return None if job.reason in ("None", "Priority") else job.reason


def what_slurm_does(asked: checks.Context, folder: Path) -> str:
    """Return why Slurm refuses a job, or why it lets it wait, in its own words."""
    sent = submit(asked, folder)
    if sent.returncode:
        return sent.stderr
    try:
        return until(lambda: reason(sent.stdout.strip()), 20)
    finally:
        subprocess.run(["scancel", sent.stdout.strip()], check=True)


@pytest.mark.parametrize(("resources", "told", "word", "meaning"), REFUSED)
def test_what_slurm_refuses_or_never_starts_is_one_fault(
    selected, tmp_path, resources, told, word, meaning
):
    asked = context(**resources)
    (fault,) = limits(asked)
    assert fault.state == "failed" and told in fault.line, fault
    words = what_slurm_does(asked, tmp_path)
    assert word in words
    plain = slurm.with_meaning(words) if "sbatch" in words else slurm.why_pending(words)
    assert meaning in plain and plain.startswith(words)


@pytest.mark.parametrize(
    ("resources", "word"),
    [
        ({}, ""),
        ({"qos": "free", "partition": "narrow"}, ""),
        ({"qos": "free", "partition": "brief", "time": "01:00:00"}, ""),
        ({"qos": "account-many", "gpus_per_node": 8}, ""),
        ({"account": "chemistry", "nodes": 1, "gpus_per_node": 1, "partition": "for-chemists"}, ""),
        ({"qos": "job-gpus", "partition": "for-qos", "gpus_per_node": 2}, ""),
        ({"partition": "narrow,gpu"}, ""),
        ({"partition": "resting"}, "PartitionDown"),
        ({"partition": "unseen"}, ""),
    ],
)
def test_what_slurm_starts_or_lets_wait_for_a_while_is_no_fault(
    selected, tmp_path, resources, word
):
    asked = context(**resources)
    assert [each.state for each in limits(asked)] == ["ok"], limits(asked)
    sent = submit(asked, tmp_path)
    assert sent.returncode == 0, sent.stderr

    def state() -> bool:
        (job,) = [each for each in slurm.queue() if each.job_id == sent.stdout.strip()]
        return job.reason == word if word else job.state != "PENDING"

    try:
        until(state, 20)
    finally:
        subprocess.run(["scancel", sent.stdout.strip()], check=True)


@pytest.mark.parametrize(
    ("qos", "word", "meaning"),
    [
        ("user-gpus", "QOSMaxGRESPerUser", "limits the GPUs of one user's jobs together: it waits"),
        ("all-gpus", "QOSGrpGRES", "limits the GPUs of all its jobs together: it waits"),
        ("one-runs", "QOSMaxJobsPerUserLimit", "your QoS already runs the maximum number of jobs"),
        ("one-queued", "QOSMaxSubmitJobPerUserLimit", "as many jobs in the queue as it may"),
    ],
)
def test_a_limit_that_another_job_uses_up_is_told_in_plain_words(
    selected, tmp_path, qos, word, meaning
):
    options = [f"--qos={qos}", "--gpus=3", "--output=/dev/null", "--parsable"]
    first = selected.run(["sbatch", *options, "--wrap=sleep 60"], cwd="/tmp").stdout.strip()
    try:
        asked = context(qos=qos, nodes=1, gpus_per_node=2)
        assert limits(asked)[0].state == "ok"
        words = what_slurm_does(asked, tmp_path)
        assert word in words
        if qos == "one-queued":  # refused at once, so asking beforehand says so too
            (fault,) = checks.findings("sbatch test", scheduler.test_only, asked)
            assert fault.state == "failed" and meaning in fault.message
        else:
            assert meaning in slurm.why_pending(words)
    finally:
        selected.run(["scancel", first], check=True)


@pytest.fixture
def member(site: SlurmCluster, tmp_path) -> Kit:
    """A user of the command on this cluster."""
    env = {key: value for key, value in site.env.items() if not key.startswith("COOKBOOK_")}
    return Kit({**env, "COOKBOOK_ROOT": str(tmp_path / "shared")}, tmp_path / "shared")


def test_submit_says_it_before_the_queue_and_leaves_nothing(member: Kit, site):
    options = ["--recipe", "demo", "--account", "teory", "--partition", "narrow"]
    done = member.cookbook("submit", *options, "--nodes", "2")
    assert done.returncode == 1 and not member.runs()
    assert "partition narrow gives a job 1" in done.stderr
    assert "Invalid account" in done.stderr and "cookbook doctor lists partitions" in done.stderr
    assert site.run(["squeue", "--noheader"]).stdout == ""


def test_the_doctor_tells_accounts_and_what_is_wrong_with_the_sites(member: Kit):
    path = paths.CLUSTERS / f"accounting-{os.getpid()}.yaml"
    path.write_text("resources: {account: teory, qos: time}\n")
    try:
        done = member.cookbook("doctor", "--json", "--cluster", path.stem)
    finally:
        path.unlink()
    findings = json.loads(done.stdout)["findings"]
    found = {(each["subject"], each["state"]): each["message"] for each in findings}
    told = found["accounting", "ok"]
    assert "your accounts: chemistry, " in told and "theory (default)" in told
    assert "QoS: account-gpus, " in told and told.endswith("limits are enforced")
    assert "Invalid account" in found["sbatch test", "failed"]


def test_a_job_that_only_the_accounting_remembers(member: Kit, site):
    """It never started, so nobody wrote its end down, and the queue forgets it."""
    demo.make(
        member.root / "models/demo-llama", paths.REPO_ROOT / "configs/datasets/slurm_qa.jsonl"
    )
    job_id, run = member.submit("--recipe", "demo", "--qos", "job-nodes", "--nodes", "2")
    waiting = "QOSMaxNodePerJobLimit"
    told = until(lambda: (found := member.status(run))["detail"] and found, 20)
    assert (told["state"], told["detail"][:9]) == ("PENDING", "waiting: ") and waiting in told[
        "detail"
    ]
    site.run(["scancel", job_id], check=True)
    # A look while the queue still shows the end would record it.
    queue = ["squeue", "--noheader", "--states=all", "--jobs", job_id]
    until(lambda: not site.run(queue).stdout.strip(), 300)
    found = member.status(run)
    assert (found["source"], found["state"]) == ("sacct", "CANCELLED"), report(run)
    watched = member.cookbook("watch", run.name, timeout=60)
    assert watched.returncode == 1 and "CANCELLED" in watched.stdout + watched.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("draining", "Required partition not available"),
        ("reserved", "Access/permission denied"),
    ],
)
def test_a_closed_partition_is_refused_in_slurms_words(selected, name, words):
    (fault,) = checks.findings("sbatch test", scheduler.test_only, context(partition=name))
    assert fault.state == "failed" and words in fault.message


def test_what_is_not_enforced_is_no_fault(selected: SlurmCluster, tmp_path):
    """Last: the cluster keeps its accounts from here on and holds nobody to them."""
    conf = selected.state / "slurm.conf"
    conf.write_text(conf.read_text().replace(ENFORCED, ""))
    restart_controller(selected)
    asked = context(account="nobody-knows", qos="job-gpus")
    assert limits(asked)[0].state == "ok"
    sent = submit(asked, tmp_path)
    assert sent.returncode == 0, sent.stderr
    subprocess.run(["scancel", sent.stdout.strip()], check=True)
