"""Running a cookbook command on the cluster from this machine, and showing what it prints."""

import hashlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from launcher import __version__
from launcher.errors import RemoteFault, UsageFault
from launcher.remote.hosts import Host
from launcher.remote.ssh import LOST, NO_KIT, Connection, far
from launcher.remote.tree import Tree, collect, staged
from runspec import files

# These take files of this machine: a recipe, data, the working tree.
SENDING = (
    "start", "recipes", "doctor", "download", "prepare", "estimate", "check", "submit", "sweep",
    "eval", "serve", "query",
)  # fmt: skip
# What `fetch` copies, by the name of its option.
_PARTS = {
    "export": files.EXPORT,
    "adapter": f"{files.EXPORT}/{files.ADAPTER}",
    "logs": files.LOGS,
}
Say = Callable[[str], None]


def run(host: Host, argv: Sequence[str], say: Say) -> int:
    """Run a command there and return its exit status."""
    _end_with_signals()
    try:
        return _run(host, list(argv), say)
    except KeyboardInterrupt:
        say("\ninterrupted; runs on the cluster go on: see them with: cookbook status")
        return 130


def _run(host: Host, argv: list[str], say: Say) -> int:
    argv, output = _output_there(argv)
    tree = Tree(Path.cwd())
    if argv[0] in SENDING:
        tree, argv = collect(argv)
        for line in tree.left_out:
            say(f"not sent: {line}")
    connection, cluster, call = Connection(host), _option(argv, "--cluster"), secrets.token_hex(8)
    # What was sent before from here is not sent again.
    project = hashlib.sha256(str(tree.root).encode()).hexdigest()[:16]
    name = tree.name() if tree.files else ""
    if name:
        _send(connection, tree, [cluster or "", project, name])
    asked = {
        "version": __version__,
        "call": call,
        "argv": argv,
        "tree": name,
        "project": project,
        "cwd": tree.cwd,
        "env": {key: os.environ[key] for key in ("NO_COLOR",) if key in os.environ},
    }
    shown = _Shown(call, name, tree, output)
    with ExitStack() as stack:

        def listening(where: str, port: int, path: str) -> None:
            own = stack.enter_context(connection.forwarded(where, port))
            # A terminal that ssh reads from does not go to the first column by itself.
            say(f"open: http://127.0.0.1:{own}{path}   (Ctrl-C here closes it)\r")

        code = _follow(connection, ["run", cluster or "", json.dumps(asked)], shown, listening)
        if output is not None:
            _take(connection, cluster, call, output, argv[0] == "report")
        if code == 0 and shown.listens and argv[0] == "serve":
            _hold(say)  # the job goes on; other servers end with their command
    return code


def _send(connection: Connection, tree: Tree, words: list[str]) -> None:
    # Read-only, as the next tree has links to the same files.
    options = ["-p", "--chmod=Du+w,Fa-w", f"--link-dest=../last-{words[1]}"]
    enter = f'd=$({far(connection.host, "sent", *words)}) && cd "$d"'
    with staged(tree.files) as folder:
        connection.push(folder, enter, *options, progress=tree.large)


class _Shown:
    """What the cluster prints, with the names that files have here, and without its marks."""

    def __init__(self, call: str, name: str, tree: Tree, output: Path | None) -> None:
        self.listens: re.Match[bytes] | None = None
        self._mark = re.compile(rf"\x1e{call} ([\w.:-]+) (\d+) ([\w./?&=%~-]*)\r?\n".encode())
        self._rest = b""
        sent, here = r"/[^\s'\"]*/sent-\d+", {}
        if output:
            here[f"{sent}/calls/{call}/out/{re.escape(output.name)}"] = str(output)
        if name:
            cwd = re.escape(os.path.join(tree.cwd, os.path.relpath(".", tree.cwd), ""))
            for each, path in tree.elsewhere().items():
                here[f"{sent}/trees/{name}/({cwd})?{re.escape(each)}"] = path
            here[f"{sent}/trees/{name}"] = str(tree.root)
        self._here = [
            (re.compile(there.encode()), os.fsencode(own.replace("\\", r"\\")))
            for there, own in here.items()
        ]

    def text(self, data: bytes) -> bytes:
        """Return what is to be shown; none: all that was held back."""
        self._rest += data
        if found := self._mark.search(self._rest):
            self.listens = found
            self._rest = self._rest[: found.start()] + self._rest[found.end() :]
        # A mark may come in two parts.
        whole, sign, part = self._rest.rpartition(b"\x1e")
        if not sign or not data or len(part) > 500:
            whole, sign, part = self._rest, b"", b""
        self._rest = sign + part
        for there, own in self._here:
            whole = there.sub(own, whole)
        return whole


