"""What this machine shows: the jobs' virtual environment, and the folder of runs and models.

The environment is read from its files without importing them. Whether the folder is shared is what
a node reports.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

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
    python = folder.parent.name.removeprefix("python")
    if not (3, 11) <= tuple(map(int, python.split("."))) <= (3, 13):
        remedy = "COOKBOOK_PYTHON=python3.11 bash setup.sh"
        findings.append(failed(_VENV, f"{root} has Python {python}, not 3.11 to 3.13", remedy))
    if not (root / ".cookbook-setup").is_file():
        message = f"setup.sh did not finish {root}, or did not make it"
        findings.append(warning(_VENV, message, _SETUP))
    installed = set(map(venv.plain_name, venv.packages()))
    if missing := [name for name in ("torch", "torchtune", "tensorboard") if name not in installed]:
        findings.append(failed(_VENV, f"{root} lacks {', '.join(missing)}", _SETUP))
    torch = venv.torch_build()
    shown = f"{root}: Python {python}, torch {torch.version} for {torch.platform}"
    return findings or [ok(_VENV, f"{shown}; all packages as in constraints.txt")]


def shared_folder(cluster: Site) -> list[Finding]:
    root, subject = cluster.root, "shared folder"
    place = existing_parent(root)
    if not os.access(place, os.W_OK):
        remedy = "set COOKBOOK_ROOT, or shared_root in the site file, to a folder of yours"
        return [failed(subject, f"you may not write to {place}", remedy)]
    free_gib = shutil.disk_usage(place).free / 2**30
    # Such as nfs4, lustre or ext4.
    kind = (_output(["df", "--output=fstype", str(place)]).split() or ["an unknown filesystem"])[-1]
    message = f"{root} is on {kind} with {free_gib:.0f} GiB free"
    if free_gib < 1:
        finding = failed(subject, message, "make room, or set COOKBOOK_ROOT to another folder")
    elif free_gib < _ROOMY_GIB:
        remedy = f"enough for small models; a run of an 8B model takes about {_ROOMY_GIB} GiB"
        finding = warning(subject, message, remedy)
    else:
        local = "; that is a filesystem of one machine: see what nodes report"
        finding = ok(subject, message + (local if kind in _LOCAL_FILESYSTEMS else ""))
    return [finding, *_quota(place, kind)]


def _output(argv: list[str]) -> str:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=3)
    return done.stdout


def _quota(place: Path, kind: str) -> list[Finding]:
    """Say how full your quota is, if the filesystem has one and says so."""
    user = os.environ.get("USER") or str(os.getuid())
    lustre = kind == "lustre"
    argv = ["lfs", "quota", "-q", "-u", user, str(place)] if lustre else ["quota", "-w", "-p"]
    if shutil.which(argv[0]) is None or (not lustre and kind in ("overlay", "tmpfs")):
        return []
    shares = []
    for line in _output(argv).splitlines():
        # Path or device, then KiB used (with a * if over the limit), soft and hard limit.
        if match := re.match(r"\s*(\S+)\s+(\d+)\*?\s+(\d+)\*?\s+(\d+)", line):
            where, used, soft, hard = match[1], *map(int, match.groups()[1:])
            if limit := soft or hard:
                shares.append((used / limit, where, used, limit))
    if not shares:
        return []
    share, where, used, limit = max(shares)
    message = f"{used / 2**20:.0f} of {limit / 2**20:.0f} GiB of your quota on {where} are used"
    if share > 0.9:
        return [warning("quota", message, "make room, or ask for more, before a long run")]
    return [ok("quota", message)]
