"""The cluster's side of --host: python -m launcher.remote.far, started by one ssh call.

It takes the client's tree, runs the cluster's own cookbook command in it, and sends what that
prints; or it sends the files of a run. It ends with its connection, the command does not.
"""

import hashlib
import os
import re
import select
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from launcher import __version__, paths
from launcher import site as sites
from launcher.errors import CookbookError, RunFault, UnknownRun, UsageFault
from launcher.remote import runner, wire
from launcher.remote.store import Store, private
from launcher.runs import directory, find
from runspec import files as names

# Finished sessions are kept so long, for a client that comes back.
_KEPT_S = 2 * 86400
# A command that nobody looks after for so long was ended with its login node.
_LOST_S = 60.0
# What `fetch` sends, by the name of its option.
_PARTS = {
    "export": names.EXPORT,
    "adapter": f"{names.EXPORT}/{names.ADAPTER}",
    "logs": names.LOGS,
}


def main() -> None:
    """Answer one client."""
    # What is imported or started here prints nothing between our bytes.
    client = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    asked = sys.stdin.buffer
    client.write(wire.GREETING + b"\n")
    wire.send(client, {"protocol": wire.PROTOCOL, "version": __version__})
    try:
        header, payload = wire.receive(asked)
        if header["protocol"] != wire.PROTOCOL:
            raise UsageFault(
                f"this machine's kit has version {header['version']}, the cluster's {__version__}, "
                "and they cannot talk to each other: update the older one; the cluster's with: "
                "cookbook init --host NAME"
            )
        root = sites.load(header.get("cluster")).root
        if header["do"] == "run":
            _run(asked, client, root, header, payload)
        elif header["do"] == "nodes":
            run = find.find(directory.runs_root(root), header["run"])
            nodes = run.status.get("nodes") if run.status.get("state") == "RUNNING" else None
            wire.send(client, {"run": run.name, "nodes": nodes or []})
        else:
            _send_files(asked, client, root, header)
    except CookbookError as error:
        wire.send(client, {"faults": error.faults, "exit_code": error.exit_code})
    except OSError as error:
        message = f"{error.filename or 'the shared folder'}: {error.strerror or error}"
        with suppress(OSError):
            wire.send(client, {"faults": [f"on the cluster: {message}"], "exit_code": 1})
    except EOFError:
        pass


def _session(root: Path, name: str) -> Path:
    if not re.fullmatch(r"[0-9a-f]{16}", name):
        raise UsageFault(f"{name!r} is no session")
    return private(root, "sessions") / name


def _run(
    asked: BinaryIO, client: BinaryIO, root: Path, header: dict[str, Any], payload: bytes
) -> None:
    """Start a session's command unless it was started, and send its records from a byte on."""
    folder, tree = _session(root, header["session"]), None
    if not folder.is_dir():
        _remove_old(root)
        code = paths.REPO_ROOT
        if payload:
            entries = [
                (str(name), str(sha), bool(runs)) for name, sha, runs in wire.unpacked(payload)
            ]
            store = Store(root)
            missing = store.missing(entries)
            if missing and not store.tree(entries).is_dir():
                wire.send(client, {"missing": True}, wire.packed(missing))
                store.receive(asked)
            tree = store.build(entries)
            if header["kit"]:
                code = tree
        _start(folder, root, header, tree, code)
    wire.send(client, {"out": str(folder / runner.OUT), "tree": str(tree) if tree else ""})
    _stream(asked, client, folder, header["offset"])


def _start(folder: Path, root: Path, header: dict[str, Any], tree: Path | None, code: Path) -> None:
    # Exactly once: who makes the folder starts the command.
    try:
        folder.mkdir()
    except FileExistsError:
        return
    (folder / runner.OUT).mkdir()
    message = [word.replace("{out}", str(folder / runner.OUT)) for word in header["argv"]]
    argv = [sys.executable, "-P", "-m", "launcher", *message]
    variables = {
        **{key: header["env"][key] for key in ("TERM", "NO_COLOR") if header["env"].get(key)},
        "COOKBOOK_ROOT": str(root),
        "COOKBOOK_VENV": str(paths.venv_root()),
        "COOKBOOK_CLUSTERS": str(paths.CLUSTERS),
        "PYTHONPATH": str(code),
    }
    if tree is not None:
        # The checkout around it is another one.
        variables["GIT_CEILING_DIRECTORIES"] = str(tree.parent)
    cwd = (tree / header["cwd"]) if tree is not None else Path.home()
    cwd.mkdir(parents=True, exist_ok=True)  # it may hold no file
    runner.start(folder, argv, cwd, variables, header["terminal"])


