"""Looks after a job: python -P -m slurm.supervise -- srun OPTIONS PROGRAM ...

The job script starts it on the first node of the allocation, or on this host without Slurm. It runs
the command after the -- as an attempt, watches it, records its end, and does what the rules of
slurm/retry.py say: another attempt from the last checkpoint, the job back into the queue, or the
end. To the options of srun, which are written --key=value, it adds what differs between attempts;
without Slurm the program runs NODES times on this host. What an entry needs beside its ranks is
named before the --, as --companion MODULE:CLASS (slurm/companion.py).

If it is killed, the job script starts it again: it reads the records and goes on, with the same
processes if an attempt runs. Exit status: 0 finished or requeued, 1 failed, 76 ended by TERM; after
any other one it is restarted.
"""

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import NoReturn

from runspec import files
from runspec.processes import end_with_parent, terminate_with_parent
from slurm import records
from slurm.allocation import in_slurm, is_of_this_start, own_job_id
from slurm.child import Child
from slurm.companion import Companion, load
from slurm.history import attempts_of, read_object
from slurm.job_log import say
from slurm.nodes import Nodes, head
from slurm.records import Follows, NotRecorded, Recorder
from slurm.rendezvous import port_of
from slurm.retry import pause_s
from slurm.watchdog import END_S, Watchdog, have_nodes_end_ranks

FINISHED, FAILED, TERMINATED, BROKEN = 0, 1, 76, 70

# How soon an end is noticed, and the time between two looks at an attempt.
_POLL_S, _LOOK_S = 0.2, 1.0
# Options of the srun of an attempt that no step beside it has.
_OF_ATTEMPTS = ("--ntasks", "--kill-on-bad-exit", "--wait")


class Terminated(BaseException):
    """A TERM: of scancel, the time limit, a preemption, or a lost node."""


