"""Whether the components of a recipe exist and fit: asked of the trainer, in its environment."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from launcher import environment, paths
from launcher.checks import Context, Skipped
from launcher.errors import RunFault
from launcher.recipe import TRAINER_KEYS

# Numbers that no component sees: the launcher has looked at them, and they change from run to run.
_PLAIN = {
    key
    for key, kind in TRAINER_KEYS.items()
    if kind in ("positive", "count", "number") and "_dim" not in key
}


def components(context: Context) -> list[str] | str:
    recipe = context.recipe
    if recipe.script:
        raise Skipped("the script is your own")
    if not context.prepared:
        raise Skipped("the model is made at submission")
    config = recipe.train_config(context.cluster.root, "run")
    stock = recipe.entry != "sft"
    kept = _cache() / f"{_key(config, stock)}.json"
    try:
        answer = paths.read_json(kept)
    except RunFault:
        answer = None
    if answer is None:
        answer = _ask(config, stock)
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            paths.write_json(kept, answer)
        except OSError:
            pass  # asked again next time
    return list(answer["faults"]) or f"{answer['found']}"


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "slurm-cookbook" / "checks"


def _key(config: dict[str, Any], stock: bool) -> str:
    """Stands for what the answer depends on: config, packages, the trainer, the model's files."""
    folder = Path(str((config.get("checkpointer") or {}).get("checkpoint_dir", "")))
    sources = sorted((paths.REPO_ROOT / "trainer").glob("*.py"))
    sources += sorted(folder.iterdir()) if folder.is_dir() else []
    seen = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sources]
    asked = {key: value for key, value in config.items() if key not in _PLAIN}
    text = json.dumps([asked, stock, str(paths.venv_root()), environment.packages(), seen])
    return hashlib.sha256(text.encode()).hexdigest()


def _ask(config: dict[str, Any], stock: bool) -> dict[str, Any]:
    try:
        done = environment.ask_trainer(
            "check", config, *(["--stock"] if stock else []), timeout_s=300
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except OSError as error:
        raise Skipped(
            f"{environment.python()} cannot be started ({error.strerror}): set up the environment: "
            "bash setup.sh"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise Skipped("the trainer did not answer within five minutes") from error
    except (ValueError, IndexError) as error:
        words = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise Skipped(f"the trainer cannot be asked in {paths.venv_root()}: {words}") from error
    return dict(answer)
