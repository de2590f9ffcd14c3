"""Whether the virtual environment of the jobs is there."""

import os
import re
from collections.abc import Iterable, Iterator

from launcher import paths, venv
from launcher.checks import Context, Finding, Skipped, failed, ok, warning


def python(context: Context) -> Iterable[Finding]:
    subject, program = "virtual environment", venv.python()
    if not context.here(program):
        raise Skipped("only the nodes have it")
    if os.access(program, os.X_OK):
        other = list(_other_versions())
        if other:
            words = f"{paths.venv_root()} has {', '.join(other[:3])}"
            more = f" and {len(other) - 3} more" if len(other) > 3 else ""
            return [warning(subject, f"{words}{more}, not the pinned versions", "bash setup.sh")]
        return [ok(subject, str(paths.venv_root()))]
    words = f"there is no {program}"
    if "COOKBOOK_VENV" in os.environ:
        words += ", which COOKBOOK_VENV names"
    remedy = "bash setup.sh makes one; --on-nodes PATH if only the nodes have it"
    return [failed(subject, words, remedy)]


def _other_versions() -> Iterator[str]:
    """Yield the installed packages that have another version than the pinned one.

    setup.sh --torch keeps pins of its own in the virtual environment.
    """
    own = paths.venv_root() / "constraints.txt"
    pins = own if own.is_file() else paths.REPO_ROOT / "constraints.txt"
    lines = pins.read_text(encoding="utf-8").splitlines() if pins.is_file() else []
    pinned = dict(line.split("==") for line in lines if line.count("==") == 1)
    known = {_plain(name): version for name, version in pinned.items()}
    for name, version in venv.packages().items():
        wanted = known.get(_plain(name), version)
        # A build's own mark, such as +cpu, says nothing of the version.
        if version.partition("+")[0] != wanted.partition("+")[0]:
            yield f"{name} {version} (pinned: {wanted})"


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
