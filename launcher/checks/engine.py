"""Whether another trainer is installed where it will run, and knows the keys of its config."""

import hashlib
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from launcher import paths, venv, yamlfile
from launcher.checks import Context, Finding, Skipped, failed, ok
from launcher.recipes.recipe import Recipe
from runspec.files import read_json_or_none, write_text

SUBJECT = "engine config"
_LIMIT_S = 300


def config(context: Context) -> Iterable[Finding]:
    """Ask the engine, in the jobs' environment, for the keys that it knows."""
    recipe = context.recipe
    engine = recipe.entry.engine
    if engine is None:
        return []
    name, inside = engine.records.name, recipe.environment
    content = recipe.train_config(context.cluster.root, "run")
    python = str((inside and inside.interpreter(context.cluster.root)) or venv.python())
    if inside and (inside.is_container or not Path(python).is_file()):
        raise Skipped(f"{name} is asked once its environment is built")
    answer = _ask(python, engine.schema, engine.program(recipe.target), _keys(content))
    if package := answer.get("missing"):
        message = f"{_place(python)} lacks {package}, which {name} needs"
        install = f"{python} -m pip install {' '.join(engine.dependencies)}"
        other = "environment.python" if inside else "COOKBOOK_VENV"
        return [failed(SUBJECT, message, f"{install}, or name another environment in {other}")]
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


def _place(python: str) -> Path:
    """Return the environment of an interpreter."""
    return paths.venv_root() if python == str(venv.python()) else Path(python).parent.parent


def _keys(content: dict[str, Any]) -> dict[str, Any]:
    """Return the keys alone, and what _target_ names: the runs of a sweep ask the same."""
    return {
        key: _keys(value) if isinstance(value, dict) else value if key == "_target_" else None
        for key, value in content.items()
    }


def _ask(python: str, engine: str, program: str, keys: dict[str, Any]) -> dict[str, Any]:
    question = json.dumps([engine, program, keys, python, venv.packages()])
    name = hashlib.sha256(question.encode()).hexdigest()
    kept = paths.user_cache() / "checks" / f"engine_{name}.json"
    if isinstance(answer := read_json_or_none(kept), dict):
        return answer
    with TemporaryDirectory() as place:
        file = Path(place) / "config.json"
        file.write_text(json.dumps(keys), encoding="utf-8")
        script = paths.REPO_ROOT / "engines" / "schema.py"
        argv = [python, "-P", str(script), engine, program, str(file)]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_LIMIT_S, cwd=place)
            answer = dict(json.loads(done.stdout.splitlines()[-1]))
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Skipped(f"{engine} does not answer with {python}: {error}") from error
        except (ValueError, IndexError) as error:
            message = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise Skipped(f"{engine} does not answer with {python}: {message}") from error
    if "unknown" in answer:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_text(kept, json.dumps(answer))
    return answer
