"""Running a cookbook command on the cluster from this machine, and showing what it prints."""

import json
import os
import secrets
import shutil
import signal
import sys
import time
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from launcher import __version__
from launcher.errors import RemoteFault, UsageFault
from launcher.remote import wire
from launcher.remote.hosts import Host
from launcher.remote.ssh import Broken, Connection, Session

# These take files of this machine: a recipe, data, the working tree.
SENDING = (
    "start", "recipes", "doctor", "download", "prepare", "estimate", "check", "submit", "sweep",
    "eval", "serve", "query",
)  # fmt: skip
# A connection that breaks so often before anything new has come is not tried again.
_MOST_BREAKS = 6


def run(host: Host, argv: Sequence[str], say: Callable[[str], None]) -> int:
    """Run a command there and return its exit status."""
    _end_with_signals()
    connection = Connection(host, say)
    try:
        with ExitStack() as stack:
            return Command(connection, list(argv), say, stack).run()
    except KeyboardInterrupt:
        say("\ninterrupted; what was started on the cluster continues: see cookbook status")
        return 130


class Command:
    """One command on the cluster: it is started once, whatever happens to the connection."""

    def __init__(
        self,
        connection: Connection,
        argv: list[str],
        say: Callable[[str], None],
        stack: ExitStack,
    ) -> None:
        self.connection, self._say, self._stack = connection, say, stack
        self._session = secrets.token_hex(8)
        self._offset, self._pressed, self._stops, self._told_version = 0, 0, 0, False
        self._records = wire.Records()
        self._listening: dict[str, Any] = {}
        self._out_there, self._written = "", b""
        self._tree_there = ""
        self._argv, self._output = _output_there(argv)
        self._tree, self._entries = None, b""
        if argv[0] in SENDING:
            from launcher.remote import tree  # most commands send none

            self._tree, self._argv = tree.collect(self._argv)
            for line in self._tree.left_out:
                say(f"not sent: {line}")
            if self._tree.files:
                self._entries = wire.packed(self._tree.entries())

    @property
    def _header(self) -> dict[str, Any]:
        size = shutil.get_terminal_size()
        shown = [name for name in ("stdout", "stderr") if getattr(sys, name).isatty()]
        env = {key: os.environ[key] for key in ("TERM", "NO_COLOR") if key in os.environ}
        return {
            "do": "run",
            "protocol": wire.PROTOCOL,
            "version": __version__,
            "cluster": _option(self._argv, "--cluster"),
            "session": self._session,
            "offset": self._offset,
            "argv": self._argv,
            "cwd": self._tree.cwd if self._tree and self._entries else ".",
            "kit": bool(self._tree and self._tree.kit),
            # Windows has no TERM, and its terminals understand this one.
            "env": {"TERM": "xterm-256color", **env},
            "terminal": {"rows": size.lines, "columns": size.columns, "streams": shown},
        }

    def run(self) -> int:
        """Run it to its end and return its exit status; take a broken connection up again."""
        code: int = with_connection(self.connection, self._once)
        if self._output is not None and self._written:
            self._output.write_bytes(self._written)
            if self._argv[0] == "report":
                webbrowser.open(self._output.absolute().as_uri())
        if code == 0 and self._listening and not self._stops:
            hold(self._say)
        return code

    def _once(self, session: Session) -> int:
        session.send(self._header, self._entries)
        header, payload = session.receive()
        self._compare(session)
        if header.get("missing"):
            if self._tree is None:
                raise RemoteFault("the cluster asks for files of a tree that was not sent")
            self._tree.send(session, wire.unpacked(payload), self._say)
            header, _ = session.receive()
        self._out_there = header["out"]
        self._tree_there = header["tree"] or self._tree_there
        if self._listening:
            self._forward()  # the new connection has no forwarded port
        # Not as an exception, which would come in the middle of a record.
        before = signal.signal(signal.SIGINT, self._press)
        try:
            return self._read(session)
        except SystemExit:
            if self._listening:  # a server serves only this machine; other commands go on
                with suppress(Broken):
                    session.send({"interrupt": True})
                    session.message()
            raise
        finally:
            signal.signal(signal.SIGINT, before)

    def _press(self, *_: object) -> None:
        self._pressed += 1

    def _read(self, session: Session) -> int:
        """Show what comes until the command's end; pass Ctrl-C on, once."""
        while True:
            data = session.some()
            if self._pressed > 1:
                return 130
            if self._pressed > self._stops:
                self._stops += 1
                session.send({"interrupt": True})
            if data is None:
                continue
            if not data:
                raise Broken(session.message())
            self._offset += len(data)
            for kind, text in self._records.feed(data):
                if kind == wire.END:
                    return int(text)
                self._show(kind, text)

    def _show(self, kind: int, data: bytes) -> None:
        if kind == wire.FORWARD:
            self._listening = json.loads(data)
            self._forward()
            return
        if kind == wire.FILE:
            self._written += data
            return
        if self._output is not None:
            there = f"{self._out_there}/{self._output.name}"
            data = data.replace(there.encode(), str(self._output).encode())
        if kind == wire.ERR and self._tree and self._tree_there:
            # A message names the user's own file.
            for name, path in self._tree.elsewhere():
                data = data.replace(f"{self._tree_there}/{name}".encode(), str(path).encode())
            data = data.replace(self._tree_there.encode(), str(self._tree.root).encode())
        stream = sys.stdout if kind == wire.OUT else sys.stderr
        stream.flush()
        stream.buffer.write(data)
        stream.buffer.flush()

    def _compare(self, session: Session) -> None:
        theirs = (session.greeting or {}).get("version")
        if theirs != __version__ and not self._told_version:
            self._told_version = True
            name = self.connection.host.name
            self._say(
                f"note: this machine has version {__version__} of the kit, {name} has {theirs}: "
                f"update the older one; the cluster's with: cookbook init --host {name}"
            )

    def _forward(self) -> None:
        """Forward a port of this machine to where a server listens, until the command ends."""
        from launcher.remote.ports import forwarded  # most commands start no server

        known = self._listening
        port = self._stack.enter_context(forwarded(self.connection, known["host"], known["port"]))
        self._say(f"open: http://127.0.0.1:{port}{known['path']}   (Ctrl-C here closes it)")


