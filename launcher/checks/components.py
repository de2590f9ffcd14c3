"""Whether a recipe's components exist and fit: asked of the trainer, in the jobs' environment."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from launcher import paths, venv
from launcher.checks import Context, Finding, Skipped, failed, ok
from runspec.files import read_json_or_none, write_json
from runspec.keys.sft import SFT

# Numbers that no component sees: the launcher has checked them, and they change from run to run.
_PLAIN = {
    name
    for name, key in SFT.items()
    if key.kind in ("positive", "count", "number") and "_dim" not in name
}


def components(context: Context) -> Iterable[Finding]:
    recipe = context.recipe
    if not recipe.entry.checked:
        raise Skipped("the script is your own")
    if not context.prepared:
        raise Skipped("the model is made at submission")
    config = recipe.train_config(context.cluster.root, "run")
    stock = recipe.entry.checked != "complete"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    kept = cache / "slurm-cookbook" / "checks" / f"{_key(config, stock)}.json"
    answer = read_json_or_none(kept)
    if not isinstance(answer, dict):
        answer = _ask(config, stock)
        # If it cannot be kept, it is asked again next time.
        with contextlib.suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_json(kept, answer)
    faults = [failed("components", fault) for fault in answer["faults"]]
    return faults or [ok("components", str(answer["found"]))]


def _key(config: dict[str, Any], stock: bool) -> str:
    """Return a hash of what the answer depends on: config, packages, trainer, the model's files."""
    folder = Path(str((config.get("checkpointer") or {}).get("checkpoint_dir", "")))
    sources = sorted((paths.REPO_ROOT / "trainer").rglob("*.py"))
    sources += sorted((paths.REPO_ROOT / "runspec").rglob("*.py"))
    sources += sorted(folder.iterdir()) if folder.is_dir() else []
    seen = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sources]
    asked = {key: value for key, value in config.items() if key not in _PLAIN}
    text = json.dumps([asked, stock, str(paths.venv_root()), venv.packages(), seen])
    return hashlib.sha256(text.encode()).hexdigest()


def _ask(config: dict[str, Any], stock: bool) -> dict[str, Any]:
    try:
        done = venv.ask_trainer("check", config, *(["--stock"] if stock else []), timeout_s=300)
        answer = json.loads(done.stdout.splitlines()[-1])
    except OSError as error:
        words = f"{venv.python()} cannot be started ({error.strerror}): make the virtual"
        raise Skipped(f"{words} environment with: bash setup.sh") from error
    except subprocess.TimeoutExpired as error:
        raise Skipped("the trainer did not answer within five minutes") from error
    except (ValueError, IndexError) as error:
        words = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Skipped(f"the trainer in {paths.venv_root()} does not answer: {words}") from error
    return dict(answer)
