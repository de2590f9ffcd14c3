"""The code's own rules: format, lint, types, shell files, imports and words."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.prefix) / "bin"
# What stands lower may not import what stands higher.
LAYERS = [
    {"errors", "yamlfile", "paths"},
    {"environment", "stock"},
    {"recipe", "limits", "slurm", "attempt", "snapshot", "memory", "communication"},
    {"cluster", "render", "runs", "logs", "estimate", "scaling", "tuning", "provenance"},
    {"checks"},
    {"preflight", "jobs", "report", "tensorboard"},
    {"node_check", "hub"},
    {"doctor"},
    {"cli", "__main__"},
]


def tracked(*patterns: str) -> list[Path]:
    """The files of the project that match, whether committed yet or not."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.mark.parametrize(
    "command",
    [["ruff", "format", "--check", "."], ["ruff", "check", "."], ["mypy"]],
    ids=["format", "lint", "types"],
)
def test_tool(command):
    done = subprocess.run(
        [BIN / command[0], *command[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_shellcheck():
    shell = [path for path in tracked() if path.suffix == ".sh" or path == ROOT / ".ci" / "run"]
    assert {ROOT / "setup.sh", ROOT / "slurm" / "job.sh"} <= set(shell)
    done = subprocess.run(
        [BIN / "shellcheck", "--external-sources", *shell],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def imports(path: Path) -> set[str]:
    """The dotted names of what a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return names


def test_the_launcher_imports_downwards_and_never_the_trainer_or_torch():
    level = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    for path in tracked("launcher/*.py"):
        relative = path.relative_to(ROOT / "launcher")
        own = relative.parts[0].removesuffix(".py")
        for name in imports(path):
            first, _, rest = name.partition(".")
            assert first not in ("torch", "torchtune", "trainer", "transformers"), path
            used = rest.partition(".")[0]
            if first == "launcher" and used in level and own != "__init__":
                assert own in level, f"{path} stands in no layer"
                assert level[used] <= level[own], f"{path} imports launcher.{used}"


def test_every_pin_is_exact():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line]
    pins = [line for line in lines if not line.startswith("#")]
    assert len(pins) > 50
    for pin in pins:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[^=<>~ ;]+(; python_version [<>=]+ \"3\.11\")?", pin)


def test_what_the_readme_shows_exists():
    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"\]\(([A-Za-z0-9_./-]+)\)", text):
        assert (ROOT / name).exists(), name
    tree = re.search(r"```\n(slurm-cookbook/.*?)```", text, re.DOTALL)
    assert tree
    for line in tree.group(1).splitlines()[1:]:
        entry = line.partition("#")[0].strip(" │├└─")
        if entry and " " not in entry:
            found = list(ROOT.rglob(entry.rstrip("/")))
            assert found, f"the README's tree names {entry}"