def hold(say: Callable[[str], None]) -> None:
    """Keep a port open until Ctrl-C: what listens there goes on without it."""
    with suppress(KeyboardInterrupt):
        while True:
            time.sleep(1)
    say("\nthe port is closed; what was started on the cluster continues")


def forward(
    host: Host, run: str, port: int, cluster: str | None, say: Callable[[str], None]
) -> None:
    """Forward a port of this machine to the same of a run's first node, until Ctrl-C."""
    from launcher.remote.ports import forwarded

    _end_with_signals()
    asked = {"do": "nodes", "run": run, "cluster": cluster}

    def ask(session: Session) -> dict[str, Any]:
        session.send({**asked, "protocol": wire.PROTOCOL, "version": __version__})
        return session.receive()[0]

    connection = Connection(host, say)
    answer = with_connection(connection, ask)
    if not answer["nodes"]:
        raise RemoteFault(f"{answer['run']} runs on no node now: see: cookbook status {run}")
    with forwarded(connection, answer["nodes"][0], port) as own:
        say(f"open: http://127.0.0.1:{own}/   ({answer['nodes'][0]}; Ctrl-C here closes it)")
        hold(say)


def with_connection(connection: Connection, once: Callable[[Session], Any]) -> Any:
    """Return what once returns, called again with a new session whenever the connection breaks.

    Raises:
        RemoteFault: there is no connection, or none again.
    """
    greeted, breaks = False, 0
    while True:
        session = connection.open()
        try:
            return once(session)
        except Broken as error:
            if session.greeting is None and not (greeted or connection.dropped()):
                raise connection.fault(session.exit_code, str(error)) from error
            greeted = True
            breaks = breaks + 1 if session.received < 2**10 else 1
            if breaks > _MOST_BREAKS:
                raise RemoteFault(
                    f"the connection to {connection.host.name} broke {breaks} times in a row: "
                    f"{error or 'ssh gave no reason'}"
                ) from error
            connection.again(breaks)
        finally:
            session.close()


def _end_with_signals() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, and a kill or a closed terminal SystemExit: a port that
    the master connection forwards would stay open."""
    # A shell that starts this in the background makes it ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):  # Windows has no SIGHUP
            signal.signal(getattr(signal, name), lambda number, _: sys.exit(128 + number))


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
