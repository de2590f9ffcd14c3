"""What jobs start from as two files, which each node mounts: <shared folder>/images/*.sqsh.

Each process of a job opens thousands of small files: the virtual environment's and the kit's own.
On a network filesystem each costs a round trip to its metadata server, for every rank. From a
mounted image they cost none: a node opens two files there.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from launcher import paths, venv
from launcher.errors import PreflightFault
from launcher.recipes.recipe import Recipe
from launcher.runs import lock
from launcher.runs.code import Code
from launcher.site import Site

FOLDER, SUFFIX = "images", ".sqsh"
_WAIT_S = 3600.0
# Packages of the distribution are on each node's own disk.
_LOCAL = (Path("/usr"), Path("/opt"))
# A node reads whole blocks: more reads of smaller ones, or more bytes of larger ones.
_BLOCK = "256K"
# Priorities of mksquashfs.
_HIGHEST = 32767
# Python's own tests are never imported.
_LEFT_OUT = ("test", "idlelib", "turtledemo")


def is_used(site: Site, recipe: Recipe) -> bool:
    """Whether the nodes of a run start from images: not what an environment of its own needs."""
    return site.start_from == "image" and recipe.environment is None


def environment_file(root: Path) -> Path:
    """Return the image of the virtual environment as it is now, whether it is there or not."""
    return root / FOLDER / f"environment-{_digest(paths.venv_root())}{SUFFIX}"


@cache
def _digest(environment: Path) -> str:
    """The installed packages' hash; a sweep renders many scripts of one environment."""
    digest = hashlib.sha256()
    records = sorted(environment.glob("lib/python*/site-packages/*.dist-info/RECORD"))
    for file in (environment / "pyvenv.cfg", *records):
        digest.update(
            f"{file.parent.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode()
        )
    return digest.hexdigest()[:16]


def code_file(root: Path, code: Code) -> Path:
    """Return the image of a copy of the kit's code, whether it is there or not."""
    return root / FOLDER / f"code-{code.folder.name}{SUFFIX}"


def ensure(root: Path, code: Code, say: Callable[[str], None]) -> None:
    """Make both images unless they are there; another command that needs them meanwhile waits.

    Raises:
        PreflightFault: squashfs-tools is missing, the disk is full, a folder cannot be read.
    """
    folder = root / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("a+", encoding="utf-8") as file:
            lock.take(file, _WAIT_S, lambda who: say(f"waiting for images that {who} makes"))
            _make(environment_file(root), lambda target, own: _environment(target, own, say), say)
            _make(code_file(root, code), lambda target, own: _code(code, target, own, say), say)
    except lock.Held as error:
        raise PreflightFault(
            f"{folder} is locked by {error}: try again when it has ended"
        ) from error
    except OSError as error:
        raise PreflightFault(
            f"cannot make an image in {folder}: {error.strerror or error}: check the disk, or set "
            "start_from: shared in the site's file"
        ) from error


def _make(file: Path, fill: Callable[[Path, Path], None], say: Callable[[str], None]) -> None:
    if file.is_file():
        file.touch()
        return
    began = time.monotonic()
    say(f"making {file.name}, which nodes mount instead of opening its files one by one")
    with tempfile.TemporaryDirectory(prefix=".making-", dir=file.parent) as folder:
        own = Path(folder)
        fill(own / file.name, own)
        (own / file.name).chmod(0o640)
        os.replace(own / file.name, file)
    say(f"made in {time.monotonic() - began:.0f} s: {file.stat().st_size / 2**20:,.0f} MiB")


