"""From this machine: the kit installed on a cluster, its commands run there, and what they make
fetched."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from launcher.errors import RemoteFault, UsageFault
from launcher.look import servers
from launcher.remote.ssh import LOST, Connection
from launcher.remote.tree import Tree, listed

# Ends the command there once its input is closed here, or the connection is lost.
_WATCHED = "{ { cat; kill $$; } <&0 >/dev/null 2>&1 & exec </dev/null; }"
# What was copied, so that the next copy removes what is no part of the kit any more.
_LIST = ".cookbook-files"
Say = Callable[[str], None]


def run(host: str, argv: list[str], say: Say) -> int:
    """Run a command there and return its exit status."""
    servers.end_with_signals()
    connection, tree, output = Connection(host), Tree(argv), _written(argv)
    for line in tree.left_out:
        say(f"not sent: {line}")
    enter = "cd"
    if tree.files or output:
        answer = connection.output(connection.module("launcher.remote.sent", tree.name()))
        root, *last = json.loads(answer)
        # Read-only, as the next tree has links to the same files.
        options = ["-p", "--chmod=Du+w,Fa-w", *(f"--link-dest=../{each}" for each in last)]
        # What the command writes may lie here already.
        names = [str(path).lstrip("/") for path in sorted(tree.files - {output})]
        connection.push(names, "", root, *options)
        # The folder may hold no file, and the checkout around it is another one.
        folder = shlex.quote(f"{root}{tree.here}")
        enter = f"mkdir -p {folder}; cd {folder}; export GIT_CEILING_DIRECTORIES={root}"
    words = [os.path.relpath(word) if word == str(output) else word for word in tree.words]
    code = _follow(connection, enter, words)
    if code == LOST:
        again = f"cookbook --host {host} status"
        raise RemoteFault(f"the connection was lost: runs there go on; see them with: {again}")
    if output:
        file = shlex.quote(os.path.relpath(output, tree.here))
        content = connection.output(f"{enter}; [ ! -f {file} ] || cat {file} && rm -f {file}")
        if content:
            output.write_bytes(content)
    return code


def _written(argv: list[str]) -> Path | None:
    """Return the file that a command writes for this machine: that of -o, or start's recipe."""
    given = re.search(r"\0(?:-o|--output)[\0=]([^\0]+)", "\0".join(argv))
    if given or argv[0] != "start" or len(argv) == 1:
        return Path(os.path.abspath(given[1])) if given else None
    return Path.cwd() / f"{Path(argv[1]).stem}.yaml"


def _follow(connection: Connection, enter: str, words: list[str]) -> int:
    """Run a command in the folder that the shell's words enter; return its status."""
    if all(each.isatty() for each in (sys.stdin, sys.stdout, sys.stderr)):
        # ssh -t passes Ctrl-C and the size of the window on.
        script = connection.module("launcher", *words, before=enter)
        return subprocess.run(connection.argv(script, terminal=True)).returncode
    process = subprocess.Popen(
        connection.argv(connection.module("launcher", *words, before=f"{enter}; {_WATCHED}")),
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    signal.signal(signal.SIGINT, lambda *_: process.stdin and process.stdin.close())
    code = process.wait()
    if process.stdin and process.stdin.closed:
        return 130  # by Ctrl-C
    servers.end_with_signals()
    return code


def fetch(host: str, run: str, part: str, into: Path | None, cluster: str | None) -> Path:
    """Copy a folder of a run, such as export, into a folder here; return that.

    Args:
        into: the folder for the run's files; None for one with the run's name, here.
    """
    connection = Connection(host)
    words = ["status", run, "--json", *(["--cluster", cluster] if cluster else [])]
    known = json.loads(connection.output(connection.module("launcher", *words)))
    name = str(known["run"])
    if not into and not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name, re.ASCII):
        raise RemoteFault(f"the cluster names the run {name!r}, which is no folder's name: use -o")
    folder = into or Path(name)
    connection.pull(f"{known['path']}/{part}", folder / part)
    return folder


def install(host: str, source: Path, torch: str | None, say: Say) -> int:
    """Copy the kit's checkout of this machine to a host, and run setup.sh and doctor there; return
    doctor's exit status. UsageFault if there is no checkout here.

    torch: the build of torch for the cluster's nodes, as setup.sh --torch takes it.
    """
    names = listed(source)
    if "setup.sh" not in names:
        raise UsageFault("init copies a checkout of the kit, and this is none: clone it with git")
    connection = Connection(host)
    kit, where = shlex.quote(connection.kit), f"{connection.name}:{connection.kit}"
    checkout = f"echo error: {shlex.quote(where)} is a git checkout: use git pull there >&2"
    enter = f"cd && mkdir -p {kit} && cd {kit} && if [ -e .git ]; then {checkout}; exit 1; fi"
    connection.push(names, str(source), connection.output(f"{enter} && pwd").decode().strip(), "-E")
    old = f"LC_ALL=C comm -23 {_LIST} {_LIST}-new | tr '\\n' '\\0' | xargs -0 rm -f --"
    connection.output(
        f"{enter} && cat >{_LIST}-new && touch {_LIST} && {old} && mv {_LIST}-new {_LIST}",
        "".join(f"{name}\n" for name in names).encode(),
    )
    say(f"copied the kit to {where}")
    setup = shlex.join(["bash", "setup.sh", *(["--torch", torch] if torch else [])])
    argv = connection.argv(f"{enter} && COOKBOOK_INIT=1 {setup}")
    if subprocess.run(argv, stdin=subprocess.DEVNULL).returncode:
        raise RemoteFault(f"setup.sh failed on {connection.name}, for the reason above")
    code = run(host, ["doctor"], say)
    say(
        f"next: fix what doctor found. There, name your partition and account in {connection.kit}/"
        "configs/clusters/default.yaml, as in example.yaml. Here:\n"
        f"  export COOKBOOK_HOST={where}\n  cookbook submit demo --nodes 2 --watch"
    )
    return code
