"""What Slurm would refuse, or accept and then let wait forever."""

from collections.abc import Iterable

from launcher import slurm
from launcher.check import Context, Finding, Skipped, failed, ok
from launcher.check.scheduler import accounting, partition
from launcher.check.scheduler.partition import SUBJECT, Job
from launcher.errors import SlurmFault, SlurmMissing, SlurmTimeout, nearest
from launcher.run.directory import runs_root
from launcher.slurm.render import job_script

_NO_SLURM = "--local: Slurm is not asked"


def limits(context: Context) -> Iterable[Finding]:
    """Check what is asked for against the limits of partition, account, QoS and nodes.

    Slurm takes a job that breaks them, and lets it wait. What it refuses at once, such as another
    user's account, is left to sbatch. What other jobs use now, and nodes that are down now, do not
    count.
    """
    if not context.executor.queued:
        raise Skipped(_NO_SLURM)
    known, rules, resources = context.partitions, slurm.rules(), context.resources
    wanted = resources.partition.split(",") if resources.partition else []
    unknown = "there is no partition {!r} on this cluster{}"
    findings = [
        failed(SUBJECT, unknown.format(name, nearest(name, known)), _choose())
        for name in wanted
        if name not in known
    ]
    chosen = [known[name] for name in wanted if name in known]
    chosen = chosen or [each for each in known.values() if each.default]
    if not chosen:
        return findings or [failed(SUBJECT, "this cluster has no default partition", _choose())]
    jobs = [Job(context, each, rules.get(each.name)) for each in chosen]
    refused = [[*partition.faults(job), *accounting.limit_faults(job)] for job in jobs]
    if all(refused):  # one that takes the job is enough
        findings += dict.fromkeys(fault for faults in refused for fault in faults)
    findings += partition.node_faults(context, chosen)
    names = (each.name if each.up else f"{each.name} (down now: jobs wait)" for each in chosen)
    return findings or [ok(SUBJECT, f"partition {', '.join(names)} takes this job")]


def _choose() -> str:
    return f"choose one of {', '.join(slurm.partitions())} with --partition"


def test_only(context: Context) -> Iterable[Finding]:
    """Ask sbatch --test-only about the script that would be submitted; nothing is queued."""
    if not context.executor.queued:
        raise Skipped(_NO_SLURM)
    run = runs_root(context.cluster.root) / "check"
    script = job_script(context.recipe, context.cluster, run, context.recipe.name)
    subject = "sbatch test"
    try:
        answer = slurm.test_only(script).removeprefix("sbatch: ")
        return [ok(subject, f"not queued: {answer}")]
    except SlurmMissing as missing:
        raise Skipped("there is no Slurm on this machine") from missing
    except SlurmTimeout:
        raise
    except SlurmFault as fault:
        remedy = (
            "change what is asked for (cookbook doctor lists partitions, accounts and QoS); if "
        )
        remedy += "nodes are only down now, submit with --no-check"
        return [failed(subject, slurm.with_meaning(line), remedy) for line in fault.faults]