def _remove_old(root: Path) -> None:
    now = time.time()
    for folder in private(root, "sessions").iterdir():
        with suppress(OSError):
            newest = max(each.stat().st_mtime for each in [folder, *folder.iterdir()])
            if now - newest > _KEPT_S:
                shutil.rmtree(folder)


def _stream(asked: BinaryIO, client: BinaryIO, folder: Path, offset: int) -> None:
    """Send a session's records from a byte on, until the last or until the client is gone."""
    seen, beat = runner.Sign(folder / runner.SEEN), runner.Sign(folder / runner.BEAT)
    records, next_beat = wire.Records(), 0.0
    path = folder / runner.RECORDS
    if offset:
        # Where records begin is known only from the first one on.
        with open(path, "rb") as file:
            list(records.feed(file.read(offset)))
    while True:
        data = b""
        with suppress(FileNotFoundError), open(path, "rb", buffering=0) as file:
            file.seek(offset)
            data = file.read(wire.CHUNK)
        if data:
            client.write(data)
            client.flush()
            offset += len(data)
            if any(kind == wire.END for kind, _ in records.feed(data)):
                return
        if time.monotonic() > next_beat:
            next_beat = time.monotonic() + runner.BEAT_S
            seen.change()
            if beat.still_s() > _LOST_S:
                message = b"error: the command was ended on the cluster's login node\n"
                client.write(wire.record(wire.ERR, message) + wire.record(wire.END, b"1"))
                client.flush()
                return
        ready, _, _ = select.select([asked], [], [], 0 if data else 0.05)
        if ready:
            wire.receive(asked)  # Ctrl-C; EOFError: the client is gone
            (folder / runner.STOP).touch()


def _send_files(asked: BinaryIO, client: BinaryIO, root: Path, header: dict[str, Any]) -> None:
    """List the files of a part of a run, and send what the client says it lacks of each."""
    run = find.find(directory.runs_root(root), header["run"])
    base, folder = run.path, run.path / _PARTS[header["part"]]
    if not folder.is_dir():
        raise RunFault(
            f"{run.name} has no {folder.relative_to(base)}: see what it has with: "
            f"cookbook status {run.name}"
        )
    listed = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    listed = [path for path in listed if not any(up.is_symlink() for up in _between(path, folder))]
    sizes = [[path.relative_to(base).as_posix(), path.stat().st_size] for path in listed]
    wire.send(client, {"run": run.name}, wire.packed(sizes))
    _, payload = wire.receive(asked)
    known = {name for name, _ in sizes}
    for name, offset, sha256 in wire.unpacked(payload):
        if name not in known:
            raise UnknownRun(f"{name} is not one of the files that were listed")
        _send_file(client, base / name, name, offset, sha256)


def _between(path: Path, folder: Path) -> list[Path]:
    """Return the folders from a file up to, and without, another folder."""
    return [up for up in path.parents if up.is_relative_to(folder) and up != folder]


def _send_file(client: BinaryIO, path: Path, name: str, offset: int, sha256: str) -> None:
    """Send a file from a byte on if the bytes before it have that hash, else from the start."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        left = offset
        while left and (data := file.read(min(left, wire.CHUNK))):
            digest.update(data)
            left -= len(data)
        if left or digest.hexdigest() != sha256:
            digest, offset = hashlib.sha256(), 0
            file.seek(0)
        wire.send(client, {"name": name, "offset": offset})
        while data := file.read(wire.CHUNK):
            digest.update(data)
            wire.send(client, {}, data)
    wire.send(client, {"sha256": digest.hexdigest()})


if __name__ == "__main__":
    main()
