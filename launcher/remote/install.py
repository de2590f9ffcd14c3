"""From nothing to a checked installation on a cluster: copy, setup.sh, site file, doctor."""

import io
import shlex
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

from launcher.errors import RemoteFault, UsageFault
from launcher.remote import tree
from launcher.remote.hosts import chosen, remember
from launcher.remote.ssh import Connection, folder, shell

# One login shell for all steps; each says what it does. The kit's own checkout stays as it is.
_SCRIPT = """
set -eu
mkdir -p {kit}
cd {kit}
if [ -e .git ]; then
  cat >/dev/null
  echo "{name}:$PWD is a git checkout: its files are left as they are" >&2
else
  tar -xzf -
  echo "copied the kit to {name}:$PWD" >&2
fi
exec </dev/null
bash setup.sh {options}
"""


def install(
    connection: Connection, source: Path, torch: str | None, say: Callable[[str], None]
) -> int:
    """Install this machine's kit on a host; return 0 if doctor finds no fault there, else 1.

    Args:
        source: the kit's checkout on this machine.
        torch: the build of torch for the cluster's nodes, as setup.sh --torch takes it.

    Raises:
        UsageFault: there is no checkout here.
        RemoteFault: there is no connection, or a step failed.
    """
    host = connection.host
    files = tree.listed(source)
    if files is None or not (source / "setup.sh").is_file():
        raise UsageFault(
            "init copies a checkout of the kit, and this is none: clone it with git, and run "
            "cookbook init in its environment"
        )
    options = shlex.join(["--torch", torch]) if torch else ""
    script = _SCRIPT.format(kit=folder(host.kit), name=host.name, options=options)
    _step(connection, f"exec bash -lc {shlex.quote(script)}", _packed(source, files), "setup.sh")
    _step(connection, shell(host, "launcher.remote.site_file"), b"", "the site file")
    code = _step(connection, shell(host, "launcher", "doctor"), b"", None)
    file, first = remember(host), chosen(None)
    say(f"wrote {file}: commands go to {first.name if first else 'this machine'} without --host")
    say("next:")
    if code:
        say("  fix what doctor found above, then look again with: cookbook doctor")
    say("  cookbook submit demo --nodes 2 --watch")
    return code


def _step(connection: Connection, command: str, data: bytes, what: str | None) -> int:
    done = subprocess.run(connection.argv(command), input=data)
    if done.returncode == 255:
        raise connection.closed()
    if done.returncode and what:
        raise RemoteFault(
            f"{what} failed on {connection.host.name}, for the reason above: fix it, and run the "
            "same command again; finished parts are kept"
        )
    return done.returncode


def _packed(source: Path, names: list[str]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz", compresslevel=6) as archive:
        for name in names:
            if (source / name).is_file():
                archive.add(source / name, name, filter=_nobodys)
    return data.getvalue()


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out who owns a file here: as root, tar would give it to the same number there."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
