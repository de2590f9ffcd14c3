"""Which node doctor asks, and what its report comes to."""

from dataclasses import replace

from launcher import venv
from launcher.check import Finding, failed, skipped
from launcher.check.doctor.ask import Question, ask
from launcher.check.doctor.report import node_findings
from launcher.check.doctor.slurm import SlurmAnswers
from launcher.recipe.model import Resources
from launcher.site import slurm_options

# What the job does not ask of Slurm, whatever the site file says.
_NOT_ASKED = ("mem", "time", "exclude")


def findings(site: SlurmAnswers, wait_s: float) -> list[Finding]:
    """Ask a node of the partition by a short job, which may wait so long to start."""
    usable = [nodes for nodes in site.own_nodes if nodes.usable]
    if not usable:
        message = f"partition {site.partition} has no usable node to ask"
        return [skipped("nodes", message, "try again later, or with another --cluster")]
    gpus = min(1, *(sum(nodes.gpus.values()) for nodes in usable))
    asked = replace(Resources.of(site.cluster.resources), partition=site.partition)
    srun = slurm_options(asked, site.cluster, gpus, _NOT_ASKED)
    question = Question(site.cluster, srun, gpus, venv.torch_build(), wait_s)
    step, reports = ask(question)
    if step.pending:
        message = (
            f"a job on 1 node of {site.partition} did not start within {wait_s:.0f} s and was "
            "cancelled"
        )
        remedy = "try again when the queue is shorter, or wait longer with --wait SECONDS"
        return [skipped("nodes", message, remedy)]
    if not reports:
        message = step.message or f"srun ended with status {step.exit_code} and no message"
        remedy = "try that srun by hand: srun --nodes=1 hostname"
        return [failed("nodes", f"no node could be asked: {message}", remedy)]
    return node_findings(reports[0], question)
