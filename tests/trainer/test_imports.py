"""What imports what: the seam to torchtune, and the wall between trainer and launcher."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.runs import ROOT

FILES = sorted((ROOT / "trainer").glob("*.py"))


def imported(path: Path) -> set[str]:
    """The modules that a file imports anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_walls(path: Path) -> None:
    tops = {name.split(".")[0] for name in imported(path)}
    assert "launcher" not in tops
    if path.name != "compat.py":
        assert not tops & {"torchtune", "torchao"}, "import it through trainer/compat.py"


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )


def test_compat_imports_everything_it_names_and_says_nothing() -> None:
    done = run("from trainer import compat; [getattr(compat, n) for n in compat.__all__]")
    assert done.stdout == done.stderr == ""


def test_checking_a_config_needs_no_torch() -> None:
    code = "import sys, trainer.config; print([m for m in sys.modules if m.startswith('torch')])"
    assert run(code).stdout == "[]\n"
