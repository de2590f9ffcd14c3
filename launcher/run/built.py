"""Environments that are built of dependencies: <shared folder>/environments/<user id>/<digest>."""

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher import paths, venv, yamlfile
from launcher.errors import PreflightFault, RunFault
from launcher.recipe.environment import BUILT, Environment
from launcher.run import trust
from launcher.run.directory import Run
from runspec import files, lock, publish

# In a built environment: its dependencies and packages.
_RECORD = "cookbook.json"
_WAIT_S = 3600.0


def folder(environment: Environment, root: Path) -> Path:
    """Return where an environment's dependencies are built, whether they are or not."""
    return root / BUILT / str(os.geteuid()) / environment.digest


def is_built(environment: Environment, root: Path) -> bool:
    """Whether its dependencies are built; RunFault if others could have changed what is there."""
    path = folder(environment, root)
    if not (path / _RECORD).is_file():
        return False
    trust.require(path.parent, *_checked(path))
    return True


def _checked(path: Path) -> tuple[Path, ...]:
    return path, path / "bin", *path.glob("lib/python*/site-packages")


def solve(environment: Environment) -> list[str]:
    """Return all packages that its dependencies need, as NAME==VERSION or NAME @ URL.

    PreflightFault holds uv's reason in one line.
    """
    _check_uv(environment)
    done = _compile(environment)
    if done.returncode:
        raise PreflightFault(_reason(environment, done.stderr))
    return _packages(done.stdout)


def _compile(environment: Environment, without: str = "") -> "subprocess.CompletedProcess[str]":
    """Let uv solve the dependencies; without: a package that is left out, with what it needs."""
    argv = ["pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-strip-markers"]
    argv += ["--python", str(venv.python()), "-"]
    with (
        tempfile.NamedTemporaryFile("w", suffix=".txt") as file,
        tempfile.NamedTemporaryFile("w", suffix=".txt") as pins,
    ):
        if environment.pins:
            # A version that is asked for takes the place of the kit's.
            own = {venv.required(each) for each in environment.dependencies if "==" in each}
            lines = venv.pins().read_text(encoding="utf-8").splitlines(keepends=True)
            pins.writelines(line for line in lines if venv.required(line) not in own)
            pins.flush()
            argv += ["--constraint", pins.name]
        if without:
            # An override takes the place of all requirements of that name.
            file.write(f"{without}; python_version < '3'\n")
            file.flush()
            argv += ["--override", file.name]
        return _uv(argv, "\n".join(environment.dependencies))


def _packages(answer: str) -> list[str]:
    return [line.strip() for line in answer.splitlines() if "==" in line or " @ " in line]


def _package(line: str) -> tuple[str, str]:
    """Return the name and the version of a package of uv's answer; a URL is no version."""
    return venv.required(line), line.partition(";")[0].strip().partition("==")[2]


def build(environment: Environment, root: Path, say: Callable[[str], None]) -> Path:
    """Build an environment's dependencies unless they are built, and return its folder.

    It appears whole or not at all; who comes meanwhile waits. It can be moved.
    """
    path = folder(environment, root)
    trust.own_folder(root, BUILT)
    held = path.parent / f".{path.name}.lock"
    with lock.take(held, _WAIT_S, lambda who: say(f"waiting for {path.name}, built by {who}")):
        if not is_built(environment, root):
            began = time.monotonic()
            say(f"building the environment {path.name}: {', '.join(environment.dependencies)}")
            before = os.umask(0o022)
            try:
                with publish.folder(path, "replace", alone=True) as temporary:
                    _fill(environment, temporary)
                    trust.close(*_checked(temporary))
            finally:
                os.umask(before)
            say(f"built in {time.monotonic() - began:.0f} s: {path}")
    return path


def ensure(environment: Environment | None, root: Path, say: Callable[[str], None]) -> None:
    """Build a recipe's environment if it has dependencies; errors as of build."""
    if environment and environment.dependencies:
        build(environment, root, say)


def restore(run: Run, say: Callable[[str], None]) -> None:
    """Build the environment that a run's job script names again if it is gone.

    Raises:
        RunFault: with today's Python and pins it would be another one.
        PreflightFault: as of build.
    """
    root = run.path.parent.parent
    for digest in _digests(run):
        path = root / BUILT / str(os.geteuid()) / digest
        if (path / _RECORD).is_file():
            continue
        block = yamlfile.load(run.path / files.RECIPE).get("environment") or {}
        environment = Environment.of(block)
        if environment.digest != digest:
            raise RunFault(
                f"{path}, the environment of {run.name}, was removed, and the kit "
                "has other packages now: continue in a new one with: cookbook resume "
                f"{run.name} --code current"
            )
        build(environment, root, say)


