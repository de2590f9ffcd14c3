"""Decides what follows an attempt: the run is finished, it fails, or another attempt starts.

slurm/records.py collects the input, slurm/supervise.py does what is decided.
"""

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

from slurm.faults import NODE_FAILURE, SIGKILL, describe, first_error

_MISSING = "missing_package"
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
    "DamagedFile": "user_error",
    "ModuleNotFoundError": _MISSING,
    "ImportError": _MISSING,
    "PackageNotFoundError": _MISSING,
    "OutOfMemory": "out_of_memory",
    "OutOfMemoryError": "out_of_memory",
    "MemoryError": "out_of_memory",
}
# Messages of a plain RuntimeError about memory: of torch's CPU allocator, CUDA, and cuBLAS.
_NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
# Of an ImportError about a library: a node may lack its driver's, and another one has it.
_LIBRARY = "cannot open shared object file"
# What Python, its metadata, transformers, and a package's own check say of a package.
_PACKAGE = re.compile(
    r"No module named '?([^\s'.]+)|No package metadata was found for ([\w.-]+)"
    r"|requires the (\w+) library|pip3? install (?:-\S+ )*[\"'`]?([\w.-]*\w)"
)
# By Slurm's state of the job.
_ENDED = {
    "TIMEOUT": ("time_limit", "Slurm ended the job at its time limit"),
    "PREEMPTED": ("preempted", "Slurm ended the job for another one of higher priority"),
    "NODE_FAIL": ("node_failure", "Slurm ended the job because it lost a node"),
    "REQUEUED": ("requeued", "a user requeued the job"),
    "UNKNOWN": ("terminated", "the job script was terminated, and Slurm does not say why"),
}
# Causes outside the run: such attempts do not count as attempts without progress.
NOT_COUNTED = frozenset({"preempted", "requeued", "controller"})
# Causes for which a node is left out, if two attempts in a row name it.
_OF_A_NODE = frozenset({"killed", "hang", "error"})
# A filesystem may be away for minutes: attempts at once would use up the retries. It doubles.
_STORAGE_PAUSE_S, _STORAGE_MOST_S = 15.0, 240.0


def pause_s(attempts: list[dict[str, Any]]) -> float:
    """Return how long the job waits before the attempt that follows these, in seconds."""
    of_storage = takewhile(lambda line: line.get("cause") == "storage", reversed(attempts))
    count = len(list(of_storage))
    return min(_STORAGE_PAUSE_S * 2 ** (count - 1), _STORAGE_MOST_S) if count else 0.0


class Reason(NamedTuple):
    """Why an attempt ended."""

    cause: str
    message: str
    node: str | None = None  # of the rank that failed first, if it is known


class Verdict(NamedTuple):
    """How an attempt ended, and what the job does next."""

    state: str  # one of runspec.states
    next: str  # finished, failed, run (again, on these nodes) or requeue
    cause: str
    message: str = ""
    node: str | None = None


def _cause(error: dict[str, Any]) -> str:
    """Return the cause of an attempt's end by the error that ended it."""
    kind, message = str(error.get("type")), str(error.get("message"))
    if kind == "RuntimeError" and any(text in message for text in _NO_MEMORY):
        return "out_of_memory"
    # A traceback names the exceptions of packages with their module.
    cause = _CAUSES.get(kind.rpartition(".")[2], "error")
    if cause == "error" and "pip install " in message:
        return _MISSING
    return "error" if cause == _MISSING and _LIBRARY in message else cause


def _slurm_reason(state: str, lost: list[str]) -> Reason:
    """Return why a job ended, by Slurm's state of it and the nodes that Slurm lost."""
    cause, message = _ENDED.get(state, (state.lower(), f"Slurm ended it: {state}"))
    if cause != "node_failure" or not lost:
        return Reason(cause, message)
    return Reason(cause, f"{message}: {', '.join(lost)}", lost[0])


def ended_by_slurm(state: str | None, lost: list[str]) -> Verdict:
    """Return how an attempt ended whose job script wrote nothing, and continues in a new start.

    Args:
        state: what Slurm wrote about it, None if it wrote nothing.
        lost: the nodes that Slurm lost.
    """
    reason = Reason("lost", "its node was lost, or its job script was killed")
    if lost or state in _ENDED:
        reason = _slurm_reason(state if state in _ENDED else "NODE_FAIL", lost)
    return Verdict("INTERRUPTED", "run", *reason)


def bad_nodes(attempts: list[dict[str, Any]]) -> set[str]:
    """Return the nodes that Slurm lost, unfit ones, and those that two attempts in a row name."""
    unfit = {str(node) for line in attempts for node in line.get("bad_nodes") or []}
    ends = [(str(line["node"]), line.get("cause")) for line in attempts if line.get("node")]
    lost = {node for node, cause in ends if cause == "node_failure"}
    named = [node for node, cause in ends if cause in _OF_A_NODE]
    return lost | unfit | {node for node, after in pairwise(named) if node == after}


