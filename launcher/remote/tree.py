"""What a command needs of this machine: the working tree by git's list, and the files it names."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from launcher.errors import UsageFault
from launcher.runs.snapshot import git

# Larger files of the tree are sent only if a command or a recipe names them.
LIMIT_FILE = 10 * 2**20
LIMIT_TREE = 200 * 2**20
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
    cwd: str = "."
    files: dict[str, Path] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def large(self) -> bool:
        """Whether sending it may take long."""
        return any(path.stat().st_size > LIMIT_FILE for path in self.files.values())

    def name(self) -> str:
        """Return a name that any change of a file changes."""
        states = {name: path.stat() for name, path in self.files.items()}
        lines = [
            [name, each.st_size, each.st_mtime_ns, each.st_mode & 0o111]
            for name, each in sorted(states.items())
        ]
        return hashlib.sha256(json.dumps(lines).encode()).hexdigest()

    def elsewhere(self) -> dict[str, str]:
        """Return the files that do not lie in the tree, by their names in what is sent."""
        found = self.files.items()
        return {name: str(path) for name, path in found if name.startswith(f"{_ELSEWHERE}/")}


def collect(argv: list[str]) -> tuple[Tree, list[str]]:
    """Return what a command needs of this machine, and its words with the paths of the cluster.

    The working tree is that of git around the current folder. It is sent if a word of the command
    names a file.

    Raises:
        UsageFault: it is too large.
    """
    here = Path.cwd().resolve()
    top = git(here, "rev-parse", "--show-toplevel")
    tree = Tree(Path(os.fsdecode(top).strip()).resolve() if top else here)
    tree.cwd = here.relative_to(tree.root).as_posix()
    message = [argv[0], *(_sent_word(word, tree) for word in argv[1:])]
    if not tree.files:
        return tree, message
    for path in list(tree.files.values()):
        if path.suffix in _YAML:
            _add_named(path, tree, set())
    if top:
        _add_tree(tree)
    return tree, message


@contextmanager
def staged(files: Mapping[str, Path]) -> Iterator[Path]:
    """Make a folder of links to files: all that rsync sees of this machine."""
    with TemporaryDirectory(prefix="cookbook-") as name:
        for place, path in files.items():
            link = Path(name, place)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
        yield Path(name)


def listed(root: Path) -> dict[str, Path]:
    """Return the files of a working tree that git does not ignore: path in it, and file.

    A link is the file that it leads to, if that lies in the tree.
    """
    output = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard") or b""
    names = sorted({os.fsdecode(each) for each in output.split(b"\0") if each})
    found = {name: (root / name).resolve() for name in names}
    return {name: path for name, path in found.items() if path.is_file() and _inside(path, root)}


def _inside(path: Path, root: Path) -> bool:
    return path.resolve().is_relative_to(root.resolve())


def _add_tree(tree: Tree) -> None:
    total = 0
    for name, path in listed(tree.root).items():
        size = path.stat().st_size
        if name in tree.files:
            continue
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


def _sent_word(word: str, tree: Tree) -> str:
    """Add the file that a word names, and return the word with the file's path on the cluster."""
    name, equals, value = word.partition("=")
    before, given = (f"{name}=", value) if equals else ("", word)
    several = given.startswith("[") and given.endswith("]")
    values = [each.strip() for each in given[1:-1].split(",")] if several else [given]
    sent = [_sent_value(each, tree) for each in values]
    return before + (f"[{','.join(sent)}]" if several else sent[0])


def _sent_value(value: str, tree: Tree) -> str:
    # {out}: where the command writes what this machine gets.
    if not 0 < len(value) < 4000 or value.startswith("{out}/"):
        return value
    path = Path(value).expanduser()
    if not path.exists():
        if path.suffix in _FILES and not path.is_absolute() and "://" not in value:
            tree.left_out.append(f"{value} (not on this machine: it is looked for on the cluster)")
        return value
    whole = path.resolve()
    if path.is_dir():
        if _inside(whole, tree.root) and whole != tree.root.resolve():
            return os.path.relpath(whole, tree.root / tree.cwd)
        # A bare word may be a recipe or a run as well.
        if "/" in value:
            tree.left_out.append(f"{value} (a folder: copy it to the cluster)")
        return value
    lies = Path(os.path.abspath(path)).is_relative_to(tree.root)
    if lies and not _inside(whole, tree.root):
        tree.left_out.append(f"{value} (a link out of {tree.root}: name the file itself, {whole})")
        return value
    if _inside(whole, tree.root):
        name = whole.relative_to(tree.root).as_posix()
    else:
        folder = hashlib.sha256(str(whole.parent).encode()).hexdigest()[:12]
        name = f"{_ELSEWHERE}/{folder}/{whole.name}"
    tree.files[name] = whole
    return os.path.relpath(tree.root / name, tree.root / tree.cwd)


def _add_named(path: Path, tree: Tree, seen: set[Path]) -> None:
    """Add the files of the tree that a YAML file names, and those that these name."""
    if path in seen or path.stat().st_size > _MIB:
        return
    seen.add(path)
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return  # the command itself says what is wrong with it
    for text in _texts(value):
        given = Path(text).expanduser()
        found = [each / given for each in (path.parent, Path.cwd()) if os.path.isfile(each / given)]
        if not found:
            continue
        if given.is_absolute():
            tree.left_out.append(f"{text} (named in {path.name} by a path of this machine)")
        elif not _inside(found[0], tree.root):
            tree.left_out.append(f"{text} (named in {path.name}, outside {tree.root})")
        else:
            whole = found[0].resolve()
            tree.files[whole.relative_to(tree.root).as_posix()] = whole
            if whole.suffix in _YAML:
                _add_named(whole, tree, seen)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a document that may be names of files."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)
    elif isinstance(value, str) and 0 < len(value) < 1000 and not {"\n", "\0"} & set(value):
        yield value.partition(":")[2] if value.startswith(("script:", "command:")) else value
