"""The kit's own code as a part of a run: a copy by content, shared by a user's runs that have it.

A change in the checkout reaches no run that is queued, retried or resumed.
"""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import paths
from launcher.errors import RunFault
from launcher.run import trust
from launcher.run.snapshot import git
from runspec import files, publish

# What jobs run, and what submits them again: cookbook replay.
_PARTS = ("configs", "launcher", "plugins", "runspec", "slurm", "templates", "trainer")
FOLDER = "code"
# In a copy: where it comes from.
ORIGIN = "origin.json"
_SHOWN_OF_HASH = 12


@dataclass(frozen=True)
class Code:
    """A copy of the kit's code: its folder, whose name is the hash of its content."""

    folder: Path

    @property
    def sha256(self) -> str:
        return self.folder.name

    @property
    def origin(self) -> dict[str, Any]:
        """The commit that it was made of, what had changed since, and untracked files."""
        return files.peek(self.folder / ORIGIN)

    @property
    def title(self) -> str:
        """How people recognise it: its hash, and the commit it was made of."""
        origin = self.origin
        commit, changed = origin.get("commit"), origin.get("diff") or origin.get("untracked")
        of = f" (commit {str(commit)[:_SHOWN_OF_HASH]}{' with changes' * bool(changed)})"
        return f"{self.sha256[:_SHOWN_OF_HASH]}{of if commit else ''}"


def of_run(run_dir: Path) -> Code | None:
    """Return the code that a run uses; None if it has no copy or the copy was removed.

    Raises:
        OSError: that cannot be read.
    """
    try:
        folder = (run_dir / files.KIT).resolve(strict=True)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Code(folder)


def present(root: Path) -> Code:
    """Return this user's copy of the present code, made if it is not there; the group may read it.

    Raises:
        RunFault: it cannot be read or written, or others could have changed it.
    """
    before = os.umask(0o027)
    try:
        return _kept(trust.own_folder(root, FOLDER), _content(paths.REPO_ROOT))
    except OSError as error:
        raise RunFault(
            f"cannot copy the kit's code to {root / FOLDER}: {error.filename or ''}: "
            f"{error.strerror or error}: check the disk, or set COOKBOOK_ROOT"
        ) from error
    finally:
        os.umask(before)


def present_sha256() -> str:
    """Return the hash that a copy of the present code has."""
    return _hash(_content(paths.REPO_ROOT))


def require(copy: Code, trusted: Iterable[str] = ()) -> None:
    """Raise RunFault unless a copy is what its name says, and nobody else could change it.

    Args:
        trusted: names of users whose copies are used too.
    """
    places = [copy.folder.parent, copy.folder]
    for folder, folders, names in os.walk(copy.folder):
        places += [Path(folder, name) for name in (*folders, *names)]
    faults = [text for place in places if (text := trust.fault(place, trusted))][:1]
    other = {each.name for each in copy.folder.iterdir()} - {*_PARTS, ORIGIN}
    if other or _hash(_content(copy.folder)) != copy.sha256:
        faults.append(f"{copy.folder} is not the code that its name says")
    if faults:
        raise RunFault(
            f"{'; '.join(faults)}: remove {copy.folder}; a run that uses it goes on with the "
            "present code by: cookbook resume RUN --code current"
        )


def _content(root: Path) -> dict[str, bytes]:
    """Return the files of the kit's code by path; settings of sites are left out."""
    content = {}
    for part in _PARTS:
        for folder, folders, names in os.walk(root / part):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            place = Path(folder)
            if place in (paths.CLUSTERS, paths.OWN_CLUSTERS):
                continue
            for name in sorted(names):
                path = place / name
                content[str(path.relative_to(root))] = path.read_bytes()
    return content


def _hash(content: dict[str, bytes]) -> str:
    lines = (f"{name} {hashlib.sha256(text).hexdigest()}\n" for name, text in content.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _kept(folder: Path, content: dict[str, bytes]) -> Code:
    sha256 = _hash(content)
    final = folder / sha256
    if final.is_dir():
        require(Code(final))
        return Code(final)
    with publish.folder(final, "keep") as temporary:
        for name, text in content.items():
            place = (temporary / name).parent
            # Python in a job would make its folder by the umask there, which may be wider.
            own = place / "__pycache__" if name.endswith(".py") else place
            own.mkdir(parents=True, exist_ok=True)
            (temporary / name).write_bytes(text)
        files.write_json(temporary / ORIGIN, git_state())
        trust.close(temporary, *temporary.rglob("*"))
    return Code(final)


def link(run_dir: Path, code: Code) -> None:
    """Let a run use a copy of the code, atomically."""
    publish.link(run_dir / files.KIT, code.folder)


def git_state() -> dict[str, Any]:
    """Return the commit of the kit's checkout, and what changed since, as a diff.

    A copy, from which cookbook replay submits or which a laptop sent, says where it comes from.
    """
    folder = paths.REPO_ROOT
    if (known := files.read_object(folder / ORIGIN)) is not None:
        return known
    commit, diff = git(folder, "rev-parse", "HEAD"), git(folder, "diff", "HEAD")
    untracked = git(folder, "ls-files", "--others", "--exclude-standard")
    return {
        "commit": commit.decode().strip() if commit else None,
        "diff": (diff or b"").decode(errors="replace"),
        "untracked": (untracked or b"").decode(errors="replace").splitlines(),
    }