@dataclass(frozen=True)
class AttemptEnd:
    """What is known about an attempt that has ended, or about a job that ended between two."""

    exit_code: int
    progress: dict[str, Any]  # the trainer's progress.json, {} if the entry writes none
    errors: list[dict[str, Any]]  # recorded by ranks and nodes
    stop_asked: bool = False  # the ranks were asked to save and stop, before the time limit
    cancelled: bool = False  # by cookbook cancel
    job_state: str | None = None  # Slurm's, if Slurm is ending the job
    can_requeue: bool = False
    fruitless: int = 0  # attempts in a row, with this one, without a newer checkpoint
    max_retries: int = 0
    not_started: str = ""  # srun's message, if it did not reach the controller: no rank began
    cause_before: str | None = None  # of the attempt before this one, in the same job
    memory_is_result: bool = False  # the run belongs to a sweep, which asks whether it fits

    @property
    def finished(self) -> bool:
        """Whether all is written: then it does not matter how the processes end."""
        state = self.progress.get("state")
        return state == "finished" or (self.exit_code == 0 and state is None)

    @property
    def lacks_package(self) -> bool:
        """Whether the environment lacks a package: no earlier attempt of the job found it.

        If one did, the files of the environment are missing on a node for now.
        """
        return self.reason.cause == _MISSING and self.cause_before in (None, _MISSING)

    @property
    def how_to_add(self) -> str:
        """Which environment lacks which package, and what adds it."""
        named, own = _PACKAGE.search(str(self.error.get("message"))), os.environ.get("VENV")
        place = os.environ.get("ENV_TITLE") or f"the environment {own}"
        if named is None:
            return f"the packages of {place} do not fit together: change environment.dependencies"
        by_hand = f"{own}/bin/python -m pip install {{}}"
        remedy = f"add {{}} to environment.dependencies in the recipe, or {by_hand}"
        remedy = os.environ.get("ENV_REMEDY") or remedy
        return f"{place} lacks it: {remedy.replace('{}', next(filter(None, named.groups())))}"

    @cached_property
    def error(self) -> dict[str, Any]:
        """The error that caused the others, {} if none is recorded."""
        return first_error(self.errors) or {}

    @cached_property
    def reason(self) -> Reason:
        """Why it ended.

        Errors come before a stop that was asked for: ranks also stop in order when Slurm's TERM
        reaches them after another's death.
        """
        if self.finished:
            return Reason("finished", "")
        if self.cancelled:
            return Reason("cancelled", "by cookbook cancel")
        if self.job_state == "CANCELLED":
            return Reason("cancelled", "its job was cancelled")
        if self.job_state is not None:
            lost = [str(each["host"]) for each in self.errors if each.get("type") == NODE_FAILURE]
            return _slurm_reason(self.job_state, lost)
        if self.not_started and self.cause_before != "controller":
            return Reason("controller", f"srun started nothing: {self.not_started}")
        if self.error:
            return Reason(_cause(self.error), describe(self.error), self.error.get("host") or None)
        if self.stop_asked:
            return Reason("time_limit", "stopped before the time limit")
        if self.exit_code == 0 and self.progress.get("state") == "stopped":
            return Reason("stopped", "the ranks were asked to stop, but not by the job script")
        message = "no rank recorded an error"
        if self.exit_code == 128 + signal.SIGKILL:
            message = f"the ranks were {SIGKILL}"
        return Reason("killed", f"exit status {self.exit_code}, and {message}")


class Rule(NamedTuple):
    """A row of the table: the state and the next step of an attempt for which `when` holds."""

    state: str
    next: str
    when: Callable[[AttemptEnd], object]
    message: str = "{end.reason.message}"  # a format string; end is the AttemptEnd


# The first rule whose condition holds counts.
RULES = (
    Rule("COMPLETED", "finished", lambda e: e.finished),
    # Somebody ended the job: no retry.
    Rule("CANCELLED", "failed", lambda e: e.reason.cause == "cancelled"),
    # Slurm itself requeues a job that it ends for lack of nodes.
    Rule("INTERRUPTED", "failed", lambda e: e.job_state is not None),
    Rule("RETRYING", "run", lambda e: e.reason.cause == "controller"),
    # What a retry cannot fix, or has not fixed often enough.
    Rule("FAILED", "failed", lambda e: e.lacks_package, "{end.reason.message}; {end.how_to_add}"),
    Rule("FAILED", "failed", lambda e: e.error.get("permanent")),
    Rule("FAILED", "failed", lambda e: e.reason.cause == "out_of_memory" and e.memory_is_result),
    Rule("FAILED", "failed", lambda e: e.reason.cause == e.cause_before == "out_of_memory",
         "{end.reason.message}; twice in a row"),
    Rule("FAILED", "failed", lambda e: e.fruitless > e.max_retries == 0),
    Rule("FAILED", "failed", lambda e: e.fruitless > e.max_retries,
         "{end.reason.message}; {end.fruitless} attempts saved nothing new"),
    # A stop that neither the script asked for nor a death explains is Slurm's, which takes the
    # allocation away a moment later.
    Rule("REQUEUED", "requeue",
         lambda e: e.can_requeue and (e.stop_asked or e.reason.cause == "stopped")),
    Rule("RETRYING", "run", lambda e: True),
)  # fmt: skip


def decide(end: AttemptEnd) -> Verdict:
    """Judge one attempt, or a job that ended between two."""
    rule = next(rule for rule in RULES if rule.when(end))
    message = rule.message.format(end=end)
    return Verdict(rule.state, rule.next, end.reason.cause, message, end.reason.node)
