"""Whose files are used: the user's own, root's, and those of whom the site's file names."""

import os
import stat
from pathlib import Path

from launcher.errors import UsageFault


def require(path: Path) -> None:
    """Raise UsageFault unless a path is this user's own, and no other may write there."""
    found = path.lstat()
    if found.st_uid != os.getuid() or stat.S_ISLNK(found.st_mode) or found.st_mode & 0o022:
        raise UsageFault(
            f"{path} is not yours alone (owner {found.st_uid}, mode {found.st_mode & 0o777:o}): "
            "remove it, or set COOKBOOK_ROOT to another folder"
        )
