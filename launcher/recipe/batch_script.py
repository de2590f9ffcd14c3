"""Lines of a batch script of the user's own: what a recipe says in their place."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

# Options of sbatch by the keys of `resources` that say the same.
_KEYS = {
    "nodes": ("-N", "--nodes"),
    "gpus_per_node": ("--gpus-per-node", "--gres"),
    "cpus_per_gpu": ("--cpus-per-gpu",),
    "mem": ("--mem",),
    "time": ("-t", "--time"),
    "partition": ("-p", "--partition"),
    "account": ("-A", "--account"),
    "qos": ("-q", "--qos"),
    "constraint": ("-C", "--constraint"),
    "reservation": ("--reservation",),
    "exclude": ("-x", "--exclude"),
    "exclusive": ("--exclusive",),
}
_DIRECTIVE = re.compile(r"^[ \t]*#SBATCH[ \t]+(.+?)(?:[ \t]#.*)?$", re.MULTILINE)
_STARTED = re.compile(r"(?:^|[;&|(]|\b(?:exec|time|then|do)\s)\s*(srun|sbatch|salloc)\s+(.*)")
_SHELL = re.compile(r"#!\s*\S*\b(?:ba|da|k|z)?sh\b")
_RUN = re.compile(r"(?:^|[;&|]\s*)(?:(?:bash|sh|source|\.)\s+|\./)([\w./-]+)", re.MULTILINE)
_SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch")


def is_one(file: Path) -> bool:
    """Whether a file is a shell script, by its name or its first line."""
    return file.suffix in _SUFFIXES or bool(_SHELL.match(_text(file, 80)))


def faults(text: str) -> Iterator[str]:
    """Yield what keeps lines of a batch script from running once on each node of a job's step."""
    if _DIRECTIVE.search(text):
        yield (
            "its #SBATCH lines are not read: write resources: "
            f"{resources(text)} in the recipe, and leave them out"
        )
    for line in text.replace("\\\n", " ").splitlines():
        started = None if line.lstrip().startswith("#") else _STARTED.search(line)
        # A step beside the job's own gets resources with this option.
        if started and not (started[1] == "srun" and "--overlap" in started[2]):
            yield _nested(*started.groups())
            return


def recipe(file: Path) -> str:
    """Return the lines of a recipe for the program that a script starts."""
    text = _text(file)
    script = re.search(r"^[^#\n]*?([\w./-]+\.py)\b", text, re.MULTILINE)
    entry = f"script:{script[1] if script else 'FILE.py'}"
    return f"entry: {entry} and resources: {resources(text)}"


def resources(text: str) -> str:
    """Return the block `resources` that the #SBATCH lines of a script stand for."""
    given: dict[str, str] = {}
    options = {option: key for key, names in _KEYS.items() for option in names}
    for directive in _DIRECTIVE.findall(text):
        name, _, value = re.sub(r"^(-\w)(?=\S)|^(--[\w-]+)[= ]", r"\1\2 ", directive).partition(" ")
        if key := options.get(name):
            given[key] = _value(key, value.strip().strip("\"'"))
    return "{" + ", ".join(f"{key}: {value}" for key, value in given.items()) + "}"


def _value(key: str, value: str) -> str:
    if key in ("nodes", "gpus_per_node", "cpus_per_gpu"):
        # --nodes=2-4, --gres=gpu:h100:8
        number = re.search(r"\d+", value) if key == "nodes" else re.search(r"\d+$", value)
        return number[0] if number else "1"
    if key == "exclusive":
        return "true"
    return value if re.fullmatch(r"[A-Za-z][\w.-]*|\d+[KMGT]?", value) else f'"{value}"'


def _nested(program: str, words: str) -> str:
    if program != "srun":
        return f"{program} would start another job, which the run does not follow: leave it out"
    try:
        rest = shlex.split(words, comments=True)
    except ValueError:
        rest = words.split()
    while rest and rest[0].startswith("-"):
        # -n 8, --ntasks 8
        rest = rest[2:] if len(rest) > 1 and rest[1].isdigit() and "=" not in rest[0] else rest[1:]
    own = shlex.join(rest)
    script = next((word for word in rest if word.endswith(".py")), "")
    ranks = f"; one rank per GPU: entry: script:{script}" if script else ""
    return (
        "srun inside the job's own step waits without end; the kit starts the lines with srun, "
        f"once on each node: write {own}{ranks}"
    )


def run_by(lines: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of the shell scripts in a folder that shell lines run."""
    for name in dict.fromkeys(_RUN.findall(lines)):
        if (folder / name).is_file() and is_one(folder / name):
            yield name, _text(folder / name)


def read(file: Path) -> list[str]:
    """Return the faults of a script's lines."""
    return list(faults(_text(file)))


def _text(file: Path, most: int = -1) -> str:
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            return opened.read(most)
    except OSError:
        return ""  # the check of the script says so
