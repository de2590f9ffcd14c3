"""Whether another trainer is installed where it will run, and knows the keys of its config."""

import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from launcher import paths, venv, yamlfile
from launcher.check import Context, Finding, Skipped, failed, ok
from launcher.recipe import start_folder
from launcher.recipe.launch import Engine
from launcher.recipe.recipe import Recipe

SUBJECT = "engine config"
SCHEMA = paths.REPO_ROOT / "plugins" / "engines" / "schema.py"
_LIMIT_S = 300


def config(context: Context) -> Iterable[Finding]:
    """Ask the engine, in the jobs' environment, for the keys that it knows."""
    if context.recipe.entry.engine is None:
        return []
    if faults := _paths(context.recipe, context.recipe.entry.engine):
        return faults
    if is_asked_inside(context):
        return []
    name, python = context.recipe.entry.engine.records.name, _python(context)
    if not Path(python).is_file():
        raise Skipped(f"{name} is asked once its environment is built")
    asked = question(context)
    key = json.dumps([python, *asked])
    if key not in context.told:
        context.told[key] = _ask(python, name, asked)
    return judged(context, context.told[key])


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


def is_asked_inside(context: Context) -> bool:
    """Whether only a job's start finds the engine: in a container, by conda, by modules."""
    environment = context.recipe.environment
    if context.recipe.entry.engine is None or environment is None:
        return False
    return environment.is_container or "/" not in _python(context)


def question(context: Context) -> list[str]:
    """Return what plugins/engines/schema.py is given; an engine's entry alone has one."""
    engine = context.recipe.entry.engine
    if engine is None:
        return []
    keys = _keys(context.recipe.train_config(context.cluster.root, "run"))
    return [engine.schema, engine.program(context.recipe.target), json.dumps(keys)]


def judged(context: Context, answer: Mapping[str, Any]) -> list[Finding]:
    """Return the findings of its answer."""
    recipe, environment, python = context.recipe, context.recipe.environment, _python(context)
    engine = recipe.entry.engine
    if engine is None:
        return []
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
    name = key if "config_read_from" in recipe.config else f"parameters.{key}"
    line = yamlfile.line_of(source, name) if source.is_file() else None
    return f"correct it in {source}, line {line}" if line else f"correct parameters.{key}"


def _python(context: Context) -> str:
    """Return the ranks' interpreter, as a path or as a name in PATH."""
    environment = context.recipe.environment
    return str((environment and environment.interpreter(context.cluster.root)) or venv.python())


def _keys(content: dict[str, Any]) -> dict[str, Any]:
    """Return the keys alone, and what _target_ names: the runs of a sweep ask the same."""
    return {
        key: _keys(value) if isinstance(value, dict) else value if key == "_target_" else None
        for key, value in content.items()
    }


def _ask(python: str, name: str, question: list[str]) -> dict[str, Any]:
    with TemporaryDirectory() as place:
        argv = [python, "-P", str(SCHEMA), *question]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_LIMIT_S, cwd=place)
            return dict(json.loads(done.stdout.splitlines()[-1]))
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Skipped(f"{name} does not answer with {python}: {error}") from error
        except (ValueError, IndexError) as error:
            message = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise Skipped(f"{name} does not answer with {python}: {message}") from error
