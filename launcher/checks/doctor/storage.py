"""Free space and quota of the folder that runs and models go to; a node reports if it is shared."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from launcher.checks import existing_parent
from launcher.checks.finding import Finding, failed, ok, warning
from launcher.site import Site

# An 8B model, its checkpoints with optimizer state and its export come to about this much.
_ROOMY_GIB = 100
# Filesystems that belong to one machine, as /proc/mounts names them.
_LOCAL_FILESYSTEMS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "f2fs"}


def findings(cluster: Site) -> list[Finding]:
    root, subject = cluster.root, "shared folder"
    place = existing_parent(root)
    if not os.access(place, os.W_OK):
        remedy = "set COOKBOOK_ROOT, or shared_root in the site file, to a folder of yours"
        return [failed(subject, f"you may not write to {place}", remedy)]
    free_gib, kind = shutil.disk_usage(place).free / 2**30, filesystem(place)
    words = f"{root} is on {kind} with {free_gib:.0f} GiB free"
    if free_gib < 1:
        found = failed(subject, words, "make room, or set COOKBOOK_ROOT to another folder")
    elif free_gib < _ROOMY_GIB:
        remedy = f"enough for small models; a run of an 8B model takes about {_ROOMY_GIB} GiB"
        found = warning(subject, words, remedy)
    elif kind in _LOCAL_FILESYSTEMS:
        found = ok(subject, f"{words}; that is a filesystem of one machine: see what nodes report")
    else:
        found = ok(subject, words)
    return [found, *_quota(place, kind)]


def filesystem(place: Path) -> str:
    """Return the kind of filesystem that a folder is on, such as nfs4, lustre or ext4."""
    words = _output(["df", "--output=fstype", str(place)]).split()
    return words[-1] if words else "an unknown filesystem"


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
    words = f"{used / 2**20:.0f} of {limit / 2**20:.0f} GiB of your quota on {where} are used"
    if share > 0.9:
        return [warning("quota", words, "make room, or ask for more, before a long run")]
    return [ok("quota", words)]
