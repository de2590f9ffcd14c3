"""Whose files are used: the user's own, root's, and those of whom the site's file names.

What a run executes is in a folder that colleagues share: code, environments, run directories.
"""

import os
import pwd
import stat
from collections.abc import Iterable
from pathlib import Path

from launcher import paths
from launcher.errors import RunFault


def fault(path: Path, trusted: Iterable[str] = ()) -> str | None:
    """Say why the file at a path is not used; None if nobody else could have put it there.

    Args:
        trusted: names of users whose files are used too.
    """
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a link"
    if not _may_own(found.st_uid, trusted):
        return f"{path} belongs to {owner(found.st_uid)}"
    if found.st_mode & 0o022:
        return f"{path} can be changed by others (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def _may_own(uid: int, trusted: Iterable[str]) -> bool:
    return uid in (0, os.geteuid()) or owner(uid) in trusted


def is_anothers(path: Path) -> bool:
    """Whether the file at a path is another user's; False, too, if this is unknown."""
    try:
        return path.lstat().st_uid != os.geteuid()
    except OSError:
        return False


def remedy(path: Path, site: str, trusted: Iterable[str] = ()) -> str:
    """Say how what fault() refuses is used all the same, by somebody who trusts what it holds."""
    if _may_own(path.lstat().st_uid, trusted):
        return f"chmod go-w {path}"
    return f"name the owner under trusted_users in {paths.CLUSTERS / site}.yaml"


def require(*paths: Path) -> None:
    """Raise RunFault unless all paths are this user's or root's, and no other may write there."""
    if faults := [text for path in paths if (text := fault(path))]:
        raise RunFault([f"{text}: remove it, or set COOKBOOK_ROOT" for text in faults])


def close(*paths: Path, umask: int = 0o022) -> None:
    """Take from new files and folders what a umask forbids: a default ACL comes before it.

    Without one nothing is changed: some filesystems refuse any chmod.
    """
    for path in paths:
        if (mode := path.stat().st_mode) & umask:
            path.chmod(mode & ~umask)


def own_folder(root: Path, name: str) -> Path:
    """Return this user's part of a folder that a group shares, made if it is not there.

    Others may read it. In the folder around it, each may add a part, and nobody moves another's.
    """
    around = root / name
    if not around.is_dir():
        around.mkdir(parents=True, exist_ok=True)
        around.chmod(root.stat().st_mode & 0o2777 | stat.S_ISVTX)
    path = around / str(os.geteuid())
    if not path.is_dir():
        path.mkdir(exist_ok=True)
        # The group stays that of the folder around it.
        path.chmod(around.stat().st_mode & stat.S_ISGID | 0o755)
    require(path)
    return path


def owner(uid: int) -> str:
    """Return a user's name, or the number if the user has none here."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
