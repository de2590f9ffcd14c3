"""Whether the virtual environment of the jobs is there."""

import os
from collections.abc import Iterable

from launcher import paths, venv
from launcher.checks import Context, Finding, Skipped, failed, ok, warning


def python(context: Context) -> Iterable[Finding]:
    subject, program = "virtual environment", venv.python()
    if not context.here(program):
        raise Skipped("only the nodes have it")
    if os.access(program, os.X_OK):
        other = [*venv.other_versions().values()]
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
