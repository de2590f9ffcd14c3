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
from launcher.remote.ssh import LOST, Connection, folder, shell

# What was copied, so that the next copy removes what is no part of the kit any more.
_LIST = ".cookbook-files"
# The kit's own checkout stays as it is.
_COPY = """
set -eu
mkdir -p {kit}
cd {kit}
if [ -e .git ]; then
  cat >/dev/null
  echo "{name}:$PWD is a git checkout: its files are left as they are" >&2
else
  [ ! -f {list} ] || mv {list} {list}-before
  tar -xzf -
  if [ -f {list}-before ]; then
    LC_ALL=C comm -23 {list}-before {list} | tr '\\n' '\\0' | xargs -0 rm -f --
    rm {list}-before
  fi
  echo "copied the kit to {name}:$PWD" >&2
fi
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
    if host.kit.split() != [host.kit]:
        raise UsageFault(f"--kit {host.kit}: job scripts cannot handle a space in a path")
    say(_copy(connection, _packed(source, files)))
    options = shlex.join(["--torch", torch]) if torch else ""
    setup = f"cd {folder(host.kit)} && COOKBOOK_INIT=1 exec bash setup.sh {options}"
    _step(connection, f"exec bash -lc {shlex.quote(setup)}", "setup.sh")
    _step(connection, shell(host, "launcher.remote.site_file"), "the site file")
    code = _step(connection, shell(host, "launcher", "doctor"), None)
    file, first = remember(host), chosen(None)
    say(f"wrote {file}: commands go to {first.name if first else 'this machine'} without --host")
    cookbook = "cookbook" if first and first.name == host.name else f"cookbook --host {host.name}"
    say("next:")
    if code:
        say(f"  fix what doctor found above, then look again with: {cookbook} doctor")
    say(f"  {cookbook} submit demo --nodes 2 --watch")
    return code


def _copy(connection: Connection, packed: bytes) -> str:
    """Copy the kit, and return what the host says about it."""
    host = connection.host
    script = _COPY.format(kit=folder(host.kit), name=host.name, list=_LIST)
    command = connection.argv(f"exec bash -lc {shlex.quote(script)}")
    done = subprocess.run(command, input=packed, stderr=subprocess.PIPE)
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    if done.returncode == LOST:
        raise connection.fault(LOST, "; ".join(lines[-4:]))
    if done.returncode:
        raise RemoteFault(
            f"cannot copy the kit to {host.kit} on {host.name}: {'; '.join(lines[:2])}: give "
            "another folder with --kit"
        )
    return "\n".join(lines)


def _step(connection: Connection, command: str, what: str | None) -> int:
    host = connection.host
    again = "run the same command again; finished parts are kept"
    done = subprocess.run(connection.argv(command), stdin=subprocess.DEVNULL)
    if done.returncode == LOST:
        raise RemoteFault(f"the connection to {host.name} was lost: {again}")
    if done.returncode and what:
        raise RemoteFault(
            f"{what} failed on {host.name}, for the reason above: fix it, or give another folder "
            f"with --kit, and {again}"
        )
    return done.returncode


def _packed(source: Path, names: list[str]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz", compresslevel=6) as archive:
        present = [name for name in names if (source / name).is_file()]
        for name in present:
            archive.add(source / name, name, filter=_nobodys)
        member, text = tarfile.TarInfo(_LIST), "".join(f"{name}\n" for name in present).encode()
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    return data.getvalue()


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out who owns a file here: as root, tar would give it to the same number there."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
