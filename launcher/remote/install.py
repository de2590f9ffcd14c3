"""From nothing to a checked installation on a cluster: copy, setup.sh, site file, doctor."""

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

from launcher.errors import RemoteFault, UsageFault
from launcher.remote import tree
from launcher.remote.hosts import Host, chosen, remember
from launcher.remote.ssh import IS_CHECKOUT, LOST, Connection, far, folder

# What was copied, so that the next copy removes what is no part of the kit any more.
_LIST = ".cookbook-files"
_REMOVE = (
    f"LC_ALL=C comm -23 {_LIST}-before {_LIST} | tr '\\n' '\\0' | xargs -0 rm -f -- && "
    f"rm {_LIST}-before"
)


def install(host: Host, source: Path, torch: str | None, say: Callable[[str], None]) -> int:
    """Install this machine's kit on a host; return 0 if doctor finds no fault there, else 1.

    Args:
        source: the kit's checkout on this machine.
        torch: the build of torch for the cluster's nodes, as setup.sh --torch takes it.

    Raises:
        UsageFault: there is no checkout here.
        RemoteFault: there is no connection, or a step failed.
    """
    files = tree.listed(source)
    if not files or not (source / "setup.sh").is_file():
        raise UsageFault(
            "init copies a checkout of the kit, and this is none: clone it with git, and run "
            "cookbook init in its environment"
        )
    if host.kit.split() != [host.kit]:
        raise UsageFault(f"--kit {host.kit}: job scripts cannot handle a space in a path")
    connection, kit = Connection(host), folder(host.kit)
    # A checkout stays as it is.
    enter = (
        f"mkdir -p {kit} && cd {kit} && {{ [ ! -e .git ] || exit {IS_CHECKOUT}; }} && "
        f"{{ [ ! -f {_LIST} ] || mv {_LIST} {_LIST}-before; }}"
    )
    with tree.staged(files) as staged:
        (staged / _LIST).write_text("".join(f"{name}\n" for name in files), encoding="utf-8")
        if connection.push(staged, enter, "-E") == IS_CHECKOUT:
            say(f"{host.name}:{host.kit} is a git checkout: its files are left as they are")
        else:
            say(f"copied the kit to {host.name}:{host.kit}")
    options = shlex.join(["--torch", torch]) if torch else ""
    remove = f"{{ [ ! -f {_LIST}-before ] || {{ {_REMOVE}; }}; }}"
    setup = f"cd {kit} && {remove} && COOKBOOK_INIT=1 bash setup.sh {options} 1>&3"
    _step(connection, setup, "setup.sh")
    _step(connection, f"{far(host, module='launcher.remote.site_file')} 1>&3", "the site file")
    code = _step(connection, f"{far(host, 'doctor', module='launcher')} 1>&3", None)
    file, first = remember(host), chosen(None)
    say(f"wrote {file}: commands go to {first.name if first else 'this machine'} without --host")
    cookbook = "cookbook" if first and first.name == host.name else f"cookbook --host {host.name}"
    say("next:")
    if code:
        say(f"  fix what doctor found above, then look again with: {cookbook} doctor")
    say(f"  {cookbook} submit demo --nodes 2 --watch")
    return code


def _step(connection: Connection, script: str, what: str | None) -> int:
    again = "run the same command again; finished parts are kept"
    name = connection.host.name
    done = subprocess.run(connection.argv(script), stdin=subprocess.DEVNULL)
    if done.returncode == LOST:
        raise RemoteFault(f"the connection to {name} was lost: {again}")
    if done.returncode and what:
        raise RemoteFault(
            f"{what} failed on {name}, for the reason above: fix it, or give another folder with "
            f"--kit, and {again}"
        )
    return done.returncode
