"""Lines of a batch script of the user's own: what keeps them from running inside a job's step."""

import re
from collections.abc import Iterator
from pathlib import Path

PAGE = "docs/coming_from.md#coming-from-your-own-sbatch-script"
_DIRECTIVE = re.compile(r"^[ \t]*#SBATCH[ \t]", re.MULTILINE)
_STARTED = re.compile(r"(?:^|[;&|(]|\b(?:exec|time|then|do)\s)\s*(srun|sbatch|salloc)\s+(.*)")
_SHELL = re.compile(r"#!\s*\S*\b(?:ba|da|k|z)?sh\b")
_RUN = re.compile(r"(?:^|[;&|]\s*)(?:(?:bash|sh|source|\.)\s+|\./)([\w./-]+)", re.MULTILINE)
_SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch")


def is_one(file: Path) -> bool:
    """Whether a file is a shell script, by its name or its first line."""
    return file.suffix in _SUFFIXES or bool(_SHELL.match(text_of(file, 80)))


def faults(text: str) -> Iterator[str]:
    """Yield what keeps lines of a batch script from running once on each node of a job's step."""
    if _DIRECTIVE.search(text):
        yield (
            "its #SBATCH lines are not read: write them as resources: in the recipe, and leave "
            f"them out ({PAGE})"
        )
    for line in text.replace("\\\n", " ").splitlines():
        started = None if line.lstrip().startswith("#") else _STARTED.search(line)
        # A step beside the job's own gets resources with this option.
        if started and not (started[1] == "srun" and "--overlap" in started[2]):
            yield _nested(started[1])
            return


def _nested(program: str) -> str:
    if program != "srun":
        return f"{program} would start another job, which the run does not follow: leave it out"
    return (
        "srun inside the job's own step waits without end: leave srun and its options out, as the "
        "kit starts the lines with srun, once on each node; one rank per GPU: entry: script:FILE.py"
    )


def run_by(lines: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of the shell scripts in a folder that shell lines run."""
    for name in dict.fromkeys(_RUN.findall(lines)):
        if (folder / name).is_file() and is_one(folder / name):
            yield name, text_of(folder / name)


def text_of(file: Path, most: int = -1) -> str:
    """Return a file's text, "" if it cannot be read, of which the check of the script says why."""
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            return opened.read(most)
    except OSError:
        return ""
