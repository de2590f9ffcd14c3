"""What follows when an attempt has ended: the run is finished, it fails, or another attempt starts.

slurm/attempt.py collects the facts, slurm/job.sh does what is decided. Standard library only.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from slurm.faults import NODE_FAILURE, describe, first_error

# By the type of the error that ended the attempt.
_CAUSES = {
    "Killed": "killed",
    "BadNodeError": "bad_node",
    "Hang": "hang",
    "NotStopped": "time_limit",
    "NodeFailure": "node_failure",
    "OutputError": "killed",
    "StorageError": "storage",
    "SupersededError": "superseded",
    "NoSpace": "no_space",
    "Quota": "quota",
    "NetworkError": "network",
    "NetworkTimeout": "network_timeout",
    "NonFiniteLossError": "non_finite_loss",
    "ConfigError": "user_error",
    "OutOfMemory": "out_of_memory",
    "OutOfMemoryError": "out_of_memory",
    "MemoryError": "out_of_memory",
}
# What torch says of memory in a plain RuntimeError: its CPU allocator, CUDA itself, cuBLAS.
_NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
# By Slurm's state of the job.
_ENDED = {
    "TIMEOUT": ("time_limit", "Slurm ended the job at its time limit"),
    "PREEMPTED": ("preempted", "Slurm ended the job for another one of higher priority"),
    "NODE_FAIL": ("node_failure", "Slurm ended the job because it lost a node"),
    "REQUEUED": ("requeued", "somebody requeued the job"),
    "UNKNOWN": ("terminated", "the job script was terminated, and Slurm does not say why"),
}
# Attempts that ended so say nothing about the run: they do not count as attempts without progress.
NOT_COUNTED = frozenset({"preempted", "requeued", "controller"})
# A node is to blame for these, if two attempts in a row name it.
_OF_A_NODE = frozenset({"killed", "hang", "error"})


@dataclass(frozen=True)
class Verdict:
    """How an attempt ended, and what the job script does next.

    state: a word of runspec.states. next: finished, failed, run (again, on these nodes) or requeue.
    node: the node of the rank that failed first, None if nobody knows.
    """

    state: str
    next: str
    cause: str
    message: str = ""
    node: str | None = None


def _cause(error: dict[str, Any]) -> str:
    """Return the cause of an attempt's end by the error that ended it."""
    kind, message = str(error.get("type")), str(error.get("message"))
    if kind == "RuntimeError" and any(words in message for words in _NO_MEMORY):
        return "out_of_memory"
    return _CAUSES.get(kind, "error")


def ended_by_slurm(state: str | None, nodes: list[str]) -> Verdict:
    """Return how an attempt ended whose job script wrote nothing, and goes on in a new start.

    Args:
        state: what Slurm wrote about it, None if it wrote nothing.
        nodes: those that Slurm lost.
    """
    cause, message = ("lost", "its node was lost, or its job script was killed")
    if state in _ENDED:
        cause, message = _ENDED[state]
    elif nodes:
        cause, message = _ENDED["NODE_FAIL"]
    return _interrupted("run", cause, message, nodes)


def ended_job(job_state: str, cancelled: bool, succeeds: bool, lost: list[str]) -> Verdict:
    """Return how a job ended that Slurm or somebody ended, in an attempt or between two.

    Args:
        job_state: Slurm's word for the job.
        cancelled: `cookbook cancel` ended it.
        succeeds: a job that takes this one's place is in the queue.
        lost: the nodes that Slurm lost.
    """
    # Somebody ended it: no retry.
    if cancelled or job_state == "CANCELLED":
        who = "by cookbook cancel" if cancelled else "its job was cancelled"
        return Verdict("CANCELLED", "failed", "cancelled", who)
    # Slurm itself requeues a job that it ends for lack of nodes.
    cause, message = _ENDED.get(job_state, (job_state.lower(), f"Slurm ended it: {job_state}"))
    # Where it may not, the successor goes on.
    return _interrupted("requeue" if succeeds else "failed", cause, message, lost)


def _interrupted(following: str, cause: str, message: str, nodes: list[str]) -> Verdict:
    """Return the verdict on an attempt that Slurm ended; nodes: those that it lost."""
    if cause != "node_failure" or not nodes:
        return Verdict("INTERRUPTED", following, cause, message)
    return Verdict("INTERRUPTED", following, cause, f"{message}: {', '.join(nodes)}", nodes[0])


