"""Make the folder of what a laptop sends: python -m launcher.remote.sent TREE, called by ssh.

It prints the folder, and the names of the last ones, in which rsync looks for unchanged files. Only
this user enters them, by the mode of the folder around: by a umask, all that a command makes there
would be private too.
"""

import json
import os
import sys

from launcher import paths
from launcher import site as sites
from launcher.errors import CookbookError
from launcher.run import trust


def main() -> None:
    """Make the folder of a tree of this name."""
    root = sites.load(None).root
    root.mkdir(parents=True, exist_ok=True)
    around = paths.sent(root)
    around.mkdir(mode=0o700, exist_ok=True)
    trust.require(around)
    tree = around / "trees" / sys.argv[1]
    last = sorted(tree.parent.glob("[0-9a-f]*"), key=os.path.getmtime)[-5:]
    tree.mkdir(parents=True, exist_ok=True)
    os.utime(tree)
    print(json.dumps([str(tree), *(each.name for each in last)]))


if __name__ == "__main__":
    try:
        main()
    except CookbookError as error:
        sys.exit(f"error: {error}")
