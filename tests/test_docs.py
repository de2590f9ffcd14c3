"""The pages: every command that they show exists, what is generated is current, the site builds."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from benchmarks import reference
from launcher import paths, yamlfile
from launcher.cli import cookbook
from launcher.recipe.load import names

ROOT = Path(__file__).parents[1]
COMMANDS = ROOT / "docs" / "commands.md"
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").glob("*.md")} - {COMMANDS})]
RECIPES = sorted((ROOT / "configs").glob("recipes/*.yaml")) + sorted(
    (ROOT / "configs").glob("sweeps/*.yaml")
)


def commands(path: Path) -> list[list[str]]:
    """The cookbook commands in the bash blocks of a page or in the comments of a recipe."""
    text = path.read_text()
    if path.suffix == ".md":
        lines = "".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).splitlines()
    else:
        lines = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
    split = [shlex.split(line, comments=True) for line in lines if line.startswith("cookbook ")]
    return [words[1:] for words in split]


@pytest.mark.parametrize("path", [*PAGES, *RECIPES], ids=lambda path: path.name)
def test_shown_commands_exist(path):
    for arguments in commands(path):
        context = click.Context(cookbook)
        command = cookbook.get_command(context, arguments[0])
        assert command is not None, arguments
        parsed = command.make_context(arguments[0], arguments[1:], parent=context)
        if "words" in parsed.params:
            name = parsed.params.get("recipe") or (*parsed.params["words"], None)[0]
            known = [*yamlfile.names(paths.SWEEPS), None] if command.name == "sweep" else names()
            # A file of the reader's own begins with my, perhaps behind an engine: litgpt:my.yaml.
            own = str(name).rpartition(":")[2].startswith("my")
            assert name in known or (ROOT / name).is_file() or own, arguments


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_shown_yaml_can_be_read(path):
    for block in re.findall(r"```yaml\n(.*?)```", path.read_text(), re.DOTALL):
        assert yaml.safe_load(block)


def test_the_pages_show_every_command():
    shown = {arguments[0] for path in PAGES for arguments in commands(path)}
    listed = {*cookbook.list_commands(click.Context(cookbook))}
    assert listed - shown <= {"environments"}


def test_shown_options_of_setup_and_cluster_scripts_exist():
    setup, cluster = (ROOT / "setup.sh").read_text(), ROOT / "slurm/dev-cluster/cluster.py"
    for path in PAGES:
        for line in re.findall(r"^bash setup\.sh.*$", path.read_text(), re.MULTILINE):
            for option in re.findall(r"--[a-z-]+", line.partition("#")[0]):
                assert f"{option}" in setup, line
        for line in re.findall(r"cluster\.py [a-z]+.*$", path.read_text(), re.MULTILINE):
            for option in re.findall(r"--[a-z-]+", line.partition("#")[0]):
                assert option in cluster.read_text(), line


def test_the_reference_of_commands_is_current():
    expected = reference.commands()
    assert COMMANDS.read_text() == expected, "benchmarks.reference commands"


def test_the_site_builds(tmp_path):
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]
    done = subprocess.run([*argv, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "quickstart" / "index.html").is_file()
