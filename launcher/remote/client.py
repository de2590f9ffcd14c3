"""Running a cookbook command on the cluster from this machine, and fetching what it makes."""

import hashlib
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from launcher import __version__
from launcher.errors import RemoteFault
from launcher.remote.hosts import Host
from launcher.remote.ssh import Connection
from launcher.remote.tree import collect
from runspec import files

# What `fetch` copies, by the name of its option.
_PARTS = {
    "export": files.EXPORT,
    "adapter": f"{files.EXPORT}/{files.ADAPTER}",
    "logs": files.LOGS,
}
# Commands that print where a server listens: launcher/observe/servers.py.
_SERVING = ("serve", "tensorboard")
_LISTENS = re.compile(rb"listens on ([\w.-]+):(\d+)([\w./?&=%~-]*)\r?\n")
Say = Callable[[str], None]


def run(host: Host, argv: Sequence[str], say: Say) -> int:
    """Run a command there and return its exit status."""
    _end_with_signals()
    words, option, output = _output(list(argv))
    tree, words = collect(words)
    for line in tree.left_out:
        say(f"not sent: {line}")
    connection, cluster = Connection(host), _option(words, "--cluster")[1]
    name, call = tree.name(), secrets.token_hex(32)
    # What was sent before from here is not sent again.
    project = hashlib.sha256(str(tree.root).encode()).hexdigest()
    if name or output:
        known = connection.ask(cluster, "sent", name or call, project)
    if name:
        # Read-only, as the next tree has links to the same files.
        options = ["-p", "--chmod=Du+w,Fa-w", f"--link-dest=../last-{project}"]
        names = [str(path).lstrip("/") for path in sorted(tree.files)]
        connection.push(names, "", known["rsync"], known["folder"], *options)
    made = f"{known['folder']}/{call}{output.suffix}" if output else ""
    words += [option, made] if output else []
    script = connection.far(__version__, cluster, "run", name, project, str(tree.here), *words)
    with ExitStack() as stack:
        terminals = all(each.isatty() for each in (sys.stdin, sys.stdout, sys.stderr))
        if terminals and argv[0] not in _SERVING:
            # ssh -t passes Ctrl-C and the size of the window on.
            code = subprocess.run(connection.argv(script, terminal=True)).returncode
            forwarded = False
        else:
            code, forwarded = _follow(connection, script, argv[0] in _SERVING, stack, say)
        connection.require(code)
        if output:
            _take(connection, made, output)
        if code == 0 and forwarded and argv[0] == "serve":
            _hold(say)  # the job goes on; other servers end with their command
    return code


def _follow(
    connection: Connection, script: str, serves: bool, stack: ExitStack, say: Say
) -> tuple[int, bool]:
    """Run a script, and forward a port to where it says that a server listens.

    The end of its input interrupts it there. Returns its status, and whether a port is forwarded.
    """
    process = subprocess.Popen(
        connection.argv(script),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE if serves else None,
        start_new_session=True,
    )
    assert process.stdin is not None
    signal.signal(signal.SIGINT, lambda *_: process.stdin and process.stdin.close())
    forwarded = False
    try:
        for line in process.stderr or ():
            if not forwarded and (found := _LISTENS.fullmatch(line)):
                where, port, path = (each.decode() for each in found.groups())
                own = stack.enter_context(connection.forwarded(where, int(port)))
                say(f"open: http://127.0.0.1:{own}{path}   (Ctrl-C here closes it)")
                forwarded = True
            else:
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()
        return process.wait(), forwarded
    finally:
        _end_with_signals()
        process.terminate()
        process.wait()


def _take(connection: Connection, made: str, output: Path) -> None:
    """Write what the command has written for this machine, if it has."""
    file = shlex.quote(made)
    content = connection.output(f"[ ! -f {file} ] || cat {file} && rm {file}")
    if content:
        part = output.with_name(f".{output.name}.part")
        part.write_bytes(content)
        part.replace(output)


def fetch(host: Host, run: str, part: str, into: Path | None, cluster: str | None) -> Path:
    """Copy a part of a run: export, adapter or logs; return the folder with it.

    Args:
        into: the folder for the run's files; None for one with the run's name, here.

    Raises:
        RemoteFault: the cluster names the run so that it would lie elsewhere.
    """
    connection = Connection(host)
    known = connection.ask(cluster or "", "look", run, _PARTS[part])
    folder = into or Path(_plain(str(known["run"])))
    connection.pull(str(known["rsync"]), str(known["folder"]), folder / _PARTS[part])
    return folder


def _plain(name: str) -> str:
    """Return a run's name as the cluster gives it, if it is one for a folder here."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name, re.ASCII):
        raise RemoteFault(f"the cluster names the run {name!r}, which is no folder's name: use -o")
    return name


def forward(host: Host, run: str, port: int, cluster: str | None, say: Say) -> None:
    """Forward a port of this machine to the same of a run's first node, until Ctrl-C."""
    _end_with_signals()
    connection = Connection(host)
    known = connection.ask(cluster or "", "look", run, "")
    if not known["nodes"]:
        raise RemoteFault(f"{known['run']} runs on no node now: see: cookbook status {run}")
    with connection.forwarded(known["nodes"][0], port) as own:
        say(f"open: http://127.0.0.1:{own}/   ({known['nodes'][0]}; Ctrl-C here closes it)")
        _hold(say)


def _hold(say: Say) -> None:
    """Keep a port open until Ctrl-C: what listens there goes on without it."""
    with suppress(KeyboardInterrupt):
        while True:
            time.sleep(1)
    say("\nthe port is closed; what was started on the cluster continues")


def _end_with_signals() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, and a kill or a closed terminal SystemExit: a port that
    the open connection forwards would stay open."""
    # A shell that starts this in the background makes it ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def _option(words: Sequence[str], *names: str) -> tuple[int, str]:
    """Return the place and the value of an option, as --name VALUE or --name=VALUE."""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names and (equals or place + 1 < len(words)):
            return place, value if equals else words[place + 1]
    return -1, ""


def _output(words: list[str]) -> tuple[list[str], str, Path | None]:
    """Return the words without -o FILE, that option, and FILE; a report and a recipe have one."""
    place, given = _option(words, "-o", "--output")
    option, equals, _ = words[place].partition("=") if given else ("-o", "", "")
    if given:
        del words[place : place + (1 if equals else 2)]
    elif words[0] == "report":
        given = "report.html"
    elif words[0] == "start" and len(words) > 1:
        given = f"{Path(words[1]).stem}.yaml"
    helps = {"-h", "--help"} & set(words)
    return words, option, Path(given) if given and not helps else None