def _follow(
    connection: Connection,
    words: list[str],
    shown: _Shown,
    listening: Callable[[str, int, str], None],
) -> int:
    """Start the command, show what it prints, pass Ctrl-C on; return its exit status.

    On a terminal by ssh -t, which does all that itself. Else the command's output stays apart from
    its messages, and the end of its input interrupts it.
    """
    terminal = all(each.isatty() for each in (sys.stdin, sys.stdout, sys.stderr))
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        connection.far(*words, terminal=terminal),
        stdin=None if terminal else pipe,
        stdout=pipe if terminal else None,
        stderr=None if terminal else pipe,
        start_new_session=not terminal,
    )
    printed = process.stdout if terminal else process.stderr
    assert printed is not None

    def press(*_: object) -> None:
        if process.stdin is None or process.stdin.closed:
            process.terminate()
        else:
            process.stdin.close()

    before = signal.signal(signal.SIGINT, press)
    into = sys.stdout if terminal else sys.stderr
    try:
        more = True
        while more:
            data = os.read(printed.fileno(), 2**16)
            more, known = bool(data), shown.listens
            into.buffer.write(shown.text(data))
            into.buffer.flush()
            if shown.listens and not known:
                where, port, path = shown.listens.groups()
                listening(where.decode(), int(port), path.decode())
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
        process.terminate()
        process.wait()
    if code in (LOST, NO_KIT):
        raise connection.fault(code, "")
    return code if code >= 0 else 130


def _take(
    connection: Connection, cluster: str | None, call: str, output: Path, shown: bool
) -> None:
    """Write what the command has written for this machine, if it has."""
    content = connection.ask("take", cluster or "", call)
    if content:
        part = output.with_name(f".{output.name}.part")
        part.write_bytes(content)
        part.replace(output)
        if shown:
            webbrowser.open(output.absolute().as_uri())


def fetch(host: Host, run: str, part: str, into: Path | None, cluster: str | None) -> Path:
    """Copy a part of a run: export, adapter or logs; return the folder with it.

    Args:
        into: the folder for the run's files; None for one with the run's name, here.

    Raises:
        RemoteFault: the cluster names the run so that it would lie elsewhere.
    """
    connection = Connection(host)
    known = json.loads(connection.ask("look", cluster or "", run, _PARTS[part]))
    folder = into or Path(_plain(known["run"]))
    connection.pull(str(known["folder"]), folder / _PARTS[part])
    return folder


def _plain(name: Any) -> str:
    """Return a run's name as the cluster gives it, if it is one for a folder here."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", str(name), re.ASCII):
        raise RemoteFault(f"the cluster names the run {name!r}, which is no folder's name: use -o")
    return str(name)


def forward(host: Host, run: str, port: int, cluster: str | None, say: Say) -> None:
    """Forward a port of this machine to the same of a run's first node, until Ctrl-C."""
    _end_with_signals()
    connection = Connection(host)
    known = json.loads(connection.ask("look", cluster or "", run, ""))
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


def _option(argv: Sequence[str], name: str) -> str | None:
    """Return the value of an option, as --name VALUE or --name=VALUE."""
    for place, word in enumerate(argv):
        if word == name and place + 1 < len(argv):
            return argv[place + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def _output_there(argv: list[str]) -> tuple[list[str], Path | None]:
    """Return the words with -o FILE in a folder of the cluster, and FILE; a report has one."""
    message, target = list(argv), None
    for place, word in enumerate(argv):
        name, _, value = word.partition("=")
        if name not in ("-o", "--output"):
            continue
        given = value or (argv[place + 1] if place + 1 < len(argv) else "")
        if not given:
            raise UsageFault(f"{name} needs a file")
        target = Path(given)
        sent = f"{{out}}/{target.name}"
        if value:
            message[place] = f"{name}={sent}"
        else:
            message[place + 1] = sent
    asked_for_help = {"-h", "--help"} & set(argv)
    if target is None and not asked_for_help:
        if argv[0] == "report":
            target = Path("report.html")
        elif argv[0] == "start" and len(argv) > 1:
            target = Path(f"{Path(argv[1]).stem}.yaml")
        if target is not None:
            message += ["-o", f"{{out}}/{target.name}"]
    return message, target