def _fill(environment: Environment, path: Path) -> None:
    wanted = solve(environment)
    if environment.pins:
        # What the kit's own environment has is shared with it: its build of torch, too, which may
        # need other packages than that of the registry (those of CUDA).
        there = {(venv.plain_name(n), v.partition("+")[0]) for n, v in venv.packages().items()}
        new = {_package(line): line for line in wanted if _package(line) not in there}
        if not any(name == "torch" for name, _ in new):
            alone = _compile(environment, "torch").stdout
            kept = {_package(line)[0] for line in _packages(alone)}
            new = {pair: line for pair, line in new.items() if pair[0] in kept}
        wanted = list(new.values())
    done = _uv(
        ["venv", "--quiet", "--clear", "--relocatable", "--python", str(venv.python()), str(path)]
    )
    if done.returncode == 0 and wanted:
        argv = ["pip", "install", "--quiet", "--no-deps", "--compile-bytecode", "--link-mode=copy"]
        argv += ["--python", str(path / "bin" / "python"), "--requirement", "-"]
        done = _uv(argv, "\n".join(wanted))
    if done.returncode:
        raise PreflightFault(_reason(environment, done.stderr))
    own, kit = next(path.glob("lib/python*/site-packages")), venv.site_packages()
    if environment.pins and kit:
        folders = dict.fromkeys((kit, venv.torch_folder()))
        (own / "_cookbook.pth").write_text("".join(f"{each}\n" for each in folders), "utf-8")
    content = {"dependencies": list(environment.dependencies), "packages": wanted}
    (path / _RECORD).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _check_uv(environment: Environment) -> None:
    """PreflightFault if uv is missing: in an environment of the user's own, with the packages."""
    if os.access(_program(), os.X_OK):
        return
    if "COOKBOOK_VENV" not in os.environ:
        raise PreflightFault(f"there is no {_program()}, which builds dependencies: bash setup.sh")
    installed = {venv.plain_name(name) for name in venv.packages()}
    missing = [each for each in environment.dependencies if venv.required(each) not in installed]
    raise PreflightFault(
        f"COOKBOOK_VENV: {paths.venv_root()} lacks {', '.join(missing)}, and uv, which would build "
        f"them: {venv.python()} -m pip install {' '.join(missing)}"
    )


def _program() -> Path:
    return paths.venv_root() / "bin" / "uv"


def _wheels() -> Path:
    """Return uv's settings at a site without internet, which setup.sh --from writes."""
    return paths.venv_root() / "uv.toml"


def _uv(argv: Sequence[str], text: str = "") -> "subprocess.CompletedProcess[str]":
    wheels = ["--config-file", str(_wheels())] if _wheels().is_file() else []
    argv = [str(_program()), *wheels, *argv]
    return subprocess.run(argv, input=text, capture_output=True, text=True)


def _reason(environment: Environment, output: str) -> str:
    """Return uv's reason in one line, and what to do."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", output)
    if source := re.search(r"Failed to build `([^`]+)`", text):
        printed = [line.strip() for line in text.partition("\nhint:")[0].splitlines()]
        why = next(filter(None, reversed(printed)))
        name = source[1].partition("==")[0].partition(" @ ")[0]
        return (
            f"environment.dependencies cannot be built: {source[1]} comes as source, and its build "
            f"fails: {why}: name a wheel of it ({name} @ URL), or install it by hand into an "
            "environment of your own (environment.python)"
        )
    text = " ".join(re.sub(r"[^\x20-\x7e\n]", " ", text).split())
    # It reads them from its standard input.
    text = re.sub(r"(Couldn't parse requirement) in `-` at position \d+ cause: ", r"\1: ", text)
    text = re.sub(
        r"^(error: )?(No solution found when resolving dependencies\W*(cause\W*)?)?", "", text
    )
    reason = f"environment.dependencies cannot be built: {text[:600].rstrip('.')}"
    if _wheels().is_file():
        add = "bash setup.sh --bundle FOLDER --recipe FILE (docs/offline.md)"
        return f"{reason}: add what is missing where there is network: {add}"
    if not environment.pins:
        return f"{reason}: correct them in {environment.place}"
    remedy = "correct yours, or set environment.pins=false for an environment without them"
    return f"{reason}; versions that you did not ask for are the kit's ({venv.pins()}): {remedy}"


def _digests(run: Run) -> set[str]:
    """Return which of this user's built environments a run's job script names.

    Raises:
        OSError: the script cannot be read.
    """
    try:
        script = (run.path / files.JOB_SCRIPT).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return set()
    return set(re.findall(rf"/{BUILT}/{os.geteuid()}/([0-9a-f]{{16}})/", script))
