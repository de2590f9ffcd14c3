"""Sweeps: each run of one has the sweep's name with a number in it, and its record names the sweep.

20261122-204051-study-255b has the runs 20261122-204051-study-00-255b, ...-01-255b and so on.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import UnknownRun, nearest
from launcher.run import find as finding
from launcher.run.directory import Run, runs_root

_RUN = re.compile(r"(?P<begin>\d{8}-\d{6}-.+)-(?P<number>\d{2,4})(?P<end>-[0-9a-f]{4})\Z")


def run_name(sweep: str, number: int) -> str:
    """Return the name of the run of a sweep's cell."""
    return f"{sweep[:-5]}-{number:02d}{sweep[-5:]}"


def every(shared: Path) -> dict[str, list[Run]]:
    """Return the runs of all sweeps by the sweep's name, oldest first, each in the cells' order."""
    numbered: dict[str, list[tuple[int, Run]]] = {}
    for run in finding.every(runs_root(shared)):
        if match := _RUN.match(run.name):
            numbered.setdefault(match["begin"] + match["end"], []).append(
                (int(match["number"]), run)
            )
    by_name = {
        name: [run for _, run in sorted(runs, key=lambda pair: pair[0])]
        for name, runs in sorted(numbered.items())
    }
    # A run that is none of a sweep's may have such a name, too.
    return {name: runs for name, runs in by_name.items() if runs[0].sweep == name}


def find(shared: Path, wanted: str) -> Sequence[Run]:
    """Return the runs of a sweep, by its name, or by that of its file: the newest of that name."""
    known = every(shared)
    if runs := _named(known, wanted):
        return runs
    if not known:
        raise UnknownRun("there is no sweep yet: start one with: cookbook sweep NAME")
    names = ", ".join([*known][-3:])
    raise UnknownRun(f"no sweep is named {wanted!r}{nearest(wanted, known)}; the newest: {names}")


def _named(known: dict[str, list[Run]], wanted: str) -> list[Run]:
    # <utc>-<label>-<4 hex>
    return next((known[name] for name in reversed(known) if wanted in (name, name[16:-5])), [])


def runs_of(shared: Path, wanted: Sequence[str]) -> list[Run]:
    """Return the runs that words name, each a run or a sweep, in order and without repeats."""
    root, chosen = runs_root(shared), list[Run]()
    # Of whole names of runs, of which there may be thousands, the others are not looked at.
    known = {} if all((root / word).is_dir() for word in wanted) else every(shared)
    for word in wanted:
        chosen += _named(known, word) or [finding.find(root, word)]
    return list(dict.fromkeys(chosen))
