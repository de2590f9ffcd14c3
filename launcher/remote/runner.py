"""A command that goes on while connections come and go; on the cluster.

    <shared folder>/sent-<uid>/sessions/<id>/
      records     all that it printed, and its exit status
      beat        changes while the command is looked after
      seen        changes while a client is connected
      stop        appears when the client pressed Ctrl-C
      listening   HOST PORT PATH of a server that the command started
      out/        the file that the command writes for the laptop

The folder is on the shared filesystem: a client that comes back through another login node, as
names that rotate give it, reads on from the byte up to which it has everything.
"""

import fcntl
import json
import os
import selectors
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.remote import wire

RECORDS, BEAT, SEEN, STOP, LISTENING, OUT = "records", "beat", "seen", "stop", "listening", "out"
# Without a client for so long, the command gets what Ctrl-C would send, and then SIGTERM.
_ALONE_S, _LAST_S = 180.0, 20.0
# The signs of life of both sides.
BEAT_S = 2.0
_READ = 2**16


class Sign:
    """A file whose content changes as long as somebody lives; clocks of hosts differ."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text = ""
        self._since = time.monotonic()

    def still_s(self) -> float:
        """Return for how many seconds it has not changed."""
        try:
            text = self._path.read_text()
        except OSError:
            text = ""
        if text != self._text:
            self._text, self._since = text, time.monotonic()
        return time.monotonic() - self._since

    def change(self) -> None:
        """Change it."""
        with suppress(OSError):
            self._path.write_text(f"{os.getpid()} {time.time_ns()}")


def start(
    folder: Path,
    argv: Sequence[str],
    cwd: Path,
    variables: Mapping[str, str],
    terminal: Mapping[str, Any],
) -> None:
    """Start a command that this process, and its connection, need not outlive.

    Args:
        terminal: rows and columns of the client's terminal, and which streams go to it.
    """
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    try:
        # sshd ends a call only if nobody has its streams any more.
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.closerange(3, 1024)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        _run(folder, argv, cwd, variables, terminal)
    except BaseException as error:
        message = f"error: {type(error).__name__}: {error}\n".encode()
        with open(folder / RECORDS, "ab") as file:
            file.write(wire.record(wire.ERR, message) + wire.record(wire.END, b"1"))
    os._exit(0)


def _run(
    folder: Path,
    argv: Sequence[str],
    cwd: Path,
    variables: Mapping[str, str],
    terminal: Mapping[str, Any],
) -> None:
    own = {"COOKBOOK_HOST": "local", "COOKBOOK_LISTENING": str(folder / LISTENING)}
    ends, streams, kinds = [], {}, {"stdout": wire.OUT, "stderr": wire.ERR}
    for name, kind in kinds.items():
        mine, theirs = _pair(terminal if name in terminal["streams"] else None)
        ends.append(theirs)
        streams[mine] = kind
    process = subprocess.Popen(
        list(argv),
        cwd=cwd,
        env={**os.environ, **variables, **own},
        stdin=subprocess.DEVNULL,
        stdout=ends[0],
        stderr=ends[1],
        start_new_session=True,
        preexec_fn=_signals,
    )
    for end in ends:
        os.close(end)
    with open(folder / RECORDS, "ab", buffering=0) as file:
        _follow(process, streams, folder, lambda *each: file.write(wire.record(*each)))
        for path in sorted((folder / OUT).iterdir()):
            with open(path, "rb") as written:
                while data := written.read(wire.CHUNK):
                    file.write(wire.record(wire.FILE, data))
        file.write(wire.record(wire.END, str(_status(process)).encode()))


def _signals() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Until the command has been imported: launcher/__main__.py.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _status(process: "subprocess.Popen[bytes]") -> int:
    """Return the exit status as a shell tells it."""
    code = process.wait()
    return code if code >= 0 else 128 - code


def _pair(terminal: Mapping[str, Any] | None) -> tuple[int, int]:
    """Return our end and the command's end of a pipe, or of a terminal of the client's size."""
    if terminal is None:
        return os.pipe()
    mine, theirs = os.openpty()
    size = struct.pack("HHHH", terminal["rows"], terminal["columns"], 0, 0)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    mode = termios.tcgetattr(theirs)
    # The client's own terminal adds the carriage returns.
    mode[1] &= ~termios.OPOST
    termios.tcsetattr(theirs, termios.TCSANOW, mode)
    return mine, theirs


def _follow(
    process: "subprocess.Popen[bytes]",
    streams: dict[int, int],
    folder: Path,
    write: Callable[[int, bytes], Any],
) -> None:
    """Record what a command prints until it ends, and pass on Ctrl-C and the client's absence."""
    beat, seen = Sign(folder / BEAT), Sign(folder / SEEN)
    stopped, warned, next_beat = 0, False, 0.0
    with selectors.DefaultSelector() as selector:
        for descriptor in streams:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(timeout=0.2):
                try:
                    data = os.read(key.fd, _READ)
                except OSError:  # a terminal that its last user has closed
                    data = b""
                if data:
                    write(streams[key.fd], data)
                else:
                    selector.unregister(key.fd)
            if process.poll() is not None and not selector.select(timeout=0.2):
                return  # what it left running may keep its streams
            if not warned and (folder / LISTENING).is_file():
                warned = True
                host, port, path = (folder / LISTENING).read_text().split()
                where = {"host": host, "port": int(port), "path": path}
                write(wire.FORWARD, json.dumps(where).encode())
            if time.monotonic() < next_beat and not (folder / STOP).exists():
                continue
            next_beat = time.monotonic() + BEAT_S
            beat.change()
            alone_s = seen.still_s()
            if (folder / STOP).exists() or (alone_s > _ALONE_S and not stopped):
                (folder / STOP).unlink(missing_ok=True)
                stopped += 1
                _signal(process, signal.SIGINT)
            elif alone_s > _ALONE_S + _LAST_S:
                _signal(process, signal.SIGTERM)


def _signal(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Send a signal to the command and what it started in its session, as a terminal does."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
