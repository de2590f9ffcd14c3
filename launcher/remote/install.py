"""From nothing to a checked installation on a cluster: copy, setup.sh, doctor."""

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

from launcher.errors import RemoteFault, UsageFault
from launcher.remote import tree
from launcher.remote.hosts import Host, chosen, remember
from launcher.remote.ssh import Connection, folder

# What was copied, so that the next copy removes what is no part of the kit any more.
_LIST = ".cookbook-files"


def install(host: Host, source: Path, torch: str | None, say: Callable[[str], None]) -> int:
    """Install this machine's kit on a host; return 0 if doctor finds no fault there, else 1.

    Args:
        source: the kit's checkout on this machine.
        torch: the build of torch for the cluster's nodes, as setup.sh --torch takes it.

    Raises:
        UsageFault: there is no checkout here.
        RemoteFault: there is no connection, or a step failed.
    """
    names = [path.relative_to(source).as_posix() for path in tree.listed(source)]
    if "setup.sh" not in names:
        raise UsageFault(
            "init copies a checkout of the kit, and this is none: clone it with git, and run "
            "cookbook init in its environment"
        )
    if host.kit.split() != [host.kit]:
        raise UsageFault(f"--kit {host.kit}: job scripts cannot handle a space in a path")
    connection, kit = Connection(host), folder(host.kit)
    enter = f"mkdir -p {kit} && cd {kit} &&"
    known = connection.output(f"{enter} pwd -P && {{ command -v rsync || echo; }} && ls -A")
    there, rsync, *present = known.decode().splitlines()
    if ".git" in present:
        say(f"{host.name}:{host.kit} is a git checkout: its files are left as they are")
    else:
        connection.push(names, str(source), rsync, there, "-E")
        say(f"copied the kit to {host.name}:{host.kit}")
        old = f"LC_ALL=C comm -23 {_LIST} {_LIST}-new | tr '\\n' '\\0' | xargs -0 rm -f --"
        connection.output(
            f"{enter} cat >{_LIST}-new && touch {_LIST} && {old} && mv {_LIST}-new {_LIST}",
            "".join(f"{name}\n" for name in names).encode(),
        )
    options = shlex.join(["--torch", torch]) if torch else ""
    for script, what in (
        (f"cd {kit} && COOKBOOK_INIT=1 bash setup.sh {options}", "setup.sh"),
        (connection.far("doctor", module="launcher"), ""),
    ):
        code = subprocess.run(connection.argv(script), stdin=subprocess.DEVNULL).returncode
        connection.require(code)
        if code and what:
            raise RemoteFault(
                f"{what} failed on {host.name}, for the reason above: fix it, or give another "
                "folder with --kit, and run the same command again; finished parts are kept"
            )
    file, first = remember(host), chosen(None)
    say(f"wrote {file}: commands go to {first.name if first else 'this machine'} without --host")
    cookbook = "cookbook" if first and first.name == host.name else f"cookbook --host {host.name}"
    say("next:")
    site = f"{host.kit}/configs/clusters"
    say(f"  there, name your partition and account in {site}/default.yaml: {site}/example.yaml")
    if code:
        say(f"  fix what doctor found above, then look again with: {cookbook} doctor")
    say(f"  {cookbook} submit demo --nodes 2 --watch")
    return code
