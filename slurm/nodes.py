"""The nodes of a job: which the next attempt uses, when Slurm can start it, and the requeue."""

import os
import socket
import time
from collections.abc import Callable, Sequence

from slurm import allocation, records
from slurm.allocation import in_slurm
from slurm.job_log import say
from slurm.records import Recorder, seconds

# How long no node may answer: just after its controller has come back Slurm starts no step.
_NO_NODE_S = 60.0


def head(hosts: Sequence[str]) -> dict[str, str]:
    """Return the variables of the first of these nodes."""
    known = allocation.addresses(hosts) if in_slurm() else ["127.0.0.1"]
    one_host = "yes" if len(hosts) == 1 or len(set(known)) == 1 else "no"
    return {"HEAD_ADDR": known[0] if known else hosts[0], "ONE_HOST": one_host}


class Nodes:
    """The nodes of an attempt.

    hosts: those that train, in the order of their ranks. rollout_hosts: those that generate
    answers.
    """

    def __init__(self, record: Recorder) -> None:
        self._record, self._count = record, int(os.environ["NODES"])
        self._continue = f"continue with: cookbook resume {record.run_dir.name}"
        self._rollout_count = int(os.environ.get("ROLLOUT_NODES") or 0)
        self.hosts: list[str] = []
        self.rollout_hosts: list[str] = []
        # Nodes that the job gives up when it is requeued.
        self._left_out: list[str] = []
        self._silent: list[str] = []

    @property
    def on_hosts(self) -> list[str]:
        """Options of an srun with one task on each node that trains."""
        count, nodes = len(self.hosts), f"--nodelist={','.join(self.hosts)}"
        return [f"--nodes={count}", nodes, f"--ntasks={count}", "--ntasks-per-node=1"]

    def choose(self) -> None:
        """Choose the nodes of the next attempt.

        Raises:
            Follows: the job is requeued without some, or Slurm does not answer.
        """
        if not in_slurm():
            host = socket.gethostname().partition(".")[0]
            self.hosts, self.rollout_hosts = [host], [host] * self._rollout_count
            return
        self._await_controller()
        hosts = allocation.hosts_of(os.environ["SLURM_JOB_NODELIST"])
        if bad := self._record(records.nodes_to_leave, hosts, self._silent):
            if allocation.has_enough_without(bad):
                why = "attempts on it failed or it does not answer"
                say(f"left out from now on, because {why}: {','.join(bad)}")
                self._left_out = bad
            if self._left_out or self._silent:
                raise records.Follows("requeue")
            say(f"attempts failed on {','.join(bad)}, and the partition has too few other nodes")
        # The first nodes train, the last ones generate answers.
        self.hosts = hosts[: self._count]
        self.rollout_hosts = hosts[self._count : self._count + self._rollout_count]

    def await_slurm(self) -> None:
        """Wait until Slurm can start the next attempt.

        A node that was just lost is part of the allocation until Slurm detects it.

        Raises:
            Follows: it does not answer, or cannot.
        """
        if in_slurm():
            self._await_controller()
            self._find_silent_nodes()

    def _await_controller(self) -> None:
        """Wait for Slurm's controller, which may be down for minutes."""
        began, wait_s, reported = time.monotonic(), seconds("CONTROLLER_WAIT_S", 600), False
        while allocation.description() is None:
            spent_s = time.monotonic() - began
            if spent_s > wait_s:
                what = f"Slurm's controller has not answered for {spent_s:.0f} s: once it does"
                raise self._record.fail(f"{what}, {self._continue}")
            if not reported:
                what = "waiting for Slurm's controller, which does not answer"
                self._record.waiting(f"{what}, up to {wait_s:.0f} s")
            reported = True
            time.sleep(2)

    def _find_silent_nodes(self) -> None:
        """Find the nodes of the last attempt that do not answer.

        If no node does, Slurm itself starts no steps, for example just after its controller has
        come back; this waits for it.
        """
        began = time.monotonic()
        while self.hosts and allocation.answers(self.hosts) is not None:
            said = {host: allocation.answers([host]) for host in self.hosts}
            silent = [host for host, message in said.items() if message is not None]
            late, last = time.monotonic() - began > _NO_NODE_S, said[self.hosts[-1]] or ""
            if silent == self.hosts and late and "Unable to create step" in last:
                what = "Slurm starts no step in this job, which goes back into the queue"
                self._record.waiting(f"{what}: {last.strip().rpartition('error: ')[2]}")
                raise records.Follows("requeue")
            if silent and (silent != self.hosts or late):
                say(f"these nodes of the allocation do not answer: {','.join(silent)}")
                self._silent += silent
                return
            time.sleep(2)

    def requeue(self, lock: Callable[[bool], None]) -> None:
        """Put the job back into the queue, which ends this process.

        All state has been written before. Waits if the controller is down, or if Slurm is still
        cleaning up the job.

        Args:
            lock: called with True before a TERM may come of the requeue itself, with False if it
                was refused.

        Raises:
            Follows: Slurm refused.
        """
        job, began, message, reported = os.environ["SLURM_JOB_ID"], time.monotonic(), "", False
        wait_s = seconds("CONTROLLER_WAIT_S", 600)
        while time.monotonic() - began <= wait_s:
            # Slurm may have just requeued it because it lost a node.
            known, restarts = allocation.description() or "", os.environ.get("SLURM_RESTART_COUNT")
            again = int(allocation.field("Restarts", known) or 0) > int(restarts or 0)
            if again or allocation.field("JobState", known) == "PENDING":
                return
            # Slurm accepts the list of excluded nodes only after the requeue, and from then on this
            # process has KillWait seconds left.
            lock(True)
            status, message = allocation.said(["scontrol", "requeue", job], 60)
            message = message.strip()
            if status == 0:
                if self._left_out and not allocation.exclude(job, self._left_out):
                    what = f"Slurm did not exclude {','.join(self._left_out)}"
                    say(f"{what}: the next attempt may use it again")
                return
            lock(False)
            if any(word in message for word in ("Invalid job id", "denied", "disabled")):
                break
            # Without output, Slurm's TERM may have ended scontrol.
            if message and not reported:
                what = f"waiting to go back into the queue, up to {wait_s:.0f} s"
                self._record.waiting(f"{what}: {message}")
                reported = True
            time.sleep(2)
        raise self._record.fail(f"Slurm refused to requeue job {job} ({message}): {self._continue}")
