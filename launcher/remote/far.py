"""The cluster's side of --host: python -m launcher.remote.far VERSION CLUSTER ..., by ssh.

sent TREE PROJECT               make the folder for what a laptop sends, and tell it
look RUN PART                   tell where a part of a run lies, and on which nodes the run is
run TREE PROJECT CWD WORD...    run a command in that tree
"""

import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher import __version__, paths
from launcher import site as sites
from launcher.cli import main as cookbook
from launcher.errors import CookbookError, RunFault, UsageFault
from launcher.runs import directory, find, trust


def main() -> None:
    """Do what the words say."""
    version, cluster, what, *words = sys.argv[1:]
    try:
        if version != __version__:
            raise UsageFault(
                f"this machine has version {version} of the kit, and the cluster {__version__}: "
                "update the older one; the cluster's with: cookbook init"
            )
        root = sites.load(cluster or None).root
        if what == "run":
            _run(root, *words)
        else:
            answer = {"sent": _sent, "look": _look}[what](root, *words)
            print(json.dumps({**answer, "rsync": shutil.which("rsync") or ""}))
    except CookbookError as error:
        for fault in error.faults:
            print(f"error: {fault}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _tree(root: Path, *names: str) -> Path:
    """Return the folder of a tree, made if it is not there; only this user enters it.

    By the mode of the folder around it: by a umask, all that a command makes would be private too.
    """
    root.mkdir(parents=True, exist_ok=True)
    sent = paths.sent(root)
    sent.mkdir(mode=0o700, exist_ok=True)
    trust.require(sent)
    for name in names:
        if not re.fullmatch("[0-9a-f]{64}", name):
            raise UsageFault(f"{name!r} is no name of a tree")
    tree = sent / "trees" / names[0]
    tree.mkdir(parents=True, exist_ok=True)
    return tree


def _sent(root: Path, name: str, project: str) -> dict[str, Any]:
    """What did not change since the project's last tree is linked to it."""
    tree = _tree(root, name, project)
    last = tree.with_name(f"last-{project}")
    if not last.exists():
        last.unlink(missing_ok=True)
        last.symlink_to(".")
    return {"folder": str(tree)}


def _look(root: Path, wanted: str, part: str) -> dict[str, Any]:
    run = find.find(directory.runs_root(root), wanted)
    nodes = run.status.get("nodes") if run.status.get("state") == "RUNNING" else None
    folder = run.path / part
    if not folder.is_dir():
        raise RunFault(
            f"{run.name} has no {part}: see what it has with: cookbook status {run.name}"
        )
    return {"run": run.name, "nodes": nodes or [], "folder": str(folder)}


def _run(root: Path, name: str, project: str, cwd: str, *words: str) -> None:
    """Run a command. Ctrl-C, the end of the input and a closed terminal interrupt it."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    os.chdir(Path.home())
    if name:
        tree = _tree(root, name, project)
        os.utime(tree)
        last = tree.with_name(f"last-{project}")
        last.unlink(missing_ok=True)
        with suppress(FileExistsError):  # of another command at the same time
            last.symlink_to(name)
        # The checkout around it is another one.
        os.environ["GIT_CEILING_DIRECTORIES"] = str(tree.parent)
        Path(f"{tree}{cwd}").mkdir(parents=True, exist_ok=True)  # it may hold no file
        os.chdir(f"{tree}{cwd}")
    os.environ |= {"COOKBOOK_HOST": "local", "COOKBOOK_LISTENING": "1"}
    if not sys.stdin.isatty():
        threading.Thread(target=_until_closed, args=[os.dup(0)], daemon=True).start()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["cookbook", *words]
    cookbook()


def _until_closed(stream: int) -> None:
    """Interrupt the command, and what it started, once the laptop closes its input or is gone."""
    while os.read(stream, 1024):
        pass
    os.killpg(0, signal.SIGINT)
    time.sleep(20)
    with suppress(ProcessLookupError):
        os.killpg(0, signal.SIGTERM)


if __name__ == "__main__":
    main()