class Supervisor:
    """A job: its command, and how its attempts go.

    command: srun, its options, and the program that it starts on each node. companion: what the
    entry needs beside it, as MODULE:CLASS. next: what follows: run (an attempt), requeue, finished,
    failed, or superseded, if another start has the run.
    """

    def __init__(self, run_dir: Path, command: Sequence[str], companion: str = "") -> None:
        self.run_dir, self.record, self.next = run_dir, Recorder(run_dir), "run"
        self._companion = load(companion, run_dir)
        self._options = list(takewhile(lambda word: word.startswith("--"), command[1:]))
        self._program = list(command[1 + len(self._options) :])
        self._max_retries = int(os.environ["MAX_RETRIES"])
        self._nodes = Nodes(self.record)
        self._attempt: int | None = None
        self._child: Child | None = None
        self._warned, self._stop_asked = os.environ.pop("COOKBOOK_WARNED", "") != "", False

    def run(self, again: bool = False) -> int:
        """Run attempts until none follows; return the exit status.

        Args:
            again: an earlier supervisor of this job script was killed.
        """
        try:
            if again:
                self._take_over()
            while self.next == "run":
                if self._child is None:
                    self._begin()
                    self._child = Child.start(self._argv(self._program), os.environ, self._logs)
                self._end(self._watch(self._child))
        except Follows as other:
            if str(other):
                say(str(other))
            self.next = other.what
        return self._finish()

    def warn(self, number: int, frame: FrameType | None) -> None:
        """Take Slurm's warning that the time limit is near."""
        self._warned = True

    def terminated(self) -> int:
        """Record the end of the job; return the exit status. The job's log says why it ends."""
        # Another TERM may arrive before this process ends.
        _take_term(False)
        self.record.hurry()
        state = "COMPLETING"
        if not in_slurm():
            state = "CANCELLED"
            if self._child is not None:
                self._child.end(END_S, END_S)
            self._companion.end()
        say("terminated")
        # A recorded end is not changed: the job may be ending between two attempts.
        self.next = self.record(
            records.end, self._attempt, 143, job_state=state, settle=self._companion.settle
        )
        if self.next != "superseded":
            self._companion.clean()
        return FINISHED if self.next == "finished" else TERMINATED

    def not_recorded(self, reason: NotRecorded) -> int:
        """Say that the records could not be written; return the exit status."""
        finished = {"state": "finished", "attempt": self._attempt}
        if finished.items() <= files.peek(self.run_dir / files.PROGRESS).items():
            say("the run is finished, and that could not be recorded")
            return FINISHED
        again = f"cookbook resume {self.run_dir.name}"
        say(f"{reason}: check the filesystem, then continue with: {again}")
        return FAILED

    def _take_over(self) -> None:
        """Go on where an earlier supervisor of this job's start was killed."""
        status = self.record(lambda run_dir: read_object(run_dir / files.STATUS))
        if "attempt" not in status or not is_of_this_start(status):
            return
        self._nodes.hosts = [str(host) for host in status.get("nodes") or []]
        self._nodes.rollout_hosts = [str(host) for host in status.get("rollout_nodes") or []]
        self._enter(int(status["attempt"]))
        child, state = Child.of_before(self._logs), status.get("state")
        if state == "RUNNING":
            if child is not None:
                self._child = child
                say(f"attempt {self._attempt} goes on")
                self._accompany()
            return
        self._attempt = None
        if state == "RETRYING":
            self._nodes.await_slurm()
        elif "next" in status:
            raise Follows(str(status["next"]))

    def _finish(self) -> int:
        """Do what follows the last attempt of this job; return the exit status."""
        self._companion.end()
        if self.next == "superseded":
            return FAILED
        if self.next == "requeue" and in_slurm():
            say("back into the queue: the next attempt continues from the last checkpoint")
            try:
                self._nodes.requeue(lambda held: _take_term(not held))
                return FINISHED
            except Follows as other:
                self.next = other.what
        return FINISHED if self.next == "finished" else FAILED

    # An attempt ------------------------------------------------------------------------------

    @property
    def _logs(self) -> Path:
        return Path(os.environ["LOGS"])

    def _begin(self) -> None:
        """Begin an attempt: its nodes, its record, its variables.

        Raises:
            Follows: nothing is left to do, or not here.
        """
        if self._warned and in_slurm():
            message = "the time limit came between two attempts"
            self.record(records.between, message, state="REQUEUED", cause="time_limit")
            raise Follows("requeue")
        self._nodes.choose()
        os.environ |= head(self._nodes.hosts)
        hosts, given = self._nodes.hosts, (self._max_retries, self._nodes.rollout_hosts)
        number = self.record(records.begin, hosts, *given, prepare=self._companion.prepare)
        self._stop_asked = False
        self._enter(number)
        first = f"{os.environ['HEAD_ADDR']}:{os.environ['HEAD_PORT']}"
        say(f"attempt {number} on {', '.join(hosts)}; first node {first}; logs in {self._logs}")
        self._accompany()

    def _enter(self, number: int) -> None:
        """Set the variables of an attempt, which the nodes need."""
        self._attempt = number
        os.environ |= {
            "COOKBOOK_ATTEMPT": str(number),
            "LOGS": str(self.run_dir / files.LOGS / str(number)),
            "HEAD_PORT": str(port_of(own_job_id(), number)),
        }

    def _argv(self, program: Sequence[str]) -> list[str]:
        """Return the command that runs a program on each node of the attempt."""
        if not in_slurm():
            return ["bash", f"{os.environ['COOKBOOK']}/slurm/local_nodes.sh", *program]
        log = f"--output={self._logs}/node_%t.log"
        own = [f"--job-name=attempt-{os.environ['COOKBOOK_ATTEMPT']}", log, "--open-mode=append"]
        # A step that lost a node, or that a restarted controller still lists, keeps its resources.
        beside = ["--overlap", "--mem=0"]
        return ["srun", *own, *beside, *self._nodes.on_hosts, *self._options, *program]

    def _watch(self, child: Child) -> int:
        """Look at the attempt until its command has ended; return the exit status."""
        number = int(os.environ["COOKBOOK_ATTEMPT"])
        looking: list[Watchdog | Companion] = [self._companion]
        # An entry that does not report its steps has none.
        if "HANG_TIMEOUT_S" in os.environ:
            looking.append(Watchdog(self.run_dir, number, child))
        look_at = 0.0
        while (status := child.poll()) is None:
            if self._warned:
                self._ask_to_stop()
            if time.monotonic() >= look_at:
                for each in tuple(looking):
                    try:
                        each.look()
                    except OSError:
                        pass  # the storage may be away for a moment
                    except Exception:
                        # Its own fault does not end the ranks.
                        traceback.print_exc()
                        looking.remove(each)
                look_at = time.monotonic() + _LOOK_S
            time.sleep(_POLL_S)
        return status

    def _ask_to_stop(self) -> None:
        """Have the ranks save a checkpoint and stop: torchrun passes no signal on, so by a file."""
        say("the time limit is near: the ranks save a checkpoint and stop")
        self._warned, self._stop_asked = False, True
        with suppress(OSError):
            (self.run_dir / files.STOP).touch()

    def _end(self, status: int) -> None:
        """Record the attempt's end by its exit status; wait until the next one can start.

        Raises:
            Follows: no attempt follows.
        """
        ended = time.time()
        self.next = self.record(
            records.end,
            self._attempt,
            status,
            max_retries=self._max_retries,
            stop_asked=self._stop_asked,
            ended=ended,
            settle=self._companion.settle,
        )
        self._child = self._attempt = None
        # Ranks that srun could not end: their nodes do.
        have_nodes_end_ranks(self._logs)
        if self.next == "run":
            # Such as after storage that was away.
            time.sleep(self.record(lambda run_dir: pause_s(attempts_of(run_dir))))
            self._nodes.await_slurm()

    # Beside the attempts ---------------------------------------------------------------------

    def _accompany(self) -> None:
        """Have the companion begin with the attempt."""
        own = [option for option in self._options if not option.startswith(_OF_ATTEMPTS)]
        step = ["srun", "--overlap", "--mem=0", "--nodes=1", "--ntasks=1", *own]
        number = int(os.environ["COOKBOOK_ATTEMPT"])
        self._companion.begin(number, self._nodes, step if in_slurm() else [])


