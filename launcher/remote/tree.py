"""What a command needs of this machine: the working tree by git's list, and the files it names.

Files lie on the cluster below one folder by their whole paths here, so that relative paths between
them stay as they are.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from launcher.runs.snapshot import git

# Larger files of the tree are sent only if a command or a recipe names them.
_LIMIT = 10 * 2**20
_YAML = (".yaml", ".yml")


@dataclass
class Tree:
    """Files to send, of a working tree and named ones, and what is left out."""

    here: Path
    root: Path
    files: set[Path] = field(default_factory=set)
    left_out: list[str] = field(default_factory=list)

    def name(self) -> str:
        """Return a name that any change of a file changes; empty if there is nothing to send."""
        states = [(str(path), path.stat()) for path in sorted(self.files)]
        lines = [[name, s.st_size, s.st_mtime_ns, s.st_mode & 0o111] for name, s in states]
        return hashlib.sha256(json.dumps(lines).encode()).hexdigest() if lines else ""

    def holds(self, path: Path) -> bool:
        """Whether a file is in the working tree, also after its links are followed."""
        return path.resolve().is_relative_to(self.root)


def collect(argv: list[str]) -> tuple[Tree, list[str]]:
    """Return what a command needs of this machine, and its words with paths that hold there.

    The working tree is that of git around the current folder. It is sent if a word of the command
    names a file.
    """
    here = Path.cwd().resolve()
    top = git(here, "rev-parse", "--show-toplevel")
    tree = Tree(here, Path(os.fsdecode(top).strip()).resolve() if top else here)
    words = [argv[0], *(_word(word, tree) for word in argv[1:])]
    for path in list(tree.files):
        _add_named(path, tree)
    for path in listed(tree.root) if tree.files else ():
        size = path.stat().st_size
        if size <= _LIMIT:
            tree.files.add(path)
        elif path not in tree.files:
            limit = f"above {_LIMIT >> 20} MiB only files that are named are sent"
            name = path.relative_to(tree.root)
            tree.left_out.append(f"{name} ({size / 2**20:.1f} MiB; {limit})")
    return tree, words


def listed(root: Path) -> list[Path]:
    """Return the files of a working tree that git does not ignore, without links out of it."""
    output = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard") or b""
    found = [root / os.fsdecode(name) for name in sorted({*output.split(b"\0")}) if name]
    return [each for each in found if each.is_file() and each.resolve().is_relative_to(root)]


def _word(word: str, tree: Tree) -> str:
    """Add the files that a word names, and return it with their paths from the current folder."""
    name, equals, value = word.rpartition("=")
    several = value.startswith("[") and value.endswith("]")
    if not several:
        return f"{name}{equals}{_value(value, tree)}"
    sent = [_value(each.strip(), tree) for each in value[1:-1].split(",")]
    return f"{name}{equals}[{','.join(sent)}]"


def _value(value: str, tree: Tree) -> str:
    path = Path(value).expanduser()
    if not 0 < len(value) < 4000 or not path.exists():
        return value
    given, whole = Path(os.path.abspath(path)), path.resolve()
    if path.is_dir():
        return os.path.relpath(whole, tree.here) if tree.root in whole.parents else value
    if given.is_relative_to(tree.root) and not tree.holds(path):
        tree.left_out.append(f"{value} (a link out of {tree.root}: name the file itself, {whole})")
        return value
    tree.files.add(whole)
    return os.path.relpath(whole, tree.here)


def _add_named(file: Path, tree: Tree) -> None:
    """Add the files of the tree that a YAML file names, and those that these name."""
    if file.suffix not in _YAML or file.stat().st_size > 2**20:
        return
    try:
        value = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return  # the command itself says what is wrong with it
    for text in _texts(value):
        found = [path for each in (file.parent, tree.here) if os.path.isfile(path := each / text)]
        if found and not tree.holds(found[0]):
            tree.left_out.append(f"{text} (named in {file.name}, outside {tree.root})")
        elif found and (whole := found[0].resolve()) not in tree.files:
            tree.files.add(whole)
            _add_named(whole, tree)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a document that may be names of files."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)
    elif isinstance(value, str) and 0 < len(value) < 1000 and not {"\n", "\0"} & set(value):
        yield value.partition(":")[2] if value.startswith(("script:", "command:")) else value
