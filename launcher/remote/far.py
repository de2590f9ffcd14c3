"""The cluster's side of --host: python -m launcher.remote.far, started by ssh.

run CLUSTER ASKED            run the command that a text of JSON asks for
sent CLUSTER PROJECT TREE    make the folder for a tree, and print it
take CLUSTER CALL            print the file that a command has written for the laptop
look CLUSTER RUN PART        say where a part of a run lies, and on which nodes the run is
"""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher import __version__, paths
from launcher import site as sites
from launcher.errors import CookbookError, RunFault, UsageFault
from launcher.runs import directory, find, trust

# What a killed command has left is removed after so long.
_KEPT_S = 86400
# What was interrupted and goes on gets SIGTERM.
_LAST_S = 20.0


def main() -> int:
    """Do what the first word says, and return the exit status."""
    what, cluster, *words = sys.argv[1:]
    try:
        root = sites.load(cluster or None).root
        if what == "run":
            return _run(root, json.loads(words[0]))
        if what == "sent":
            print(_sent(root, *words))
        elif what == "take":
            _take(_private(root, "calls") / _hex(words[0]))
        else:
            print(json.dumps(_look(root, *words)))
    except CookbookError as error:
        for fault in error.faults:
            print(f"error: {fault}", file=sys.stderr)
        return error.exit_code
    return 0


def _hex(name: str) -> str:
    if not re.fullmatch("[0-9a-f]{12,64}", name):
        raise UsageFault(f"{name!r} is no name of a call or a tree")
    return name


def _private(root: Path, name: str) -> Path:
    """Return a folder of what laptops send, made if it is not there; only this user enters it.

    By the mode of the folder around it: by a umask, all that a command makes would be private too.
    """
    root.mkdir(parents=True, exist_ok=True)
    sent = paths.sent(root)
    sent.mkdir(mode=0o700, exist_ok=True)
    trust.require(sent)
    (sent / name).mkdir(exist_ok=True)
    return sent / name


def _sent(root: Path, project: str, name: str) -> Path:
    """Make a tree's folder. What did not change since the project's last one is linked."""
    trees = _private(root, "trees")
    last = trees / f"last-{_hex(project)}"
    if not last.exists():
        last.unlink(missing_ok=True)
        last.symlink_to(".")
    (trees / _hex(name)).mkdir(exist_ok=True)
    return trees / name


def _look(root: Path, wanted: str, part: str) -> dict[str, Any]:
    run = find.find(directory.runs_root(root), wanted)
    nodes = run.status.get("nodes") if run.status.get("state") == "RUNNING" else None
    folder = run.path / part
    if not folder.is_dir():
        raise RunFault(
            f"{run.name} has no {part}: see what it has with: cookbook status {run.name}"
        )
    return {"run": run.name, "nodes": nodes or [], "folder": str(folder)}


def _take(call: Path) -> None:
    for path in (call / "out").glob("*"):
        with open(path, "rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
    shutil.rmtree(call, ignore_errors=True)


def _run(root: Path, asked: dict[str, Any]) -> int:
    """Run a command to its end and return its exit status, as a shell tells it.

    It is interrupted, as by Ctrl-C, if the laptop wants that or is gone: then the input ends, or
    the terminal says so.
    """
    if asked["version"] != __version__:
        print(
            f"note: this machine has version {asked['version']} of the kit, the cluster has "
            f"{__version__}: update the older one; the cluster's with: cookbook init",
            file=sys.stderr,
        )
    calls = _private(root, "calls")
    for old in calls.iterdir():
        if time.time() - old.stat().st_mtime > _KEPT_S:
            shutil.rmtree(old, ignore_errors=True)
    call, cwd = calls / _hex(asked["call"]), Path.home()
    (call / "out").mkdir(parents=True)
    variables = {
        **asked["env"],
        "COOKBOOK_HOST": "local",
        "COOKBOOK_LISTENING": str(call / "listening"),
        "COOKBOOK_ROOT": str(root),
        "COOKBOOK_VENV": str(paths.venv_root()),
        "COOKBOOK_CLUSTERS": str(paths.CLUSTERS),
        "PYTHONPATH": str(paths.REPO_ROOT),
    }
    if asked["tree"]:
        tree = _private(root, "trees") / _hex(asked["tree"])
        os.utime(tree)
        last = tree.with_name(f"last-{_hex(asked['project'])}")
        last.unlink(missing_ok=True)
        last.symlink_to(tree.name)
        # The checkout around it is another one.
        variables["GIT_CEILING_DIRECTORIES"] = str(tree.parent)
        cwd = tree / asked["cwd"]
        cwd.mkdir(parents=True, exist_ok=True)  # it may hold no file
    words = [word.replace("{out}", str(call / "out")) for word in asked["argv"]]
    # Held back until the command has been imported: launcher/__main__.py.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "launcher", *words],
        cwd=cwd,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    _follow(process, call / "listening", asked["call"])
    if not any((call / "out").iterdir()):
        shutil.rmtree(call, ignore_errors=True)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _follow(process: "subprocess.Popen[bytes]", listening: Path, mark: str) -> None:
    """Wait for the end of a command; tell the laptop where it listens, and it that it shall end."""
    interrupted: list[float] = []

    def interrupt(*_: object) -> None:
        interrupted.append(time.monotonic())
        _signal(process, signal.SIGINT)

    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    inputs = [] if sys.stdin.isatty() else [sys.stdin]
    told = False
    while process.poll() is None:
        if select.select(inputs, [], [], 0.1)[0] and not os.read(0, 1):
            inputs = []
            interrupt()
        if not told and listening.is_file():
            told = True
            with suppress(OSError):
                os.write(2, f"\x1e{mark} {listening.read_text()}\n".encode())
        if interrupted and time.monotonic() > interrupted[0] + _LAST_S:
            _signal(process, signal.SIGTERM)


def _signal(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Send a signal to the command and what it started in its session, as a terminal does."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


if __name__ == "__main__":
    sys.exit(main())
