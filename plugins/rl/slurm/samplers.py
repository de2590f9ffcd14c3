"""Starts a job's samplers, and replaces those that die or hang: the companion of GRPO.

It works in a thread beside the attempts. Without srun, the samplers are processes of this host. If
none can be started, a record says why, and the attempt fails. Standard library only.
"""

import os
import secrets
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plugins.rl import names
from plugins.serve import client
from runspec import files
from runspec.failure import fault
from slurm import allocation
from slurm.child import Child
from slurm.companion import Companion
from slurm.job_log import say
from slurm.nodes import Nodes

POLL_S = 1.0
# A sampler that does not answer for so long hangs; one that starts may take longer.
SILENT_S, START_S = 20.0, 600.0
# How often in a row a sampler may end before it was ready.
MAX_STARTS = 3
# Seconds for one to end without help, to be ended by its node, and for all of them.
END_S, NODE_END_S, _ENDS_S = 5.0, 20.0, 90.0


@dataclass
class SamplerProcess:
    """One sampler: its place, its process, and how it went so far."""

    index: int
    node: str
    address: str
    local: int
    run_dir: Path
    launch: list[str]
    script: str
    child: Child | None = None  # srun, or the sampler itself
    state: str = "starting"
    failures: int = 0  # starts in a row that did not get ready
    restarts: int = -1
    since: float = 0.0
    next_start: float = 0.0
    ended_for: str = ""
    log: Path = field(default_factory=Path)

    @property
    def name(self) -> str:
        return f"sampler {self.index} on {self.node}"

    @property
    def _file(self) -> Path:
        return self.run_dir / names.ROLLOUT / names.SAMPLER.format(self.index)

    @property
    def _own(self) -> Path:
        """The folder of what its node script writes, and of the request to end it."""
        return self.run_dir / names.ROLLOUT / f"sampler_{self.index}"

    def start(self) -> None:
        """Start it on its node, with a log in the newest attempt's folder."""
        self._own.mkdir(parents=True, exist_ok=True)
        for old in self._own.iterdir():
            old.unlink(missing_ok=True)
        logs = (self.run_dir / files.LATEST_LOGS).resolve()
        self.log = logs / f"rollout_{self.index}.log"
        own = {
            "ROLLOUT_INDEX": str(self.index),
            "ROLLOUT_LOCAL_RANK": str(self.local),
            "ROLLOUT_ADDRESS": self.address,
            "LOGS": str(self._own),
            "NODES": "1",
            "NODE_RANK": "0",
        }
        step = []
        if self.launch:
            step = [f"--nodelist={self.node}", f"--job-name=rollout-{self.index}"]
        command = [*self.launch, *step, "bash", "-c", self.script]
        self.child = Child.start(command, os.environ | own, self._own, self.log)
        self.state, self.since, self.ended_for = "starting", time.monotonic(), ""
        self.restarts += 1

    def look(self, secret: str) -> str | None:
        """Return why it has ended, None if it has not; start and end it as needed."""
        now = time.monotonic()
        if self.child is None:
            if now >= self.next_start:
                self.start()
            return None
        status = self.child.poll()
        if status is not None:
            reason = self.ended_for or self._reason(status)
            self.failures = 0 if self.state == "ready" else self.failures + 1
            self.child, self.state = None, "ended"
            self.next_start = now + self.failures * 2
            self._file.unlink(missing_ok=True)
            return reason
        if self._answers(secret):
            self.state, self.since, self.failures = "ready", now, 0
        limit_s = SILENT_S if self.state == "ready" else START_S
        if now - self.since >= limit_s and not self.ended_for:
            doing = "did not answer" if self.state == "ready" else "was not ready"
            self.ended_for = f"{doing} for {limit_s:.0f} s"
            self._file.unlink(missing_ok=True)
            self.end()
        return None

    def _answers(self, secret: str) -> bool:
        if not (known := files.peek(self._file)):
            return False
        try:
            url = f"{client.at(known['host'], known['port'])}/health"
            answer = client.send(url, headers={"Authorization": f"Bearer {secret}"}, timeout_s=5)
        except OSError:
            return False
        return answer.status == 200

    def _reason(self, status: int) -> str:
        """Why it or its node ended: what was recorded, the signal, the last line."""
        for path in self._own.glob("error_*.json"):
            if error := files.peek(path):
                return str(error.get("message"))
        number = status - 128
        if number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT):
            return f"killed by {signal.Signals(number).name}"
        with suppress(OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            said = [line for line in lines[-20:] if line.strip() and not line.startswith("srun:")]
            return f"exit status {status}: {said[-1]}" if said else f"exit status {status}"
        return f"exit status {status}"

    def end(self) -> None:
        """End it: by TERM, else by its node, else srun alone."""
        if self.child is None or self.child.terminate(END_S):
            return
        with suppress(OSError):
            (self._own / files.END_RANKS).touch()
        if not self.launch or not self.child.wait(NODE_END_S):
            self.child.kill(NODE_END_S)

    def end_earlier(self) -> None:
        """End the one that an earlier supervisor, which was killed, has left."""
        self.child = Child.of_before(self._own)
        self.end()
        self.child = None


class SamplerProcesses(Companion):
    """All samplers of a job, and the record of what became of them.

    ROLLOUT_SCRIPT is what each runs under bash; without it there are none.
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._folder = run_dir / names.ROLLOUT
        # Ranks do not need it.
        self._script = os.environ.pop("ROLLOUT_SCRIPT", "")
        self._secret, self._ends = "", threading.Event()
        self.samplers: list[SamplerProcess] = []
        self._deaths: list[Any] = []
        self._written: Any = None
        self._thread: threading.Thread | None = None

    def begin(self, attempt: int, nodes: Nodes, step: Sequence[str]) -> None:
        """Start them, and what looks after them, unless they run: they outlive attempts."""
        if not self._script or (self._thread and self._thread.is_alive()):
            return
        hosts = nodes.rollout_hosts
        addresses = allocation.addresses(hosts) if step else ["127.0.0.1"]
        # The last address counts for the nodes after it.
        addresses = addresses + addresses[-1:] * (len(hosts) - len(addresses))
        gpus = int(os.environ.get("ROLLOUT_GPUS") or 1)
        count = int(os.environ["RANKS_PER_NODE"]) // gpus
        self.samplers = [
            SamplerProcess(
                place * count + local,
                node,
                address,
                local * gpus,
                self.run_dir,
                list(step),
                self._script,
            )
            for place, (node, address) in enumerate(zip(hosts, addresses, strict=True))
            for local in range(count)
        ]
        before = files.peek(self.run_dir / names.STATE)  # shown, never decided by
        self._deaths, self._written = before.get("deaths", []), None
        self._secret, self._ends = secrets.token_hex(32), threading.Event()
        for sampler in self.samplers:
            sampler.end_earlier()
        self.clean()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End them with the job."""
        if self._thread is not None:
            self._ends.set()
            self._thread.join(_ENDS_S)
            self._thread = None
            self.clean()

    def clean(self) -> None:
        """Remove the folder of their files, which holds whole weights."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        while True:
            try:
                return self._look_after()
            except Exception:
                traceback.print_exc()
                time.sleep(POLL_S)

    def _look_after(self) -> None:
        """Look after the samplers until they are to end, or none can be started."""
        try:
            with ThreadPoolExecutor(len(self.samplers)) as threads:
                while not self._asked_to_end():
                    self._make_again()
                    reasons = list(threads.map(lambda each: each.look(self._secret), self.samplers))
                    for sampler, reason in zip(self.samplers, reasons, strict=True):
                        if reason is not None:
                            self._died(sampler, reason)
                    self._write()
                    if all(each.failures >= MAX_STARTS for each in self.samplers):
                        self._give_up()
                        return
                    self._ends.wait(POLL_S)
        finally:
            with ThreadPoolExecutor(len(self.samplers)) as threads:
                list(threads.map(SamplerProcess.end, self.samplers))
            for sampler in self.samplers:
                sampler.state = "ended"
            self._write()

    def _asked_to_end(self) -> bool:
        """Also by another start of the run, on a job whose first node Slurm had given up."""
        if self._ends.is_set():
            return True
        with suppress(OSError):
            secret = (self._folder / names.SECRET).read_text(encoding="utf-8").strip()
            return secret != self._secret
        return False

    def _make_again(self) -> None:
        """Make the folder, again if somebody has deleted it: samplers are restarted as they are
        not reached any more, and ranks write their next weights there.
        """
        secret = self._folder / names.SECRET
        if not os.path.exists(secret):
            with suppress(OSError):
                self._folder.mkdir(mode=0o700, exist_ok=True)
                descriptor = os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with open(descriptor, "w", encoding="utf-8") as file:
                    file.write(self._secret)

    def _died(self, sampler: SamplerProcess, reason: str) -> None:
        death = {"time": time.time(), "sampler": sampler.index, "node": sampler.node}
        self._deaths = [*self._deaths[-99:], {**death, "reason": reason}]
        say(f"{sampler.name} ended: {reason}; it is restarted")

    def _write(self) -> None:
        samplers = [
            {"sampler": r.index, "node": r.node, "state": r.state, "restarts": max(r.restarts, 0)}
            for r in self.samplers
        ]
        value = {"samplers": samplers, "deaths": self._deaths}
        if value != self._written:
            # A disk that is full ends no sampler.
            with suppress(OSError):
                files.write_json(self.run_dir / names.STATE, value)
                self._written = value

    def _give_up(self) -> None:
        """Leave a record for the attempt, and a file that ends the ranks' wait."""
        last = self._deaths[-1]
        message = (
            f"sampler {last['sampler']} on {last['node']} ended {MAX_STARTS} times before "
            f"it was ready: {last['reason']}"
        )
        nodes = {each.node for each in self.samplers}
        host = last["node"] if len(nodes) == 1 else None
        logs = (self.run_dir / files.LATEST_LOGS).resolve()
        record = fault(message, "RolloutError", host, permanent=False)
        files.write_json(logs / "error_rollout.json", record)
        files.write_json(self._folder / names.NO_SAMPLER, {"message": message})
        say(f"{message}: the attempt cannot go on")
