"""Names that the shell completes: recipes, keys, sweeps, runs. See docs/quickstart.md."""

from typing import TYPE_CHECKING

import click

from launcher import site as sites
from launcher.errors import CookbookError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# Of many runs the newest are completed.
_MOST_RUNS = 200


def recipes(ctx: click.Context, option: click.Parameter, begin: str) -> list["CompletionItem"]:
    """Complete the name of a recipe or the path of a file, and then keys of its overrides."""
    from launcher.recipe.entries import all_keys
    from launcher.recipe.load import names

    named = ctx.params.get("recipe") or ctx.params.get("words")
    if option.name == "words" and named:
        return _of([f"{key}=" for key in all_keys()], begin, files=False)
    return _of(names(), begin)


def sweeps(ctx: click.Context, option: click.Parameter, begin: str) -> list["CompletionItem"]:
    """Complete the name of a sweep, or the path of a file."""
    from launcher.recipe.sweep import names

    return _of(names(), begin)


def runs(ctx: click.Context, option: click.Parameter, begin: str) -> list["CompletionItem"]:
    """Complete the name of a run, the newest first, or last."""
    from launcher.run.directory import runs_root
    from launcher.run.find import every

    try:
        root = runs_root(sites.load(ctx.params.get("cluster")).root)
        names = [run.name for run in every(root)]
    except (CookbookError, OSError):
        return []
    return _of(["last", *names[::-1][:_MOST_RUNS]], begin, files=False)


def _of(names: list[str], begin: str, files: bool = True) -> list["CompletionItem"]:
    # Imported late: every command has completions, and few calls complete.
    from click.shell_completion import CompletionItem

    items = [CompletionItem(name) for name in names if name.startswith(begin)]
    return items or ([CompletionItem(begin, type="file")] if files else [])
