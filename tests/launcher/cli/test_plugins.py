"""Plug-ins: one from a wheel of somebody else, and the kit without its own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import paths
from tests.launcher.kit import until

GREETER = {
    "pyproject.toml": """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "greeter"
version = "1.0"

[project.entry-points."slurm_cookbook.plugins"]
greeter = "greeter.plugin:PLUGIN"

[tool.setuptools]
packages = ["greeter"]
""",
    "greeter/__init__.py": "",
    "greeter/plugin.py": """
from launcher.plugins import Check, Command, Plugin

PLUGIN = Plugin(
    name="greeter",
    commands={"greet": Command("greeter.cli:greet", "Greet a person.", "Look")},
    checks=(Check("politeness", "greeter.cli:polite"),),
    methods={"gentle": "greeter.keys:GentleConfig"},
)
""",
    "greeter/cli.py": '''
import click

from launcher.check import failed, ok


@click.command()
@click.argument("person")
def greet(person: str) -> None:
    """Greet PERSON."""
    click.echo(f"Good morning, {person}")


def polite(context):
    if context.config.get("seed") == 13:
        yield failed("politeness", "seed 13 is rude", "choose another: seed=1")
    else:
        yield ok("politeness", "the seed is polite")
''',
    "greeter/keys.py": '''
from dataclasses import dataclass
from typing import ClassVar

from runspec.keys.key import setting
from runspec.keys.sft import SftConfig


@dataclass(frozen=True, kw_only=True)
class GentleConfig(SftConfig):
    """Supervised fine-tuning with a part of the loss."""

    objective: ClassVar[str] = "greeter.method.Gentle"

    gentleness: float = setting("number", "The factor of the loss.", 0.5)
''',
    "greeter/method.py": '''
from greeter.keys import GentleConfig
from trainer.methods.base import LossSum
from trainer.methods.sft import SupervisedFineTuning


class Gentle(SupervisedFineTuning):
    """The loss of supervised fine-tuning, times the key gentleness."""

    config_class = GentleConfig

    def loss(self, models, batch):
        whole = super().loss(models, batch)
        return LossSum(whole.total * self.config.gentleness, {})
''',
}


def environment(folder: Path) -> Path:
    """A virtual environment with the packages of the tests, but not the checkout under test."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (own,) = Path(sys.prefix).glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(f"{own}\n")
    return folder


def cookbook(venv: Path, checkout: Path, root: Path, *words: str) -> subprocess.CompletedProcess:
    """Run the command of a checkout by a virtual environment."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("COOKBOOK_")}
    env |= {"COOKBOOK_ROOT": str(root), "COOKBOOK_VENV": str(venv)}
    words = (str(venv / "bin/python"), "-m", "launcher", *words)
    return subprocess.run(words, cwd=checkout, env=env, capture_output=True, text=True, timeout=300)


def first_losses(venv: Path, checkout: Path, root: Path, *words: str) -> list[float]:
    """Train two steps of the demo on this host, and return their losses."""
    words = ("submit", "demo", "--local", "--json", "--nodes", "1", *words, "max_steps=2")
    done = cookbook(venv, checkout, root, *words)
    assert done.returncode == 0, done.stderr
    run = Path(json.loads(done.stdout)["path"])

    def state() -> str:
        status = run / "status.json"
        return json.loads(status.read_text())["state"] if status.exists() else ""

    logs = lambda: "".join(path.read_text() for path in run.glob("logs/0/*.log"))  # noqa: E731
    until(lambda: state() in ("COMPLETED", "FAILED"), 240, logs)
    assert state() == "COMPLETED", logs()
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_a_wheel_adds_a_command_a_check_and_a_method(tmp_path):
    source, venv, root = tmp_path / "source", environment(tmp_path / "venv"), tmp_path / "root"
    for name, text in GREETER.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    make = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source]
    subprocess.run(make, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    into = ["--python", venv / "bin/python", "install", "--no-deps", "--no-index", wheel]
    subprocess.run([*pip, *into], check=True)
    here = (venv, paths.REPO_ROOT, root)

    assert "Greet a person." in cookbook(*here, "--help").stdout
    assert cookbook(*here, "greet", "Ada").stdout == "Good morning, Ada\n"
    rude = cookbook(*here, "check", "demo", "seed=13")
    assert rude.returncode == 1 and "seed 13 is rude: choose another: seed=1" in rude.stdout

    gentle = first_losses(*here, "--no-check", "entry=gentle", "gentleness=0.25")
    plain = first_losses(*here, "--no-check")
    assert gentle[0] == pytest.approx(plain[0] / 4, rel=1e-5)


@pytest.mark.long
def test_the_kit_works_without_its_own_plug_ins(tmp_path):
    checkout = tmp_path / "checkout"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=paths.REPO_ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if not name.startswith("plugins/") and (paths.REPO_ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(paths.REPO_ROOT / name, checkout / name)
    here = (environment(tmp_path / "venv"), checkout, tmp_path / "root")

    told = cookbook(*here, "--help").stdout
    assert "  submit " in told and "  estimate " not in told and "  serve " not in told
    missing = cookbook(*here, "serve", "last")
    assert missing.returncode == 2 and "No such command 'serve'" in missing.stderr
    (tmp_path / "faq.csv").write_text("question,answer\nWhat?,That\n")
    for words in (
        ["recipes"],
        ["check", "demo"],
        ["submit", "demo", "--dry-run", "--local"],
        ["sweep", "demo_settings", "--dry-run", "--local"],
        ["start", str(tmp_path / "faq.csv"), "--output", str(tmp_path / "mine.yaml")],
    ):
        done = cookbook(*here, *words)
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == 0 or words[0] == "check", done.stderr
    # By the last of them: nothing is estimated, and the recipe is written.
    assert "not estimated" in done.stdout and (tmp_path / "mine.yaml").is_file()
    losses = first_losses(*here)
    assert len(losses) == 2 and losses[1] < losses[0]
    assert cookbook(*here, "status").returncode == cookbook(*here, "results").returncode == 0
    shown = cookbook(*here, "report", "last", "--output", str(tmp_path / "r.html"))
    assert shown.returncode == 0, shown.stderr