def bad_nodes(attempts: list[dict[str, Any]]) -> set[str]:
    """Return the nodes that Slurm lost, unfit ones, and those that two attempts in a row name."""
    unfit = {str(node) for line in attempts for node in line.get("bad_nodes") or []}
    lost = {str(line["node"]) for line in attempts if line.get("cause") == "node_failure"} - {
        "None"
    }
    named = [
        str(line["node"])
        for line in attempts
        if line.get("node") and line.get("cause") in _OF_A_NODE
    ]
    return lost | unfit | {node for node, after in pairwise(named) if node == after}


def decide(
    exit_code: int,
    progress: dict[str, Any],
    errors: list[dict[str, Any]],
    stop_asked: bool,
    cancelled: bool,
    job_state: str | None,
    can_requeue: bool,
    fruitless: int,
    max_retries: int,
    timed_out_s: float | None = None,
    not_started: str = "",
    cause_before: str | None = None,
    used_up: str = "",
    succeeds: bool = False,
    memory_is_result: bool = False,
    worse: str = "",
) -> Verdict:
    """Judge one attempt.

    Args:
        progress: the trainer's progress.json, {} if the entry writes none.
        errors: what ranks and nodes recorded.
        stop_asked: the time limit is near, so the ranks were asked to save and stop.
        cancelled: `cookbook cancel` ended the job.
        job_state: Slurm's word for the job if Slurm is ending it, else None.
        fruitless: how many attempts in a row, this one included, brought no newer checkpoint.
        timed_out_s: the recipe's timeout if the attempt reached it.
        not_started: srun's words if it did not reach the controller, so that no rank was started.
        cause_before: the cause of the attempt before this one, in the same job.
        succeeds: a job that takes this one's place is in the queue.
        used_up: says so if the run has used the GPU-hours that it may use.
        memory_is_result: the run is one of a sweep, which asks whether it fits.
        worse: says so if its sweep stopped it, because others do better.
    """
    trained = progress.get("state")
    # Once all is written it does not matter how the processes end.
    if trained == "finished" or (exit_code == 0 and trained is None):
        return Verdict("COMPLETED", "finished", "finished")

    if cancelled or job_state is not None:
        lost = [str(each["host"]) for each in errors if each.get("type") == NODE_FAILURE]
        return ended_job(job_state or "", cancelled, succeeds, lost)
    if not_started and cause_before != "controller":
        return Verdict("RETRYING", "run", "controller", f"srun started nothing: {not_started}")
    if timed_out_s is not None:
        message = f"ended by the recipe's timeout of {timed_out_s:.0f} s"
        return Verdict("FAILED", "failed", "timeout", message)

    if used_up and exit_code == 0 and trained == "stopped":
        return Verdict("FAILED", "failed", "budget", used_up)

    if worse and exit_code == 0 and trained == "stopped":
        return Verdict("CANCELLED", "failed", "stopped_early", worse)

    # Why it ended. Ranks also stop in order when Slurm's TERM reaches them after another's death.
    first = first_error(errors)
    node = str(first["host"]) if first and first.get("host") else None
    if first:
        cause, message = _cause(first), describe(first)
    elif stop_asked:
        cause, message = "time_limit", "stopped before the time limit"
    elif exit_code == 0 and trained == "stopped":
        cause, message = "stopped", "the ranks were told to stop, and not by the job script"
    else:
        cause, message = "killed", f"exit status {exit_code}, and no rank recorded an error"

    # What a retry cannot fix, or has not fixed often enough.
    if first and first.get("permanent"):
        return Verdict("FAILED", "failed", cause, message, node)
    if cause == "out_of_memory" and memory_is_result:
        return Verdict("FAILED", "failed", cause, message, node)
    if cause == cause_before == "out_of_memory":
        return Verdict("FAILED", "failed", cause, f"{message}; twice in a row", node)
    if fruitless > max_retries:
        message += f"; {fruitless} attempts saved nothing new" if max_retries else ""
        return Verdict("FAILED", "failed", cause, message, node)

    if used_up:
        return Verdict("FAILED", "failed", cause, f"{message}; {used_up}", node)

    # A stop that neither the script asked for nor a death explains is Slurm's, which takes the
    # allocation away a moment later.
    if (stop_asked or cause == "stopped") and can_requeue:
        return Verdict("REQUEUED", "requeue", cause, message, node)
    return Verdict("RETRYING", "run", cause, message, node)
