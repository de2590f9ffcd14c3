"""What imports what: the wall between trainer and launcher, and what a rank does not import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import startup
from tests.trainer.runs import ROOT

FILES = sorted((ROOT / "trainer").rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The modules that a file imports anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_walls(path: Path) -> None:
    tops = {name.split(".")[0] for name in imported(path)}
    assert "launcher" not in tops
    if path.parent.name != "torchtune":
        assert not tops & {"torchtune", "torchao"}, "only trainer/models/torchtune imports these"


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )


def test_compat_imports_everything_it_names_and_says_nothing() -> None:
    done = run(
        "from trainer.models.torchtune import compat; "
        "[getattr(compat, name) for name in dir(compat)]"
    )
    assert done.stdout == done.stderr == ""


def test_checking_a_config_needs_no_torch() -> None:
    code = "import sys, trainer.config; print([m for m in sys.modules if m.startswith('torch')])"
    assert run(code).stdout == "[]\n"


@pytest.mark.long
def test_only_a_recipe_that_names_torchtune_imports_it(tmp_path: Path, model_folder: Path) -> None:
    paths = {s: startup.write_run(tmp_path / s, model_folder, s) for s in startup.SOURCES}
    for path in paths.values():
        startup.imported(startup.RANK, str(path))  # it tokenises the data
    modules = {s: startup.imported(startup.RANK, str(path))["modules"] for s, path in paths.items()}
    assert "torchtune.models.llama3" in modules["torchtune"]
    heavy = {"torchtune", "datasets", "pandas", "omegaconf", "tensorboard"}
    assert not heavy & set(modules["transformers"])
