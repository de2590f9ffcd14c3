"""Whether an environment of a record works: its Python is started once, before the queue."""

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from launcher import paths, slurm, venv
from launcher.check import Context, Finding, Skipped, failed, ok
from launcher.recipe.environment import Environment
from launcher.recipe.model import Recipe
from launcher.run import built
from launcher.site import slurm_options
from launcher.slurm import render

SUBJECT = "environment"
# How long a node may take to be free, and an image to be unpacked.
_WAIT_S, _LIMIT_S = 20, 600


def inside(context: Context) -> Iterable[Finding]:
    """Start the environment's Python as a job would, and let it look around (slurm/probe.py)."""
    environment = context.recipe.environment
    if environment is None:
        return [_kits_own(context.recipe)]
    if faults := [*_named_faults(environment, context)]:
        return faults
    if environment.dependencies and not built.is_built(environment, context.cluster.root):
        count = len(built.solve(environment))
        return [ok(SUBJECT, f"{count} packages are built at submission")]
    return _told(environment, *start(environment, context))


def _kits_own(recipe: Recipe) -> Finding:
    package, folders = recipe.entry.backend(recipe.config), venv.package_folders(venv.python())
    # cookbook serve looks before it submits.
    wanted = [] if recipe.entry.on_host or not folders else _wanted(recipe)
    missing = [name for name in wanted if not any(_holds(folder, name) for folder in folders)]
    if not missing:
        return ok(SUBJECT, "the kit's virtual environment")
    message = f"{paths.venv_root()} lacks {', '.join(missing)}, which this recipe needs"
    if package:
        remedy = f"environment={package}, which is built once (configs/environments/{package}.yaml)"
        return failed(SUBJECT, message, remedy)
    remedy = Environment().remedy.replace("{}", ", ".join(missing))
    own = f"; put what is your own into {recipe.code_root}" if recipe.code_root else ""
    return failed(SUBJECT, message, remedy + own)


def start(environment: Environment, context: Context, *argv: str) -> tuple[int, list[str]]:
    """Start the environment's Python as a job would; return its exit status and its output.

    Args:
        argv: its arguments; none: it looks around.
    """
    # A container's runtime refuses to bind a folder that is not there; the run will make it.
    context.cluster.root.mkdir(parents=True, exist_ok=True)
    script = _script(environment, context, bool(context.cluster.gpu), argv)
    if not context.executor.queued:
        return _here(script)
    resources = context.resources
    options = ["--job-name=cookbook-probe", "--nodes=1"]
    without = ("mem", "time")
    options += slurm_options(resources, context.cluster, resources.gpus_per_node, without)
    step = slurm.run_on_nodes(options, script, _WAIT_S, _LIMIT_S)
    if not step.pending:
        lines = [*step.lines, *step.message.split(" | ")]
        # Pyxis starts a step within this one, and both put the task's number before a line.
        return step.exit_code, [re.sub(r"^(\d+:( |$))+", "", line) for line in lines]
    if environment.is_container:
        raise Skipped(f"no node was free within {_WAIT_S} s to look inside {environment.title}")
    # A login node has no GPUs.
    return _here(_script(environment, context, False, argv))


def _named_faults(environment: Environment, context: Context) -> Iterator[Finding]:
    """Yield what is wrong without starting anything."""
    if environment.kind == "pyxis" and not context.executor.queued:
        yield failed(SUBJECT, "Pyxis is a plugin of Slurm's srun", "leave --local out")
    image = environment.image or ""
    file = Path(image)
    if image.startswith(("/", "./")) and context.here(file) and not file.exists():
        yield failed(
            SUBJECT,
            f"there is no image {image}",
            f"correct environment.image in {environment.place}",
        )
    for bind in environment.binds:
        source = Path(bind.partition(":")[0])
        if context.here(source) and not source.exists():
            yield failed(
                SUBJECT,
                f"environment.binds: there is no {source}",
                f"correct it in {environment.place}; if only the nodes have it, name it under "
                "node_paths: in the site's file",
            )


def _needs(recipe: Recipe) -> list[str]:
    """Return the packages that a recipe's program imports, as far as is known."""
    entry, wanted = recipe.entry, _wanted(recipe)
    if entry.backend(recipe.config):
        return ["torch", *wanted]
    if entry.engine:
        return list(dict.fromkeys(["torch", entry.engine, *wanted]))
    known = entry.method or entry.purpose == "evaluate"
    return [*["trainer", "torch"] * bool(known), *wanted]


def _wanted(recipe: Recipe) -> list[str]:
    """Return the package of a recipe's backend, or those that its script imports at its top."""
    if package := recipe.entry.backend(recipe.config):
        return [package]
    script = recipe.entry.program(recipe)
    try:
        body = ast.parse(script.read_text(encoding="utf-8")).body if script else []
    except (OSError, SyntaxError, ValueError):
        return []  # the check of the script says so
    names: list[str] = []
    for node in body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.append(node.module)
    own = [each for each in (script and script.parent, recipe.code_root) if each]
    tops = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    return sorted(name for name in tops if not any(_holds(folder, name) for folder in own))


def _holds(folder: Path, name: str) -> bool:
    return (folder / name).is_dir() or any(folder.glob(f"{name}.*"))


