"""Parts of a call: processes with time limits; each result is written as soon as it is there."""

import argparse
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.one_gpu import page
from benchmarks.peers import engine
from tests.forked import ROOT, Fork

CPU = "cpu"
PRELOADED = "benchmarks.one_gpu.preloaded"
POLL_S, RESERVE_S, LOG_LINES = 0.05, 5.0, 6
# By so much a trial's limits are longer.
TRIAL = 10


@dataclass
class Call:
    """One call of the command: its options, its time, and the file of its results.

    Args:
        path: the JSON file, which may hold the parts of an earlier call.
        work: a folder for models and runs.
        options: of the command line.
    """

    path: Path
    work: Path
    options: argparse.Namespace
    budget_s: float
    gpu: str = field(default_factory=lambda: os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._lock = Lock()
        self._report: dict[str, Any] = {"calls": {}, "parts": {}}
        if self.path.exists():
            self._report = json.loads(self.path.read_text(encoding="utf-8"))

    @property
    def left_s(self) -> float:
        """Seconds until the budget is used up."""
        return self.budget_s - RESERVE_S - (time.monotonic() - self.began)

    def longest_s(self, limit_s: float) -> float:
        """The limit of a part: a trial runs where much else runs."""
        return limit_s * TRIAL if self.options.tiny else limit_s

    def starts(self, name: str, needed_s: float) -> bool:
        """Whether a part is wanted and has time; without time it is written down as dropped."""
        wanted = re.search(self.options.only, name) is not None
        if wanted and self.left_s < needed_s:
            self.record(name, dropped=f"no time: {max(self.left_s, 0):.0f} s left")
            return False
        return wanted

    def record(self, part: str, **result: Any) -> None:
        """Write the result of a part, in the place of an earlier one."""
        at_s = round(time.monotonic() - self.began, 1)
        with self._lock:
            self._report["parts"][part] = {"at_s": at_s, **result}
            self._write()
        shown = {k: v for k, v in result.items() if not isinstance(v, list | dict)}
        print(f"{at_s:6.1f} s  {part}: {json.dumps(shown)}", flush=True)

    def note(self, name: str, **facts: Any) -> None:
        """Write facts about a call."""
        with self._lock:
            self._report["calls"].setdefault(name, {}).update(facts)
            self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        engine.write_json(self.path, self._report)
        self.path.with_suffix(".md").write_text(page.markdown(self._report), encoding="utf-8")

    def guarded(self, part: str, function: Callable[..., None], *arguments: Any) -> None:
        """Call a part's function; a fault of ours is its result, and the other parts go on."""
        try:
            function(*arguments)
        except Exception as error:
            traceback.print_exc()
            self.record(part, ok=False, status=None, log=[repr(error)])

    def run(
        self,
        command: Sequence[str],
        limit_s: float,
        log: Path,
        until: Callable[[], bool] = lambda: False,
        **variables: str,
    ) -> dict[str, Any]:
        """Run a command from the root of the checkout; see `_ended`."""
        env = os.environ | {"CUDA_VISIBLE_DEVICES": self.gpu} | variables
        with open(log, "ab") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=env, cwd=ROOT)
        return self._ended(process, limit_s, log, until)

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        limit_s: float,
        log: Path,
        device: str,
        until: Callable[[], bool] = lambda: False,
        **variables: str,
    ) -> dict[str, Any]:
        """Run main(arguments) of a module; on a CPU in a fork of the imported trainer.

        No fork can use a GPU: torchao's import looks at it, which starts CUDA.
        """
        variables["OMP_NUM_THREADS"] = "1"
        if device != CPU:
            command = [sys.executable, "-m", module, *arguments]
            return self.run(command, limit_s, log, until, **variables)
        with open(log, "ab") as file:
            process = Fork(PRELOADED, module, arguments, os.environ | variables, file, file)
        return self._ended(process, limit_s, log, until)

    def _ended(
        self,
        process: subprocess.Popen | Fork,
        limit_s: float,
        log: Path,
        until: Callable[[], bool],
    ) -> dict[str, Any]:
        """Exit status (None if it was killed), seconds, and the last line that it has written.

        It is killed with its children at the limit, and as soon as `until` is true. If it has
        failed, `log` has the end of what it has written.
        """
        began, status = time.monotonic(), None
        end = began + min(self.longest_s(limit_s), max(self.left_s, 1.0))
        while status is None and time.monotonic() < end and not until():
            time.sleep(POLL_S)
            status = process.poll()
        if status is None:
            engine.end(process)
        text = log.read_text(encoding="utf-8", errors="replace").strip()
        last = [line[:300] for line in text.splitlines()[-LOG_LINES:]] or [""]
        result = {"status": status, "s": round(time.monotonic() - began, 1), "said": last[-1]}
        return result if status == 0 else result | {"log": last}
