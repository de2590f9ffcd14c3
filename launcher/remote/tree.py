"""What a command needs of this machine: the working tree by git's list, and the files it names.

Files lie on the cluster below one folder by their whole paths here, so that relative paths between
them stay as they are.
"""

import hashlib
import json
import os
import re
from pathlib import Path

from launcher.run.snapshot import git

# Larger files of the tree are sent only if a command or a recipe names them.
_LIMIT = 10 * 2**20


class Tree:
    """Files to send, and the command's words with paths that hold there.

    The working tree is that of git around the current folder. It is sent if a word of the command
    names a file.
    """

    def __init__(self, argv: list[str]) -> None:
        self.here = Path.cwd().resolve()
        top = git(self.here, "rev-parse", "--show-toplevel")
        self.root = Path(os.fsdecode(top).strip()).resolve() if top else self.here
        self.files: set[Path] = set()
        self.left_out: list[str] = []
        self.words = [*argv[:1], *map(self._word, argv[1:])]
        for name in listed(self.root) if self.files else ():
            path = self.root / name
            if path.lstat().st_size <= _LIMIT:
                self.files.add(path)
            elif path not in self.files:
                self.left_out.append(f"{name} (above {_LIMIT >> 20} MiB: name the file itself)")

    def name(self) -> str:
        """Return a name that any change of a file changes."""
        states = [(str(path), path.lstat()) for path in sorted(self.files)]
        lines = [[name, s.st_size, s.st_mtime_ns, s.st_mode] for name, s in states]
        return hashlib.sha256(json.dumps(lines).encode()).hexdigest()

    def _word(self, word: str) -> str:
        """Add the files that a word names, and return it with their paths from the folder here."""
        name, equals, value = word.rpartition("=")
        for text in re.findall(r"[^][,\s][^][,]*", value):
            if path := self._add(text, self.here, typed=True):
                value = value.replace(text, os.path.relpath(path, self.here))
        return f"{name}{equals}{value}"

    def _add(self, text: str, folder: Path, typed: bool = False) -> Path | None:
        """Add a file by its name below a folder, if it is one, and the files that it names if it
        is YAML; return its path.

        A link of the tree is never followed out of it. A name in a file leads nowhere else either.
        """
        given = Path(os.path.abspath(folder / Path(text).expanduser()))
        if not os.path.isfile(given):
            return None
        path = given.resolve()
        outside = not path.is_relative_to(self.root)
        if outside and (not typed or given.is_relative_to(self.root)):
            self.left_out.append(f"{text} (outside {self.root}: name the file itself, {path})")
            return None
        if path not in self.files:
            self.files.add(path)
            if path.suffix in (".yaml", ".yml") and path.stat().st_size <= 2**20:
                content = path.read_text(encoding="utf-8", errors="replace")
                for each in re.findall(r"[^][{}:,\s\"']+", content):
                    _ = self._add(each, path.parent) or self._add(each, self.here)
        return path


def listed(root: Path) -> list[str]:
    """Return the files and links of a working tree that git does not ignore, by their names."""
    output = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard") or b""
    names = [os.fsdecode(name) for name in sorted({*output.split(b"\0")}) if name]
    return [name for name in names if os.path.isfile(root / name) or os.path.islink(root / name)]
