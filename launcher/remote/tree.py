"""What a command needs of this machine: the working tree by git's list, and the files it names."""

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from launcher.errors import UsageFault
from launcher.remote import wire
from launcher.remote.ssh import Session
from launcher.runs.code import ORIGIN, git_state
from launcher.runs.snapshot import git

# Larger files of the tree are sent only if a command or a recipe names them.
LIMIT_FILE = 10 * 2**20
LIMIT_TREE = 200 * 2**20
LIMIT_NAMED = 4 * 2**30
# In the sent tree, files that lie elsewhere on this machine.
_ELSEWHERE = ".elsewhere"
_YAML = (".yaml", ".yml")
# A word that ends so and names nothing here is mistyped, or a file of the cluster.
_FILES = (*_YAML, ".csv", ".json", ".jsonl", ".parquet", ".py")
_MIB = 2**20


@dataclass
class Tree:
    """Files to send, by their path in the tree; where in it the command runs; what stays here."""

    root: Path
    whole: bool = False
    kit: bool = False
    cwd: str = "."
    files: dict[str, Path] = field(default_factory=dict)
    texts: dict[str, bytes] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    _hashes: dict[str, tuple[str, bool]] = field(default_factory=dict)

    def entries(self) -> list[tuple[str, str, bool]]:
        """Return path, SHA-256 and whether it may be executed, of each file."""
        for name, path in self.files.items():
            with open(path, "rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            self._hashes[name] = sha256, os.name != "nt" and os.access(path, os.X_OK)
        for name, text in self.texts.items():
            self._hashes[name] = hashlib.sha256(text).hexdigest(), False
        return sorted((name, *each) for name, each in self._hashes.items())

    def elsewhere(self) -> list[tuple[str, Path]]:
        """Return the files that do not lie in the tree, with their names in what is sent."""
        return [each for each in self.files.items() if each[0].startswith(f"{_ELSEWHERE}/")]

    def send(self, session: Session, missing: dict[str, int], say: Callable[[str], None]) -> None:
        """Send the contents that the cluster lacks, each from the byte on that it has."""
        sources = {sha256: name for name, (sha256, _) in self._hashes.items()}
        total = 0
        for sha256, offset in missing.items():
            name = sources[sha256]
            text = self.texts.get(name)
            size = len(text) if text is not None else self.files[name].stat().st_size
            at = offset if offset <= size else 0
            total += size - at
            while True:
                data = (
                    text[at : at + wire.CHUNK] if text is not None else _part(self.files[name], at)
                )
                last = at + len(data) >= size
                header = {"sha256": sha256, "offset": at, "last": last}
                session.send(header, zlib.compress(data, 1))
                at += len(data)
                if last or not data:
                    break
        session.send({"all": True})
        changed = [name for name in sorted(self._hashes) if self._hashes[name][0] in missing]
        few = f": {', '.join(changed)}" if len(changed) <= 3 else ""
        say(f"sent {len(changed):,} of {len(self._hashes):,} files, {total / _MIB:.1f} MiB{few}")


def _part(path: Path, start: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(wire.CHUNK)


def collect(argv: list[str]) -> tuple[Tree, list[str]]:
    """Return what a command needs of this machine, and its words with the paths of the cluster.

    The working tree is that of git around the current folder. It is sent if it is the kit's own,
    or if a word of the command names a file.

    Raises:
        UsageFault: it is too large.
    """
    here = Path.cwd()
    top = git(here, "rev-parse", "--show-toplevel")
    tree = Tree(Path(top.decode().strip()).resolve() if top else here.resolve(), bool(top))
    tree.kit = tree.whole and all(
        (tree.root / part).exists() for part in ("setup.sh", "launcher/cli", "trainer", "slurm")
    )
    tree.cwd = here.resolve().relative_to(tree.root).as_posix()
    message = [argv[0], *(_sent_word(word, tree) for word in argv[1:])]
    named = dict(tree.files)
    if not (tree.kit or named):
        return tree, message
    for path in list(named.values()):
        if path.suffix in _YAML:
            _add_named(path, tree, set())
    named = dict(tree.files)
    if tree.whole:
        _add_tree(tree)
    large = sum(path.stat().st_size for path in named.values())
    if large > LIMIT_NAMED:
        raise UsageFault(
            f"the files that the command names have {large / 2**30:.1f} GiB, but at most "
            f"{LIMIT_NAMED >> 30} GiB are sent: copy them to the cluster with rsync or scp, and "
            "name them by their path there"
        )
    return tree, message


def listed(folder: Path) -> list[str] | None:
    """Return the files of a working tree that git does not ignore; None if it is none."""
    output = git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if output is None:
        return None
    return sorted({os.fsdecode(each) for each in output.split(b"\0") if each})


def _add_tree(tree: Tree) -> None:
    total = 0
    for name in listed(tree.root) or []:
        path = tree.root / name
        if not path.is_file() or name in tree.files:
            continue
        size = path.stat().st_size
        if size > LIMIT_FILE:
            limit = f"above {LIMIT_FILE >> 20} MiB only files that are named are sent"
            tree.left_out.append(f"{name} ({size / _MIB:.1f} MiB; {limit})")
            continue
        tree.files[name] = path
        total += size
    if total > LIMIT_TREE:
        largest = max(tree.files, key=lambda each: tree.files[each].stat().st_size)
        raise UsageFault(
            f"the working tree {tree.root} has {total / _MIB:.0f} MiB, but at most "
            f"{LIMIT_TREE >> 20} MiB are sent; the largest file is {largest}: add what is no code "
            "to .gitignore"
        )
    if tree.kit:
        tree.texts[ORIGIN] = json.dumps(git_state(tree.root)).encode()


def _sent_word(word: str, tree: Tree) -> str:
    """Add the file that a word names, and return the word with the file's path on the cluster."""
    name, equals, value = word.partition("=")
    before, given = (f"{name}=", value) if equals else ("", word)
    several = given.startswith("[") and given.endswith("]")
    values = [each.strip() for each in given[1:-1].split(",")] if several else [given]
    sent = [_sent_value(each, tree) for each in values]
    return before + (f"[{','.join(sent)}]" if several else sent[0])


def _sent_value(value: str, tree: Tree) -> str:
    path = Path(value).expanduser() if value else None
    # {out}: where the command writes what this machine gets.
    if path is None or len(value) > 4000 or value.startswith("{out}/"):
        return value
    if not path.exists():
        if path.suffix in _FILES and not path.is_absolute() and "://" not in value:
            tree.left_out.append(f"{value} (not on this machine: it is looked for on the cluster)")
        return value
    if path.is_dir():
        inside = path.resolve().is_relative_to(tree.root)
        if not inside or path.resolve() == tree.root:
            # A bare word may be a recipe or a run as well.
            if "/" in value or "\\" in value:
                tree.left_out.append(f"{value} (a folder: copy it to the cluster)")
            return value
        return _from_cwd(path.resolve().relative_to(tree.root).as_posix(), tree)
    return _from_cwd(_place(path, tree), tree)


def _place(path: Path, tree: Tree) -> str:
    """Add a file and return its path in the sent tree."""
    whole = path.resolve()
    if whole.is_relative_to(tree.root):
        name = whole.relative_to(tree.root).as_posix()
    else:
        folder = hashlib.sha256(str(whole.parent).encode()).hexdigest()[:12]
        name = f"{_ELSEWHERE}/{folder}/{whole.name}"
    tree.files[name] = whole
    return name


def _from_cwd(name: str, tree: Tree) -> str:
    """Return a path in the tree as seen from the folder in which the command runs."""
    ups = 0 if tree.cwd == "." else len(PurePosixPath(tree.cwd).parts)
    if tree.cwd != "." and name.startswith(f"{tree.cwd}/"):
        return name[len(tree.cwd) + 1 :]
    return "/".join([".."] * ups + [name])


def _add_named(path: Path, tree: Tree, seen: set[Path]) -> None:
    """Add the files that a YAML file names, and those that these name."""
    if path in seen or path.stat().st_size > _MIB:
        return
    seen.add(path)
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return  # the command itself says what is wrong with it
    for text in _texts(value):
        for folder in dict.fromkeys((path.parent, Path.cwd())):
            named = folder / Path(text).expanduser()
            try:
                if not named.is_file():
                    continue
            except (OSError, ValueError):
                continue
            if Path(text).expanduser().is_absolute():
                tree.left_out.append(f"{text} (named in {path.name} by a path of this machine)")
            elif named.resolve().is_relative_to(tree.root):
                _place(named, tree)
                if named.suffix in _YAML:
                    _add_named(named.resolve(), tree, seen)
            else:
                tree.left_out.append(f"{text} (named in {path.name}, outside {tree.root})")
            break


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a document that may be names of files."""
    if isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str) and 0 < len(value) < 1000 and "\n" not in value:
        yield value.partition(":")[2] if value.startswith(("script:", "command:")) else value
