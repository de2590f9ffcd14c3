"""What ranks run in: a record in configs/environments/NAME.yaml, or a block of a recipe."""

import hashlib
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher import paths, venv, yamlfile
from launcher.errors import RecipeFault, nearest
from runspec.keys.environment import CONTAINERS, ENVIRONMENT, EnvironmentKeys
from runspec.keys.key import Fault, faults
from runspec.variables import owned_variables

# In the shared folder: the environments that were built of dependencies, by their content.
BUILT = "environments"
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
# A job script is a file that others may read and Slurm keeps: no secret goes into it.
_SECRET = re.compile(r"TOKEN(?!IZ)|SECRET|PASSW|API_?KEY|CREDENTIAL", re.IGNORECASE)


@dataclass(frozen=True)
class Environment(EnvironmentKeys):
    """A checked record."""

    @classmethod
    def of(cls, block: Mapping[str, Any]) -> "Environment":
        """Return what a checked block says."""
        given: dict[str, Any] = {k: v for k, v in block.items() if v is not None}
        lists: dict[str, Any] = {k: tuple(v) for k, v in given.items() if isinstance(v, list)}
        return cls(**{**given, **lists})

    @property
    def is_container(self) -> bool:
        return self.kind in CONTAINERS

    @property
    def title(self) -> str:
        """Its name and kind, for messages."""
        return f"{self.name or 'of the recipe'} ({self.kind})"

    @property
    def place(self) -> str:
        """The file that its lines are in."""
        return f"configs/environments/{self.name}.yaml" if self.name else "the recipe"

    @property
    def remedy(self) -> str:
        """What to do about a package that it lacks; {} in the text is the package."""
        if self.is_container:
            return f"use an image that has {{}}, in {self.place}"
        if self.python and not self.dependencies:
            return f"{self.python} -m pip install {{}}"
        return f"add {{}} to environment.dependencies in {self.place}"

    @cached_property
    def digest(self) -> str:
        """What names the folder that its dependencies are built into: all that they depend on."""
        # It shares the packages of the kit's virtual environment, which are at these versions.
        kit = [str(venv.site_packages()), venv.pins().read_text(encoding="utf-8")]
        content = {
            "dependencies": sorted(set(self.dependencies)),
            "python": list(sys.version_info[:3]),
            "machine": platform.machine(),
            "kit": kit if self.pins else None,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def interpreter(self, root: Path) -> str | None:
        """Return the ranks' Python: a path, or a name in PATH; None for the kit's own.

        root: the shared folder, in which dependencies are built.
        """
        if self.dependencies:
            return str(root / BUILT / str(os.geteuid()) / self.digest / "bin" / "python")
        if self.python:
            return self.python
        if self.is_container:
            return "python3"
        return None

    @property
    def lines(self) -> list[str]:
        """The shell lines that a job runs first, on the host."""
        loads = [f"patiently load_module {shlex.quote(module)}" for module in self.modules]
        return [*self.setup, *loads]


def record(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the block of an environment, given its name or itself; RecipeFault lists its faults.

    A named record says its name, so that a run's recipe holds all of it.
    """
    if isinstance(given, Mapping):
        return dict(given)
    given = str(given)
    path = paths.ENVIRONMENTS / f"{given}.yaml"
    if not path.is_file():
        known = yamlfile.names(paths.ENVIRONMENTS)
        message = f"there are {', '.join(known)}" if known else "there are none"
        raise RecipeFault(
            f"there is no environment {given!r}{nearest(given, known)}: {message} in "
            f"{paths.ENVIRONMENTS} (docs/environments.md)"
        )
    config = yamlfile.load(path)
    if wrong := [*faults(config, ENVIRONMENT), *environment_faults(config)]:
        lines = ((fault, yamlfile.line_of(path, fault.key)) for fault in wrong)
        raise RecipeFault([f"{f.text}, in {path}{f', line {n}' * bool(n)}" for f, n in lines])
    return {**config, "name": given}


def environment_faults(given: Any, start: str = "") -> Iterator[Fault]:
    """Yield the faults of an environment's block that its table of keys does not see."""
    if not isinstance(given, dict):
        return
    yield from variable_faults(given.get("variables"), f"{start}variables")
    kind = given.get("kind") or "venv"
    if kind not in ENVIRONMENT["kind"].choices:
        return  # what belongs to it is not known
    container = kind in CONTAINERS
    for key, fits in (
        ("image", container),
        ("binds", container),
        ("options", container),
        ("dependencies", not container),
    ):
        if given.get(key) and not fits:
            yield Fault(f"{start}{key}", f"{start}{key} has no meaning for kind: {kind}")
    if container and not given.get("image"):
        yield Fault(f"{start}image", f"{start}image is missing: kind: {kind} needs it")
    if given.get("python") and given.get("dependencies"):
        yield Fault(f"{start}python", f"{start}python and dependencies exclude each other")
    binds = given.get("binds")
    for bind in binds if isinstance(binds, list) else []:
        if not re.fullmatch(r"/[^:,\s]*(:/[^:,\s]*(:r[ow])?)?", str(bind)):
            yield Fault(
                f"{start}binds", f"{start}binds: {bind!r} is not /PATH, /SOURCE:/TARGET[:ro]"
            )


def variable_faults(variables: Any, key: str) -> Iterator[Fault]:
    """Yield the faults of a block of environment variables that goes into a job script."""
    for name, value in variables.items() if isinstance(variables, dict) else ():
        where = f"{key}.{name}"
        if not VARIABLE.match(str(name)):
            yield Fault(where, f"{key} contains {name!r}, which is not a valid variable name")
        elif _SECRET.search(str(name)):
            yield Fault(
                where,
                f"{key} sets {name}, and others may read a job script: keep secrets out of it; "
                "name it under secrets: in a recipe; the hub's token is read from HF_TOKEN_PATH or "
                "its own login",
            )
        # srun's own variables are options that a site may need.
        elif owned_variables([name]) and not (key == "environment" and name.startswith("SRUN_")):
            yield Fault(where, owned_fault(key, name))
        elif value is None:
            yield Fault(
                where, f'{where} has no value: write {name}: "" to set it to an empty string'
            )
        elif isinstance(value, (dict, list)) or not str(value).isprintable():
            yield Fault(where, f"{where} must be one line of text, got {value!r}")


def owned_fault(key: str, name: Any) -> str:
    """Say that a variable of a block is none that it may set."""
    return f"{key} sets {name}, which the job script, Slurm or torchrun sets: choose another name"
