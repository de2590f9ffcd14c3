"""Whether the script that a recipe starts is there, is copied, and finds what it imports."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from launcher import venv
from launcher.checks import Context
from launcher.checks.finding import Finding, failed, ok
from launcher.recipes import stock
from launcher.runs import snapshot


def script(context: Context) -> Iterable[Finding]:
    recipe = context.recipe
    script, folder = recipe.entry.program(recipe), recipe.code_root
    if script is None:
        return [ok("script", "the kit's trainer")]
    if folder is None:
        return _imports(script, None)
    if not folder.is_dir():
        words, remedy = f"code_root {folder} is no folder", "give the one that holds your code"
    elif not script.is_file():
        words, remedy = f"entry: there is no script {script}", "its path counts from the recipe"
    elif not script.is_relative_to(folder):
        words = f"entry: {script} does not lie in code_root {folder}"
        remedy = "only that folder is copied: move the script, or change code_root"
    elif script.relative_to(folder) not in snapshot.files(folder):
        words = f"entry: git ignores {script}, so it would not be copied"
        remedy = f"git add -f {script.relative_to(folder)}"
    else:
        why = snapshot.fault(folder)
        return [failed("script", why)] if why else _imports(script, folder)
    return [failed("script", words, remedy)]


def _imports(script: Path, code_root: Path | None) -> list[Finding]:
    lacks, install = "which the virtual environment lacks", f"{venv.python()} -m pip install"
    missing = [
        failed("script", f"{script.name} imports {name}, {lacks}", f"{install} {name}")
        for name in stock.missing_imports(script, code_root)
    ]
    return missing or [ok("script", str(script))]