def _environment(target: Path, own: Path, say: Callable[[str], None]) -> None:
    """Write the environment and, if it is on a shared filesystem, the Python that it was made with.

    A node may mount them anywhere: without `home` in pyvenv.cfg, Python finds its library beside
    itself, behind a symbolic link that leads from one to the other.
    """
    root = paths.venv_root().resolve()
    program = (root / "bin" / "python").resolve()
    base = program.parents[1]
    if any(base.is_relative_to(place) for place in _LOCAL):
        _squash([str(root)], target, order=_order(own, say, root))
        return
    config = own / "config" / "pyvenv"
    config.parent.mkdir()
    lines = (root / "pyvenv.cfg").read_text(encoding="utf-8").splitlines(keepends=True)
    config.write_text("".join(line for line in lines if not line.startswith("home")), "utf-8")
    pythons = [path.name for path in (root / "bin").glob("python*") if path.is_symlink()]
    left_out = [str(root / "pyvenv.cfg"), *(str(root / "bin" / name) for name in pythons)]
    left_out += [str(base / "lib" / program.name / name) for name in _LEFT_OUT]
    # mksquashfs 4.5 with -sort would read the file that is left out, not one that is added by -p.
    name = _escaped(root.name)
    added = [f"{name}/pyvenv.cfg s 0777 0 0 ../{config.parent.name}/{config.name}"]
    link = f"../../{base.name}/bin/{program.name}"
    added += [f"{name}/bin/{each} s 0777 0 0 {link}" for each in pythons]
    sources = [str(root), str(base), str(config.parent)]
    _squash(sources, target, left_out, added, _order(own, say, root, base))


def _order(own: Path, say: Callable[[str], None], *sources: Path) -> Path | None:
    """Write which files most runs use, the first with the highest priority.

    They lie next to each other in an image, so that fewer blocks of it are read. None if that
    cannot be found out.
    """
    argv = [str(venv.python()), "-P", "-m", "trainer.imports"]
    env = os.environ | {"PYTHONPATH": str(paths.REPO_ROOT)}
    done = subprocess.run(
        argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    found = [Path(line).resolve() for line in done.stdout.splitlines()]
    inside = [path for path in found if path.is_file() and any(map(path.is_relative_to, sources))]
    if not inside:
        told = [f"exit status {done.returncode}", *done.stderr.splitlines()][-1]
        say(
            "warning: its files are not in the order of their use, so that nodes read more of it: "
            f"python -m trainer.imports: {told}"
        )
        return None
    names = [_escaped(str(path)) for path in inside]
    lines = [f"{name} {_HIGHEST - min(number, _HIGHEST)}\n" for number, name in enumerate(names)]
    order = own / "order"
    order.write_text("".join(lines), encoding="utf-8")
    return order


def _escaped(path: str) -> str:
    """Return a path as mksquashfs reads it, with its blanks."""
    return re.sub(r"([\\\s])", r"\\\1", path)


def _code(code: Code, target: Path, own: Path, say: Callable[[str], None]) -> None:
    # Compiled in a copy: a folder of code is as it was submitted.
    copy = own / "code"
    shutil.copytree(code.folder, copy)
    argv = [str(venv.python()), "-m", "compileall", "-q", "-j0"]
    done = subprocess.run(
        [*argv, "--invalidation-mode", "unchecked-hash", str(copy)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        lines = (done.stdout + done.stderr).split("\n")
        told = [f"exit status {done.returncode}", *filter(str.strip, lines)][-1].strip()
        say(f"warning: some modules are compiled at each start: python -m compileall: {told}")
    _squash([str(copy)], target)


def _squash(
    sources: Sequence[str],
    target: Path,
    left_out: Sequence[str] = (),
    added: Sequence[str] = (),
    order: Path | None = None,
) -> None:
    program = shutil.which("mksquashfs") or shutil.which("mksquashfs", path="/usr/sbin:/sbin")
    if program is None:
        raise PreflightFault(
            "start_from: image needs mksquashfs on this machine: install squashfs-tools (4.5 or "
            "newer), or set start_from: shared in the site's file"
        )
    argv = [program, *sources, str(target), "-comp", "zstd", "-Xcompression-level", "3"]
    argv += ["-b", _BLOCK, "-no-xattrs", "-all-root", "-no-progress", "-quiet", "-exit-on-error"]
    argv += ["-sort", str(order)] if order else []
    for each in added:
        argv += ["-p", each]
    argv += ["-e", *left_out] if left_out else []
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        lines = [*filter(None, re.split(r"[\r\n]+", done.stderr)), "no message"]
        raise PreflightFault(
            f"mksquashfs: {lines[0].strip()}: an image needs squashfs-tools 4.5 or newer and "
            f"room in {target.parent.parent}; or set start_from: shared in the site's file"
        )
