"""The virtual environment that jobs use: its packages, and questions to the trainer in it."""

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NamedTuple

from launcher import paths, yamlfile
from runspec import versions

# The oldest driver that runs a CUDA release, by NVIDIA's table of minor version compatibility.
_DRIVER_OF_CUDA = {11: 450, 12: 525, 13: 580}


def python() -> Path:
    """Return the virtual environment's interpreter, whether it exists or not."""
    return paths.venv_root() / "bin" / "python"


def environment() -> dict[str, str]:
    """Return the variables with which one of the kit's own modules runs in it."""
    folders = dict.fromkeys([paths.REPO_ROOT, *(each.parent for each in own_packages().values())])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}


def own_packages() -> dict[str, Path]:
    """Return the user's packages that COOKBOOK_COMPONENTS names and a run has to copy, by name.

    They are looked for here, in PYTHONPATH and in the checkout; any other is installed.
    """
    names = os.environ.get("COOKBOOK_COMPONENTS", "").replace(",", " ").split()
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [Path.cwd(), *(Path(each).absolute() for each in given if each), paths.REPO_ROOT]
    by_name = {}
    for top in dict.fromkeys(name.partition(".")[0] for name in names):
        for name in (folder / file for folder in folders for file in (top, f"{top}.py")):
            if name.is_dir() or name.is_file():
                by_name[name.name] = name
                break
    return by_name


def site_packages() -> Path | None:
    """Return the folder of the packages, None if there is no virtual environment."""
    return next(paths.venv_root().glob("lib/python*/site-packages"), None)


def package_folders(python: Path) -> list[Path]:
    """Return the folders that an interpreter's environment has its packages in, [] if unknown.

    Of an environment that sees those of its base, not all are known.
    """
    root = python.parent.parent
    own, config = next(root.glob("lib/python*/site-packages"), None), root / "pyvenv.cfg"
    text = config.read_text(encoding="utf-8") if config.is_file() else ""
    if own is None or re.search(r"(?m)^include-system-site-packages\s*=\s*true", text):
        return []
    lines = (line for file in own.glob("*.pth") for line in file.read_text("utf-8").splitlines())
    return [own, *(own / line for line in lines if line and not line.startswith(("#", "import ")))]


def torch_folder() -> Path | None:
    """Return the folder of packages that has torch: the environment's, or another Python's.

    setup.sh --torch system writes that one into cookbook-torch.pth.
    """
    folder = site_packages()
    other = folder / "cookbook-torch.pth" if folder else None
    return Path(other.read_text("utf-8").strip()) if other and other.is_file() else folder


def packages() -> dict[str, str]:
    """Return the installed packages and their versions, read from their folders' names."""
    folder, torch = site_packages(), torch_folder()
    records = [*folder.glob("*.dist-info")] if folder else []
    if torch and torch != folder:
        records += torch.glob("torch-*.dist-info")
    pairs = (path.stem.split("-")[:2] for path in sorted(records))
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def other_versions() -> dict[str, str]:
    """Return the installed packages that have not the pinned version, and both, by plain name."""
    text = pins().read_text(encoding="utf-8") if pins().is_file() else ""
    known = re.findall(r"^([A-Za-z0-9._-]+)==([^ ;#\n]+)", text, re.MULTILINE)
    pinned = {plain_name(name): pin for name, pin in known}
    others = {}
    for name, version in packages().items():
        pin = pinned.get(plain_name(name), version)
        # A build's own mark, such as +cpu, says nothing of the version.
        if version.partition("+")[0] != pin.partition("+")[0]:
            others[plain_name(name)] = f"{name} {version} (pinned: {pin})"
    return others


def unsupported() -> list[str]:
    """Return why installed packages cannot run the trainer, one text each."""
    faults = (versions.fault(plain_name(name), version) for name, version in packages().items())
    return [fault for fault in faults if fault]


def pins() -> Path:
    """Return the file of the pinned versions; setup.sh --torch keeps one of its own."""
    own = paths.venv_root() / "constraints.txt"
    return own if own.is_file() else paths.REPO_ROOT / "constraints.txt"


def plain_name(package: str) -> str:
    """Return a package's name as all of its spellings have it."""
    return re.sub(r"[-_.]+", "-", package).lower()


def required(dependency: str) -> str:
    """Return the plain name of the package that a requirement such as trl[vllm]==1.16.0 names."""
    return plain_name(re.split(r"[\[<>=!~; @]", dependency.strip(), maxsplit=1)[0])


def has(dependency: str) -> bool:
    """Whether a requirement's package is installed, in the version that NAME==VERSION names."""
    installed = {plain_name(name): version for name, version in packages().items()}
    version = dependency.partition("==")[2]
    found = installed.get(required(dependency))
    return found is not None and (not version or found.partition("+")[0] == version)


class TorchBuild(NamedTuple):
    """The installed torch: its version, and the CUDA or ROCm version that it is built for."""

    version: str | None
    cuda: str | None
    hip: str | None

    @property
    def platform(self) -> str:
        """What it is built for."""
        if self.cuda:
            return f"CUDA {self.cuda}"
        return f"ROCm {self.hip}" if self.hip else "CPUs"

    @property
    def oldest_driver(self) -> int:
        """The major version of the oldest NVIDIA driver that runs it, 0 if unknown."""
        return _DRIVER_OF_CUDA.get(int(self.cuda.partition(".")[0]), 0) if self.cuda else 0


def torch_build() -> TorchBuild:
    """Return what torch is installed, read without importing it."""
    folder = torch_folder()
    file = folder / "torch" / "version.py" if folder else None
    text = file.read_text(encoding="utf-8") if file and file.is_file() else ""
    values = dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*= '([^']+)'", text, re.MULTILINE))
    return TorchBuild(values.get("__version__"), values.get("cuda"), values.get("hip"))


def ask_trainer(
    module: str,
    configs: Sequence[dict[str, Any]],
    *arguments: str,
    timeout_s: float | None = None,
    variables: Mapping[str, str] | None = None,
) -> CompletedProcess[str]:
    """Run a module in the virtual environment on a train.yaml of each config.

    variables: of its environment, besides this process's.
    OSError if there is no virtual environment; subprocess.TimeoutExpired after timeout_s.
    """
    with tempfile.TemporaryDirectory() as folder:
        names = []
        for number, config in enumerate(configs):
            file = Path(folder) / str(number) / "train.yaml"
            file.parent.mkdir()
            file.write_text(yamlfile.dump(config), encoding="utf-8")
            names.append(str(file))
        return run_module(
            module,
            *names,
            *arguments,
            timeout_s=timeout_s,
            variables={"OMP_NUM_THREADS": "1", **(variables or {})},
        )


def run_module(
    module: str,
    *arguments: str,
    timeout_s: float | None = None,
    variables: Mapping[str, str] | None = None,
) -> CompletedProcess[str]:
    """Run one of the kit's modules in the virtual environment; errors as of ask_trainer."""
    return subprocess.run(
        [str(python()), "-m", module, *arguments],
        cwd=paths.REPO_ROOT,
        env={**environment(), **(variables or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
