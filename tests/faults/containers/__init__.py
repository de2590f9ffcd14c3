"""Apptainer and Pyxis for the tests: a program and a plugin that enter the files of a folder.

Both need root and gcc, the plugin also the headers of Debian's libslurm-dev.
"""

import shutil
import subprocess
from pathlib import Path

SPANK = Path("/usr/include/slurm/spank.h")


def make(place: Path) -> None:
    """Make bin/apptainer, and image, into which /usr has to be bound, in a folder."""
    image = place / "image"
    for folder in (place / "bin", image / "usr", image / "etc"):
        folder.mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (image / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group"):
        shutil.copy(f"/etc/{name}", image / "etc")
    _compile("apptainer.c", place / "bin/apptainer")


def plugin(place: Path) -> Path:
    """Make the plugin in a folder; return the file for PlugStackConfig."""
    _compile("pyxis.c", place / "pyxis.so", "-shared", "-fPIC")
    stack = place / "plugstack.conf"
    stack.write_text(f"required {place}/pyxis.so\n")
    return stack


def _compile(source: str, target: Path, *options: str) -> None:
    argv = ["gcc", "-O1", *options, "-o", str(target), str(Path(__file__).with_name(source))]
    subprocess.run(argv, check=True)
