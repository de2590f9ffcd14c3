"""Reading many runs' small files ahead, where each read waits for a disk or a file server."""

import os
import resource
import threading
from collections.abc import Iterator, Sequence

from launcher.runs.directory import Run
from runspec import files

# So many runs are read before it is judged whether reads wait, and how many waits are too many. The
# clock would not tell them from a host that is busy.
_SAMPLE, _MANY_WAITS = 64, 32
_THREADS = 16
_NAMES = (files.SUBMISSION, files.JOB_SCRIPT, files.STATUS, files.PROGRESS)


def ahead(runs: Sequence[Run]) -> Iterator[Run]:
    """Yield runs in order; if reads wait, threads bring the files of later runs to memory.

    Files that are in memory already take longer to read twice than once, so nothing is done then.
    """
    before, stop = _waits(), threading.Event()
    try:
        for place, run in enumerate(runs):
            if place == _SAMPLE and _waits() - before > _MANY_WAITS:
                _start(iter(runs[place:]), stop)
            yield run
    finally:
        stop.set()


def _waits() -> int:
    """Return how often this process has waited for something, such as a read."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


def _start(runs: Iterator[Run], stop: threading.Event) -> None:
    def work() -> None:
        for run in runs:
            if stop.is_set():
                return
            for name in _NAMES:
                _touch(f"{run.path}/{name}")

    # Each next() of the iterator is one step of the interpreter, so no run is taken twice.
    for _ in range(_THREADS):
        threading.Thread(target=work, daemon=True).start()


def _touch(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.read(descriptor, 1)
    except OSError:
        pass
    finally:
        os.close(descriptor)
