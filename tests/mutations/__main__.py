"""Shows that the tests see deliberate faults: python -m tests.mutations [--jobs N] [PATCH ...]

Each tests/mutations/*.patch puts one fault into a copy of this checkout, uncommitted changes
included, and the tests that its header names must fail there:

    # fault: the gradient norm leaves the other ranks out
    # tests: tests/trainer/test_layouts.py -k "curve and full"

The same tests must pass without the fault. A patch that does not apply, or tests that cannot be
collected, are errors. The exit status is 1 unless every fault is caught.
"""

from __future__ import annotations

import argparse
import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
LIMIT_S = 900
# The exit statuses of pytest.
PASSED, FAILED = 0, 1


@dataclass(frozen=True)
class Patch:
    """A patch file: its fault in words, and what pytest is given to find it."""

    path: Path
    fault: str
    tests: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Patch:
        """Raises ValueError if the header lacks a line."""
        lines = [line for line in path.read_text().splitlines() if line.startswith("# ")]
        header = dict(line[2:].split(": ", 1) for line in lines if ": " in line)
        if missing := {"fault", "tests"} - header.keys():
            raise ValueError(f"{path.name} lacks the line '# {min(missing)}: ...'")
        return cls(path.resolve(), header["fault"], tuple(shlex.split(header["tests"])))


def apply(patch: Path, tree: Path, *options: str) -> str:
    """Apply a patch with `git apply`; returns what git says if it does not apply, else ''."""
    command = ["git", "apply", *options, str(patch)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""


def copy_checkout(tree: Path) -> None:
    """Clone the checkout, then copy every file that git tracks or would track as it is now."""
    # Some tests ask git what there is, and provenance asks for the commit.
    for command in (["clone", "--quiet", "--shared", "--no-checkout", ROOT, tree], ["reset", "-q"]):
        subprocess.run(["git", *command], cwd=tree if tree.exists() else ROOT, check=True)
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
    )
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def run_tests(tree: Path, tests: tuple[str, ...]) -> int:
    """Run pytest in a copy; returns its exit status, or -1 after LIMIT_S seconds."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider"]
    # A mutated file may have the size and the time of the one before: no compiled code is kept.
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return subprocess.run(
            [*command, "-m", "long or not long", *tests],
            cwd=tree,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_S,
        ).returncode
    except subprocess.TimeoutExpired:
        return -1


def verdict(patch: Patch, tree: Path, clean: dict[tuple[str, ...], int]) -> str:
    """What becomes of one fault: 'caught', 'NOT CAUGHT' or what stands in the way."""
    if said := apply(patch.path, tree, "--check"):
        return f"ERROR: does not apply: {said.splitlines()[0]}"
    if patch.tests not in clean:
        clean[patch.tests] = run_tests(tree, patch.tests)
    if clean[patch.tests] != PASSED:
        return f"ERROR: without the fault pytest ends with status {clean[patch.tests]}"
    apply(patch.path, tree)
    try:
        status = run_tests(tree, patch.tests)
    finally:
        apply(patch.path, tree, "--reverse")
    if status in (PASSED, FAILED):
        return "caught" if status == FAILED else "NOT CAUGHT"
    return f"ERROR: with the fault pytest ends with status {status}"


def main(arguments: list[str]) -> int:
    """Run the command; exit status 0 if every fault is caught, 1 otherwise, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("patches", nargs="*", type=Path, metavar="PATCH", help="default: all")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time, each in a copy (1)")
    options = parser.parse_args(arguments)
    try:
        patches = [Patch.read(path) for path in options.patches or sorted(FOLDER.glob("*.patch"))]
    except (OSError, ValueError) as fault:
        parser.error(str(fault))

    clean: dict[tuple[str, ...], int] = {}
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
    missed = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        for number in range(options.jobs):
            copy_checkout(Path(folder) / str(number))
            copies.put(Path(folder) / str(number))

        def judge(patch: Patch) -> tuple[str, float]:
            tree, started = copies.get(), time.monotonic()
            try:
                return verdict(patch, tree, clean), time.monotonic() - started
            finally:
                copies.put(tree)

        with ThreadPoolExecutor(options.jobs) as pool:
            for patch, (found, seconds) in zip(patches, pool.map(judge, patches), strict=True):
                missed += found != "caught"
                print(f"{found:10}  {seconds:4.0f} s  {patch.path.stem}: {patch.fault}", flush=True)
    print(f"{len(patches) - missed} of {len(patches)} faults are caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
