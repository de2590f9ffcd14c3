"""Whether another trainer is installed where it will run, and knows the keys of its config."""

import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from launcher import paths, venv, yamlfile
from launcher.check import Context, Finding, Skipped, failed, ok
from launcher.check.inside import start
from launcher.recipe.model import Recipe
from plugins.engines.launcher import start_folder
from plugins.engines.launcher.engine import Engine
from plugins.engines.launcher.engines import ENGINES
from plugins.engines.launcher.torchtune import ENGINE as TORCHTUNE

SUBJECT = "engine config"
SCHEMA = paths.REPO_ROOT / "plugins" / "engines" / "schema.py"
_LIMIT_S = 300


def config(context: Context) -> Iterable[Finding]:
    """Ask the engine, in the jobs' environment, for the keys that it knows."""
    engine = {**ENGINES, "torchtune:": TORCHTUNE}.get(
        f"{context.recipe.entry_name.partition(':')[0]}:"
    )
    if engine is None:
        return []
    if faults := _paths(context.recipe, engine):
        return faults
    keys = _keys(context.recipe.train_config(context.cluster.root, "run"))
    argv = ["-P", str(SCHEMA), engine.schema, engine.program(context.recipe.target)]
    argv.append(json.dumps(keys))
    key = json.dumps([_python(context), *argv])
    if key not in context.answers:
        context.answers[key] = _ask(context, engine, argv)
    return _judged(context, engine, context.answers[key])


def _paths(recipe: Recipe, engine: Engine) -> list[Finding]:
    """Find the relative paths of its config that lead nowhere from where it starts."""
    folder = recipe.code_root or recipe.work_dir or recipe.path.parent
    names = start_folder.named(recipe.config.get("parameters") or {}, engine)
    where = f"not in {folder}, where {engine.records.name} starts"
    remedy = "give the folder from which the paths count: work_dir=FOLDER"
    if not folder.is_dir():
        return [failed(SUBJECT, f"work_dir: {folder} is no folder", remedy)]
    return [
        failed(SUBJECT, f"{key}: {names[key]} is {where}", remedy)
        for key in start_folder.missing(folder, names)
    ]


def _judged(context: Context, engine: Engine, answer: Mapping[str, Any]) -> list[Finding]:
    """Return the findings of its answer."""
    recipe, environment, python = context.recipe, context.recipe.environment, _python(context)
    name = engine.records.name
    if package := answer.get("missing"):
        place = f"the environment {environment.title}" if environment else str(paths.venv_root())
        remedy = f"{python} -m pip install {{}}, or name another environment in COOKBOOK_VENV"
        remedy = (environment.remedy if environment else remedy).replace(
            "{}", " ".join(engine.dependencies)
        )
        return [failed(SUBJECT, f"{place} lacks {package}, which {name} needs", remedy)]
    if why := answer.get("absent"):
        return [failed(SUBJECT, f"{name}: {why}", "correct it, or name another environment")]
    if why := answer.get("broken"):
        message = f"{name} cannot be imported with {python}: {why}"
        if engine.needs_gpu:
            raise Skipped(f"{message}; it may need a GPU")
        return [
            failed(
                SUBJECT,
                message,
                "its packages do not fit together: change environment.dependencies",
            )
        ]
    unknown = answer.get("unknown") or {}
    faults = [
        failed(
            SUBJECT,
            f"{engine.records.name} has no key {key!r}{f' (did you mean {hint}?)' if hint else ''}",
            _where(recipe, key),
        )
        for key, hint in unknown.items()
    ]
    return faults or [ok(SUBJECT, f"{engine.records.name} knows all keys")]


def _where(recipe: Recipe, key: str) -> str:
    """Return what to do with a key: where it is given."""
    source = Path(str(recipe.config.get("config_read_from") or recipe.path))
    is_whole = "config_read_from" in recipe.config or recipe.entry.other_keys
    name = key if is_whole else f"parameters.{key}"
    line = yamlfile.line_of(source, name) if source.is_file() else None
    return f"correct it in {source}, line {line}" if line else f"correct {name}"


def _python(context: Context) -> str:
    """Return the ranks' interpreter, as a path or as a name in PATH."""
    environment = context.recipe.environment
    return str((environment and environment.interpreter(context.cluster.root)) or venv.python())


def _keys(content: dict[str, Any]) -> dict[str, Any]:
    """Return the keys alone, and what targets name: the runs of a sweep ask the same."""
    targets = ("_target_", "_component_")
    return {
        key: _keys(value) if isinstance(value, dict) else value if key in targets else None
        for key, value in content.items()
    }


def _ask(context: Context, engine: Engine, argv: list[str]) -> dict[str, Any]:
    """Return the answer of plugins/engines/schema.py; Skipped if there is none."""
    environment, name, python = context.recipe.environment, engine.records.name, _python(context)
    # In a container and by modules only a job's start finds the engine.
    if environment and (environment.is_container or "/" not in python):
        _, lines = start(environment, context, *argv)
        return _answer(lines, f"no answer in {environment.title}")
    if not Path(python).is_file():
        raise Skipped(f"{name} is asked once its environment is built")
    why = f"{name} does not answer with {python}"
    with TemporaryDirectory() as place:
        try:
            done = subprocess.run(
                [python, *argv], capture_output=True, text=True, timeout=_LIMIT_S, cwd=place
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Skipped(f"{why}: {error}") from error
    return _answer([*done.stderr.splitlines(), *done.stdout.splitlines()], why)


def _answer(lines: list[str], why: str) -> dict[str, Any]:
    try:
        return dict(json.loads([line for line in lines if line.startswith("{")][-1]))
    except (ValueError, IndexError) as error:
        message = next((line for line in reversed(lines) if line.strip()), "no message")
        raise Skipped(f"{why}: {message}") from error
