"""Whether the jobs' virtual environment is whole, read from its files without importing them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from launcher import paths, venv
from launcher.checks.finding import Finding, failed, ok, warning

_SUBJECT, _REMEDY = "virtual environment", "bash setup.sh"
_PYTHONS = ((3, 11), (3, 13))


def findings() -> list[Finding]:
    root, packages = paths.venv_root(), venv.site_packages()
    if packages is None or not venv.python().exists():
        return [failed(_SUBJECT, f"there is no virtual environment in {root}", _REMEDY)]
    python = packages.parent.name.removeprefix("python")
    found = []
    if not _PYTHONS[0] <= tuple(map(int, python.split("."))) <= _PYTHONS[1]:
        remedy = "COOKBOOK_PYTHON=python3.11 bash setup.sh"
        found.append(failed(_SUBJECT, f"{root} has Python {python}, not 3.11 to 3.13", remedy))
    if not (root / ".cookbook-setup").is_file():
        words = f"setup.sh did not finish {root}, or did not make it"
        found.append(warning(_SUBJECT, words, _REMEDY))
    installed = {_normal(name): version for name, version in venv.packages().items()}
    found += _other_versions(root, installed)
    missing = [name for name in ("torch", "torchtune", "tensorboard") if name not in installed]
    if missing:
        found.append(failed(_SUBJECT, f"{root} lacks {', '.join(missing)}", _REMEDY))
    if found:
        return found
    torch, cuda = venv.torch_build()
    words = f"{root}: Python {python}, torch {torch} for {f'CUDA {cuda}' if cuda else 'CPUs'}, "
    words += f"TensorBoard {installed['tensorboard']}; all packages as in constraints.txt"
    return [ok(_SUBJECT, words)]


def _other_versions(root: Path, installed: dict[str, str]) -> Iterable[Finding]:
    """Compare with the pins; another build of torch is what setup.sh --torch is for."""
    text = (paths.REPO_ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins = re.findall(r"^([A-Za-z0-9._-]+)==([^ ;#\n]+)", text, re.MULTILINE)
    other = sorted(
        f"{name} {installed[name]} (pinned {pin})"
        for name, pin in ((_normal(name), pin) for name, pin in pins)
        if name != "torch" and installed.get(name, pin).partition("+")[0] != pin
    )
    if other:
        words = f"{root} has other versions than constraints.txt: {', '.join(other[:5])}"
        words += f" and {len(other) - 5} more" if len(other) > 5 else ""
        yield warning(_SUBJECT, words, _REMEDY)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
