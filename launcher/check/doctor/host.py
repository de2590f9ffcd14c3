"""What this machine shows: the jobs' virtual environment, and the folder of runs and models.

The environment is read from its files without importing them. Whether the folder is shared is what
a node reports.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator

from launcher import paths, venv
from launcher.check import Finding, existing_parent, failed, ok, warning
from launcher.check import environment as of_jobs
from launcher.site import Site

_VENV, _SETUP = "virtual environment", "bash setup.sh"
# An 8B model, its checkpoints with optimizer state and its export come to about this much.
_ROOMY_GIB = 100
# Filesystems that belong to one machine, as /proc/mounts names them.
_LOCAL_FILESYSTEMS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "f2fs"}


def environment() -> list[Finding]:
    root, folder = paths.venv_root(), venv.site_packages()
    findings = [each for each in of_jobs.packages() if each.state != "ok"]
    if folder is None or any(each.state == "failed" for each in findings):
        return findings or [failed(_VENV, f"there is no virtual environment in {root}", _SETUP)]
    if not (root / ".cookbook-setup").is_file():
        message = f"setup.sh did not finish {root}, or did not make it"
        findings.append(warning(_VENV, message, _SETUP))
    python = folder.parent.name.removeprefix("python")
    torch = venv.torch_build()
    shown = f"{root}: Python {python}, torch {torch.version} for {torch.platform}"
    return findings or [ok(_VENV, f"{shown}; all packages as in constraints.txt")]


def shared_folder(cluster: Site) -> Iterator[Finding]:
    root, subject = cluster.root, "shared folder"
    place = existing_parent(root)
    if not os.access(place, os.W_OK):
        remedy = "set COOKBOOK_ROOT, or shared_root in the site file, to a folder of yours"
        yield failed(subject, f"you may not write to {place}", remedy)
        return
    free_gib = shutil.disk_usage(place).free / 2**30
    # Such as nfs4, lustre or ext4.
    argv = ["df", "--output=fstype", str(place)]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=3)
    kind = (done.stdout.split() or ["an unknown filesystem"])[-1]
    message = f"{root} is on {kind} with {free_gib:.0f} GiB free"
    if free_gib < 1:
        yield failed(subject, message, "make room, or set COOKBOOK_ROOT to another folder")
    elif free_gib < _ROOMY_GIB:
        remedy = f"enough for small models; a run of an 8B model takes about {_ROOMY_GIB} GiB"
        yield warning(subject, message, remedy)
    else:
        local = "; that is a filesystem of one machine: see what nodes report"
        yield ok(subject, message + (local if kind in _LOCAL_FILESYSTEMS else ""))
