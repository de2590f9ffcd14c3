"""Every cookbook command that a page, a recipe's header or a message shows is one that exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from launcher.cli import cookbook
from launcher.recipe import names

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))


def commands(path: Path) -> list[list[str]]:
    """The cookbook command lines of a page's shell blocks, or of a recipe's comments."""
    text = path.read_text()
    if path.suffix == ".md":
        lines = "".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).splitlines()
    else:
        lines = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
    split = [shlex.split(line, comments=True) for line in lines if line.startswith("cookbook ")]
    return [words[1:] for words in split]


@pytest.mark.parametrize("path", [*PAGES, *RECIPES], ids=lambda path: path.name)
def test_the_commands_that_are_shown_exist(path):
    for arguments in commands(path):
        context = click.Context(cookbook)
        command = cookbook.get_command(context, arguments[0])
        assert command is not None, arguments
        made = command.make_context(arguments[0], arguments[1:], parent=context)
        if "recipe_name" in made.params:
            name = made.params["recipe_name"]
            assert name in names() or (ROOT / name).is_file(), arguments


def test_the_pages_show_commands():
    shown = {arguments[0] for path in PAGES for arguments in commands(path)}
    assert shown == {
        "recipes",
        "check",
        "estimate",
        "submit",
        "status",
        "watch",
        "logs",
        "cancel",
        "resume",
        "tensorboard",
        "doctor",
        "download",
    }


def test_every_option_of_setup_and_of_the_cluster_script_that_is_shown_exists():
    setup, cluster = (ROOT / "setup.sh").read_text(), ROOT / "slurm/dev-cluster/cluster.sh"
    for path in PAGES:
        for line in re.findall(r"^bash setup\.sh.*$", path.read_text(), re.MULTILINE):
            for option in re.findall(r"--[a-z-]+", line.partition("#")[0]):
                assert f"{option}" in setup, line
        for line in re.findall(r"cluster\.sh [a-z]+.*$", path.read_text(), re.MULTILINE):
            for option in re.findall(r"--[a-z-]+", line.partition("#")[0]):
                assert option in cluster.read_text(), line
