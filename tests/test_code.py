"""Rules for the code: format, lint, types, shellcheck, imports, pins, and the source tree."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.prefix) / "bin"
# A row may import itself and the rows above it, nothing below it. The longest matching name counts,
# so that a module can be in another row than its package.
FLOORS = [
    ["runspec"],
    ["launcher.errors", "launcher.paths", "launcher.yamlfile", "launcher.plugins"],
    ["launcher.venv", "launcher.gpus"],
    ["launcher.recipe", "launcher.slurm"],
    ["launcher.site"],
    ["launcher.run", "launcher.slurm.render"],
    ["launcher.check", "launcher.look", "launcher.hub"],
    ["launcher.do"],
    ["launcher.cli", "launcher.remote", "launcher.__main__", "launcher"],
    ["trainer.errors", "trainer.config", "trainer.sharded"],
    ["trainer.model"],
    ["trainer.layers"],
    ["trainer.parallel"],
    [
        "trainer.models",
        "trainer.data",
        "trainer.checkpoint",
        "trainer.optimizers",
        "trainer.groups",
        "trainer.inference",
    ],
    ["trainer.figures", "trainer.metrics", "trainer.profiling"],
    ["trainer.methods"],
    ["trainer.reporting"],
    ["trainer.loop"],
    ["trainer"],
]
# The packages of the project that each part may import. A part is the longest name that matches;
# plugins.* stands for any plug-in.
PARTS = {
    "runspec": {"runspec"},
    "slurm": {"slurm", "runspec"},
    "launcher": {"launcher", "runspec"},
    "trainer": {"trainer", "runspec"},
    "plugins.*.plugin": {"launcher"},
    "plugins.*.cli": {"launcher", "runspec", "plugins"},
    "plugins.*.launcher": {"launcher", "runspec", "plugins"},
    "plugins.*.slurm": {"slurm", "runspec", "plugins"},
    "plugins.*": {"trainer", "runspec", "plugins"},
}
# What a user types imports none of these, in no function and through no module.
TYPED = ("launcher", "plugins.*.cli", "plugins.*.launcher", "plugins.*.plugin")
# Heavy packages, which the launcher must not import.
HEAVY = ("torch", "torchtune", "torchao", "trainer", "transformers", "datasets", "numpy", "pandas")
HEAVY = (*HEAVY, "ibis", "duckdb", "pyarrow", "pyspark")


def tracked(*patterns: str) -> list[Path]:
    """The files of the project that match the patterns, committed or not."""
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
    assert {ROOT / "setup.sh", ROOT / "slurm" / "supervise.sh"} <= set(shell)
    done = subprocess.run(
        [BIN / "shellcheck", "--external-sources", *shell],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def imports(path: Path) -> set[str]:
    """The dotted names that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def floor(module: str) -> int | None:
    """Index of the row of a dotted name, by its longest prefix; None for an external package."""
    known = [(name, number) for number, names in enumerate(FLOORS) for name in names]
    found = [each for each in known if f"{module}.".startswith(f"{each[0]}.")]
    return max(found, key=lambda each: len(each[0]))[1] if found else None


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def part(module: str) -> str:
    """The part of PARTS that a module belongs to."""
    words = module.split(".")
    if words[0] == "plugins" and len(words) > 2:
        name = f"plugins.*.{words[2]}"
        return name if name in PARTS else "plugins.*"
    return "plugins.*" if words[0] == "plugins" else words[0]


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """What each module of the product imports, in functions too."""
    found = tracked(
        *(f"{name}/*.py" for name in ("runspec", "slurm", "launcher", "trainer", "plugins"))
    )
    return {module_of(path): imports(path) for path in found}


def inside(name: str, graph: dict[str, set[str]]) -> str | None:
    """The module of the product that an imported name is, or is a member of; None if outside."""
    return next((each for each in (name, name.rpartition(".")[0]) if each in graph), None)


def test_imports_go_down_only(graph):
    wrong = []
    for module, names in graph.items():
        for name in names:
            above = floor(name)
            if above is not None and floor(module) is not None and above > floor(module):
                wrong.append(f"{module} imports {name}, which is in a later row of FLOORS")
            if inside(name, graph) and name.partition(".")[0] not in PARTS[part(module)]:
                wrong.append(f"{module} imports {name}, which its part may not")
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_no_modules_import_each_other(graph):
    """Not in functions, not for type checking, and not through others."""
    reached = {m: {inside(name, graph) for name in names} - {None, m} for m, names in graph.items()}
    while leaves := [module for module, names in reached.items() if not names]:
        for module in leaves:
            del reached[module]
        for names in reached.values():
            names.difference_update(leaves)
    # What is left is in a circle, or imports one.
    assert not reached, "\n".join(f"{m}: {', '.join(sorted(n))}" for m, n in reached.items())


def test_what_a_user_types_imports_nothing_heavy(graph):
    seen = {module for module in graph if part(module) in TYPED}
    left, wrong = list(seen), []
    while left:
        module = left.pop()
        wrong += [f"{module}: {name}" for name in graph[module] if name.split(".")[0] in HEAVY]
        reached = {inside(name, graph) for name in graph[module]} - {None} - seen
        seen |= reached
        left += reached
    assert not wrong, "\n".join(sorted(wrong))


def test_what_runs_on_the_cluster_needs_only_the_standard_library():
    """The job's records and the rendezvous start fast, and work if the environment is broken."""
    allowed = {*sys.stdlib_module_names, "runspec", "slurm", "plugins"}
    modules = {module_of(path): path for path in tracked("plugins/*.py")}
    paths = tracked("slurm/*.py", "plugins/*/slurm/*.py")
    for path in paths:
        names = imports(path)
        assert {name.partition(".")[0] for name in names} <= allowed, path
        # What they take of a plug-in needs no more.
        own = modules.keys() & {*names, *(name.rpartition(".")[0] for name in names)}
        paths += [modules[name] for name in own if modules[name] not in paths]
    for path in tracked("launcher/*.py"):
        assert not [name for name in imports(path) if name.startswith("slurm.")], path


def test_no_file_of_the_core_names_a_plug_in():
    """Neither by an import nor by a path in a script, a template or a comment."""
    names = "|".join(sorted({path.parent.name for path in tracked("plugins/*/plugin.py")}))
    core = ("launcher", "slurm", "runspec", "trainer", "templates")
    for path in (path for folder in core for path in tracked(f"{folder}/*")):
        assert not re.search(rf"plugins[./]({names})\b", path.read_text()), path


def test_every_pin_is_exact():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line]
    pins = [line for line in lines if not line.startswith("#")]
    assert len(pins) > 50
    for pin in pins:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[^=<>~ ;]+(; python_version [<>=]+ \"3\.11\")?", pin)


def test_links_of_the_readme_and_the_source_tree_exist():
    for name in re.findall(r"\]\(([A-Za-z0-9_./-]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / name).exists(), name
    page = (ROOT / "CONTRIBUTING.md").read_text()
    tree = re.search(r"```\n(slurm-cookbook/.*?)```", page, re.DOTALL)
    assert tree
    paths = [f"/{path.relative_to(ROOT)}" for path in tracked("*")]
    for line in tree.group(1).splitlines()[1:]:
        entry = line.partition("#")[0].strip(" │├└─")
        if entry and " " not in entry:
            name = f"/{entry.rstrip('/')}"
            found = any(f"{path}/".find(f"{name}/") >= 0 for path in paths)
            assert found, f"the tree names {entry}"