def _raise_terminated(number: int, frame: FrameType | None) -> NoReturn:
    _take_term(False)
    raise Terminated


def _take_term(taken: bool) -> None:
    """Let a TERM end this job, or nothing.

    Not by SIG_IGN, which the programs that this process starts would inherit.
    """
    signal.signal(signal.SIGTERM, _raise_terminated if taken else lambda number, frame: None)


def main(argv: Sequence[str]) -> int:
    place = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser("slurm.supervise", allow_abbrev=False)
    parser.add_argument("--companion", default="", metavar="MODULE:CLASS")
    companion = parser.parse_args(argv[:place]).companion
    again = os.environ.pop("COOKBOOK_AGAIN", "")
    try:
        supervisor = Supervisor(Path(os.environ["RUN_DIR"]), argv[place + 1 :], companion)
        signal.signal(signal.SIGUSR1, supervisor.warn)
        _take_term(True)
        # Slurm itself ends what it has started; the next start records that the script was killed.
        (end_with_parent if in_slurm() else terminate_with_parent)()
        try:
            if again == "terminated":
                raise Terminated
            return supervisor.run(bool(again))
        except Terminated:
            return supervisor.terminated()
    except NotRecorded as reason:
        return supervisor.not_recorded(reason)
    except Exception:
        traceback.print_exc()
        return BROKEN


if __name__ == "__main__":
    status = main(sys.argv[1:])
    # While it ends, Python would let a TERM kill this process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(status)
