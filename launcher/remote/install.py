"""From nothing to a checked installation on a cluster: copy, setup.sh, doctor."""

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

from launcher.errors import RemoteFault, UsageFault
from launcher.remote import client
from launcher.remote.ssh import Connection
from launcher.remote.tree import listed

# What was copied, so that the next copy removes what is no part of the kit any more.
_LIST = ".cookbook-files"


def install(host: str, source: Path, torch: str | None, say: Callable[[str], None]) -> int:
    """Install the kit's checkout of this machine on a host; return doctor's exit status there.

    Args:
        torch: the build of torch for the cluster's nodes, as setup.sh --torch takes it.

    Raises:
        UsageFault: there is no checkout here.
        RemoteFault: there is no connection, or a step failed.
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
    code = client.run(host, ["doctor"], say)
    say(
        f"next: fix what doctor found. There, name your partition and account in {connection.kit}/"
        "configs/clusters/default.yaml, as in example.yaml. Here:\n"
        f"  export COOKBOOK_HOST={where}\n  cookbook submit demo --nodes 2 --watch"
    )
    return code