def _script(
    environment: Environment, context: Context, gpus: bool, argv: Sequence[str] = ()
) -> str:
    """Return the shell script that starts the environment's Python with argv, or looks around."""
    root = context.cluster.root
    values = {
        "COOKBOOK": paths.REPO_ROOT,
        "VENV": paths.venv_root(),
        "RUN_DIR": root,
        "COOKBOOK_ROOT": root,
        "NODE_RANK": 0,
        "FILES_WAIT_S": 0,
        "JOB_PID": os.getpid(),
        **context.cluster.environment,
        **environment.variables,
        **(context.config.get("env") or {}),
        "PYTHONPATH": paths.REPO_ROOT,
        "PYTHONNOUSERSITE": 1,
    }
    interpreter = environment.interpreter(root)
    lines = [f"export {key}={shlex.quote(str(value))}" for key, value in values.items()]
    lines += [
        "export PATH=$VENV/bin:$PATH",
        "NODE_NAME=${SLURMD_NODENAME:-$(hostname -s)}",
        'source "$COOKBOOK/slurm/environment.sh"',
    ]
    for line in [*context.cluster.job_setup, *render.enter(environment, interpreter)]:
        lines.append(f"{line} || {{ echo {shlex.quote(f'@ fault {line!r} failed')}; exit 1; }}")
    if environment.is_container:
        binds = "\n".join(environment.binds)
        command = ["enter_container", environment.kind, str(environment.image), binds]
        # Where the user stands need not be bound; a job starts in its run.
        lines += ['cd "$RUN_DIR"', shlex.join([*command, *environment.options])]
    python = render.python(environment, interpreter)
    wanted = [",".join(_needs(context.recipe)), "yes" if gpus else "no"]
    wanted += [str(paths.REPO_ROOT), *_paths(context.config)]
    lines.append(f"exec {python} {shlex.join(argv or ['-m', 'slurm.probe', *wanted])}")
    return "\n".join(lines)


def _paths(value: object) -> list[str]:
    """Return the files and folders that a recipe names and that are here."""
    if isinstance(value, dict):
        inner = [v for k, v in value.items() if k not in ("environment", "output_dir")]
        return list(dict.fromkeys(path for each in inner for path in _paths(each)))
    if isinstance(value, list):
        return [path for each in value for path in _paths(each)]
    is_path = isinstance(value, str) and value.startswith("/") and os.path.exists(value)
    return [str(value)] if is_path else []


def _here(script: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        ["bash", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_LIMIT_S,
    )
    return done.returncode, done.stdout.splitlines()


# What Slurm adds to a reason.
_NOISE = re.compile(
    r"Exited with exit code|Terminating StepId|support for cpu binding|^Try |: spank|: write to un"
)
_MODULES = (
    "module: command not found",
    "name it in environment.modules, which finds the command first",
)
# What a program says that cannot be started, and what helps.
_REMEDIES = (
    ("unrecognized option '--container", "this Slurm has no Pyxis: use kind: apptainer"),
    _MODULES,
    ("failed to import", "correct environment.image, or import it first with enroot import"),
    ("Exec format error", "the image or the interpreter is for another architecture: see uname -m"),
    ("not found", "its runtime is not installed there: load it in environment.setup"),
    ("cannot execute", "the image or the interpreter is for another architecture: see uname -m"),
    ("o such file", "correct environment.python; in a container it is a path inside"),
)


def _told(environment: Environment, code: int, lines: list[str]) -> list[Finding]:
    """Return the findings of the probe's output."""
    marked = [line[2:].partition(" ") for line in lines if line.startswith("@ ")]
    plain = [line.strip() for line in lines if line.strip() and not line.startswith("@ ")]
    rest = [line for line in plain if not _NOISE.search(line)]
    text = " ".join(rest)[-400:]
    findings = []
    for _, _, content in (each for each in marked if each[0] == "fault"):
        what, _, remedy = content.partition(" | ")
        own = [line[10:].rpartition(": ") for line in rest if line.startswith("cookbook: ")]
        if own and not remedy:  # of slurm/environment.sh
            others = " ".join(line for line in rest if not line.startswith("cookbook: "))[-400:]
            what, remedy = own[0][0] + f" ({others})" * bool(others), own[0][2]
        elif not remedy:  # a line of its set-up; the reason is what it printed
            what += f": {text}" * bool(text)
            is_own = any(repr(line) in what for line in environment.setup)
            place = (
                f"environment.setup in {environment.place}" if is_own else "the site's job_setup"
            )
            remedy = _MODULES[1] if _MODULES[0] in what else f"correct it in {place}"
        findings.append(failed(SUBJECT, what, remedy))
    if findings:
        return findings
    ended = next((content for kind, _, content in marked if kind == "found"), None)
    if ended is not None:
        return [ok(SUBJECT, f"{environment.title}: {ended}")]
    text = text or " ".join(plain)[-400:]
    signs = (r for sign, r in _REMEDIES if sign.lower() in text.lower())
    remedy = next(signs, f"see {environment.place}")
    return [
        failed(
            SUBJECT, f"the environment {environment.title} does not start ({code}): {text}", remedy
        )
    ]
