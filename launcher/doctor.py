"""Whether this site can run the kit: Slurm, accounts, files, nodes, environment, hub.

Every check is its own function that returns findings; none hides another, and each that is not ok
says what to do. What only a node can tell is asked of one by a short job (launcher/node_check.py).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from launcher import environment, hub, node_check, paths, slurm
from launcher.checks.scheduler import account_faults
from launcher.cluster import Cluster
from launcher.errors import CookbookError, SlurmFault, SlurmMissing, SlurmTimeout, nearest
from launcher.limits import Rights
from launcher.node_check import Finding, NodeReport, failed, ok, skipped, warning

# An 8B model, its checkpoints with optimizer state and its export come to about this much.
_ROOMY_GIB = 100
_PYTHONS = ((3, 11), (3, 13))
# Filesystems that belong to one machine, as /proc/mounts names them.
_LOCAL_FILESYSTEMS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "f2fs"}


@dataclass(frozen=True)
class Options:
    """How far the doctor goes: every node or one, at most `nodes` of them, and how patient."""

    every_node: bool = False
    nodes: int | None = None
    wait_s: float = 3
    limit_s: float = 20


@dataclass(frozen=True)
class Answer:
    """All findings, and with a node check a row for each node."""

    findings: list[Finding]
    nodes: list[node_check.Row]

    @property
    def failed(self) -> bool:
        return any(finding.state == "failed" for finding in self.findings)


def examine(cluster: Cluster, options: Options) -> Answer:
    """Look at everything and return what was found, in a fixed order."""
    # The hub may take its time to answer, or not answer at all: it is asked meanwhile.
    hub_answer = _Later(lambda: _guarded("hub token", _hub_token))
    findings = [*_guarded("environment", _environment), *_guarded("shared folder", _room, cluster)]
    found, site = _slurm(cluster)
    findings = [*found, *findings]
    rows: list[node_check.Row] = []
    if site is None:
        findings.append(skipped("nodes", "Slurm does not answer, so no node was asked"))
    else:
        about_nodes, rows = _nodes(site, options)
        findings += about_nodes
    return Answer([*findings, *hub_answer.result(4)], rows)


def _guarded(
    check: str, look: Callable[..., Iterable[Finding]], *arguments: object
) -> list[Finding]:
    """Run a check; one that breaks is a finding too, and hides no other."""
    try:
        return list(look(*arguments))
    except CookbookError as error:
        return [failed(check, fault, "") for fault in error.faults]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return [failed(check, f"could not be looked at: {error}", "mend that and try again")]


class _Later:
    """A check that runs meanwhile and is not waited for at exit."""

    def __init__(self, look: Callable[[], list[Finding]]) -> None:
        self._found: list[Finding] = []
        self._thread = threading.Thread(target=lambda: self._found.extend(look()), daemon=True)
        self._thread.start()

    def result(self, timeout_s: float) -> list[Finding]:
        self._thread.join(timeout_s)
        late = skipped("hub token", f"the hub did not answer within {timeout_s:.0f} s")
        return self._found or [late]


# Slurm --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Site:
    """What Slurm told, for the checks that build on it."""

    cluster: Cluster
    configuration: dict[str, str]
    partitions: dict[str, slurm.Partition]
    nodes: list[slurm.Node]
    rights: Rights | None

    @property
    def partition(self) -> str | None:
        """The partition that jobs go to unless they say otherwise."""
        named = self.cluster.resources.get("partition")
        if named:
            return str(named).split(",")[0]
        return next((each.name for each in self.partitions.values() if each.default), None)

    @property
    def own_nodes(self) -> list[slurm.Node]:
        return [node for node in self.nodes if node.partition == self.partition]

    def request(self, nodes: list[slurm.Node], gpus: int) -> list[str]:
        """Return srun's options for these nodes as the site wants jobs to be asked for."""
        resources = self.cluster.resources
        keys = ("account", "qos", "constraint", "reservation")
        options = [f"--{key}={resources[key]}" for key in keys if resources.get(key)]
        if self.partition:
            options.append(f"--partition={self.partition}")
        if nodes:
            options.append(f"--nodelist={','.join(node.name for node in nodes)}")
        return [*options, *self.gpu_request(gpus)]

    def gpu_request(self, gpus: int) -> list[str]:
        kind = self.cluster.resources.get("gpu_type")
        wanted = f"{kind}:{gpus}" if kind else str(gpus)
        if not gpus or self.cluster.gpu_request == "none":
            return []
        if self.cluster.gpu_request == "gres":
            return [f"--gres=gpu:{wanted}"]
        return [f"--gpus-per-node={wanted}"]


def _slurm(cluster: Cluster) -> tuple[list[Finding], _Site | None]:
    """Ask the controller; where it does not answer, say what therefore stays unknown."""
    try:
        controllers = slurm.controllers()
        configuration = slurm.configuration()
        rights = slurm.rights(configuration)
        site = _Site(cluster, configuration, slurm.partitions(), slurm.nodes(), rights)
    except SlurmFault as fault:
        # The other two kinds say themselves what to do.
        plain = not isinstance(fault, (SlurmMissing, SlurmTimeout))
        remedy = "see whether scontrol ping answers" if plain else ""
        unknown = "Slurm does not answer, so this is not known"
        checks = ("partitions", "accounting", "site's settings", "trial job", "MUNGE")
        unseen = [skipped(check, unknown) for check in checks]
        return [*(failed("Slurm", each, remedy) for each in fault.faults), *unseen], None
    return [
        *_controllers(controllers, configuration),
        *_guarded("partitions", _partitions, site),
        *_guarded("accounting", _accounting, site),
        *_guarded("site's settings", _site_settings, site),
        *_guarded("trial job", _trial_job, site),
        *_guarded("MUNGE", _munge, site),
    ], site


def _controllers(controllers: dict[str, bool], configuration: dict[str, str]) -> list[Finding]:
    up = [host for host, answers in controllers.items() if answers]
    down = [host for host, answers in controllers.items() if not answers]
    version = configuration.get("SLURM_VERSION", "of an unknown version")
    text = f"Slurm {version} of {configuration.get('ClusterName', '?')} answers"
    text += f" from {', '.join(up)}" if up else ""
    if down:
        remedy = "tell the administrators; jobs go on as long as one answers"
        return [warning("Slurm", f"{text}; controller {', '.join(down)} is down", remedy)]
    return [ok("Slurm", text)]


def _partitions(site: _Site) -> list[Finding]:
    if not site.partitions:
        remedy = "ask the site's administrators for access to one"
        return [failed("partitions", "you may see no partition", remedy)]
    found = []
    for partition in site.partitions.values():
        nodes = [node for node in site.nodes if node.partition == partition.name]
        gpus = Counter(
            f"{count} x {kind}" if kind else f"{count} GPUs"
            for node in nodes
            for kind, count in node.gpus.items()
        )
        each = ", ".join(f"{count} with {gpu}" for gpu, count in sorted(gpus.items()))
        text = f"{partition.name}{' (default)' if partition.default else ''}: {len(nodes)} nodes"
        text += f" ({each})" if each else " without GPUs"
        text += f", time limit {partition.time_limit}"
        text += f", {sum(node.state.startswith('idle') for node in nodes)} idle"
        out = [node for node in nodes if not node.usable]
        if nodes and len(out) == len(nodes):
            state = f"{text}; none is usable ({out[0].state}: {out[0].reason})"
            found.append(warning("partitions", state, "wait, or choose another --partition"))
        else:
            found.append(ok("partitions", text + (f"; {len(out)} not usable" if out else "")))
    return found


def _accounting(site: _Site) -> list[Finding]:
    if not slurm.keeps_accounting(site.configuration):
        text = "this cluster keeps none; runs keep their own records, so nothing is missed"
        return [ok("accounting", text)]
    rights = site.rights
    if rights is None:
        text = "this cluster keeps it, and sacctmgr does not answer here"
        return [warning("accounting", text, "tell the administrators; runs do without")]
    if not rights.mine:
        remedy = "ask the administrators for an account"
        if "associations" in rights.enforced:
            text = "you have no account, and jobs without one are refused"
            return [failed("accounting", text, remedy)]
        text = "it answers, and knows no account of yours; jobs run without one"
        return [ok("accounting", text)]
    mine = sorted({f"{each.account}{' (default)' * each.default}" for each in rights.mine})
    qos = sorted({name for each in rights.mine for name in each.qos})
    text = f"it answers; your accounts: {', '.join(mine)}; QoS: {', '.join(qos) or 'none'}"
    limited = "limits are enforced" if "limits" in rights.enforced else "no limits are enforced"
    return [ok("accounting", f"{text}; {limited}")]


def _site_settings(site: _Site) -> list[Finding]:
    """Whether the partition, account and QoS of the site's file exist."""
    resources, check = site.cluster.resources, "site's settings"
    origin = f"configs/clusters/{site.cluster.name}.yaml"
    asked = {key: resources.get(key) for key in ("partition", "account", "qos")}
    named = ", ".join(f"{key} {value}" for key, value in asked.items() if value)
    if not named:
        text = "the site's file names no partition, account or QoS; Slurm's own defaults count"
        return [ok(check, text)]
    found = [
        failed(
            check,
            f"there is no partition {name!r}{nearest(name, site.partitions)}",
            f"mend {origin}; there are {', '.join(site.partitions)}",
        )
        for name in str(asked["partition"] or "").split(",")
        if name and name not in site.partitions
    ]
    account, qos = (str(asked[key]) if asked[key] else None for key in ("account", "qos"))
    for fault in account_faults(site.rights, account, qos):
        found.append(failed(check, fault, f"mend {origin}"))
    return found or [ok(check, f"{named} of {origin}")]


def _trial_job(site: _Site) -> list[Finding]:
    """Ask sbatch itself about a job on one whole node, with all that the site's file asks for."""
    resources = site.cluster.resources
    gpus = max((sum(node.gpus.values()) for node in site.own_nodes), default=0)
    options = ["--nodes=1", "--ntasks-per-node=1", *site.gpu_request(gpus)]
    keys = ("partition", "account", "qos", "constraint", "reservation", "exclude", "mem", "time")
    options += [f"--{key}={resources[key]}" for key in keys if resources.get(key) is not None]
    if resources.get("exclusive"):
        options.append("--exclusive")
    script = "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options), "true\n"])
    try:
        return [ok("trial job", slurm.test_only(script).removeprefix("sbatch: "))]
    except SlurmFault as fault:
        remedy = f"mend resources: in configs/clusters/{site.cluster.name}.yaml"
        text = f"{fault.faults[0]} to sbatch --test-only {' '.join(options)}"
        return [failed("trial job", text, remedy)]


def _munge(site: _Site) -> list[Finding]:
    kind = site.configuration.get("AuthType", "auth/munge")
    if kind != "auth/munge":
        return [skipped("MUNGE", f"this cluster signs with {kind}")]
    try:
        slurm.munge(site.configuration)
    except SlurmFault as fault:
        remedy = "tell the administrators: munged must run here with the cluster's key"
        return [failed("MUNGE", fault.faults[0], remedy)]
    return [ok("MUNGE", "a credential signed here is read back")]


# Nodes --------------------------------------------------------------------------------------


def _nodes(site: _Site, options: Options) -> tuple[list[Finding], list[node_check.Row]]:
    """Ask one node, or every usable node of the partition, by one short job."""
    usable = [node for node in site.own_nodes if node.usable]
    chosen = usable[: options.nodes] if options.every_node else []
    count = len(chosen) if options.every_node else 1
    if not usable:
        text = f"partition {site.partition} has no usable node to ask"
        return [skipped("nodes", text, "try again later, or with another --cluster")], []
    known = [sum(node.gpus.values()) for node in (chosen or usable)]
    gpus = min(known) if options.every_node else min(1, min(known))
    question = node_check.Question(
        cluster=site.cluster,
        options=site.request(chosen, gpus),
        nodes=count,
        full=options.every_node,
        cuda=torch_build()[1],
        gpus_per_node=gpus,
        wait_s=options.wait_s,
        limit_s=options.limit_s + (options.wait_s if options.every_node else 0),
    )
    try:
        step, reports = node_check.ask(question)
    except CookbookError as error:
        remedy = "mend that, or set COOKBOOK_ROOT to another folder"
        return [failed("nodes", fault, remedy) for fault in error.faults], []
    if step.pending:
        text = f"a job on {count} node(s) of {site.partition} did not start within"
        remedy = "ask again when the queue is shorter, or wait longer with --wait SECONDS"
        return [skipped("nodes", f"{text} {options.wait_s:.0f} s and was withdrawn", remedy)], []
    if not reports:
        words = step.words or f"srun ended with status {step.exit_code} without a word"
        remedy = "type that srun by hand: srun --nodes=1 hostname"
        return [failed("nodes", f"no node could be asked: {words}", remedy)], []
    return _about(reports, question, site, chosen)


def _about(
    reports: list[NodeReport],
    question: node_check.Question,
    site: _Site,
    chosen: list[slurm.Node],
) -> tuple[list[Finding], list[node_check.Row]]:
    """Return the findings of all nodes, good news once, and the table of a node check."""
    found = [finding for report in reports for finding in _of_node(report, question)]
    silent = {node.name for node in chosen} - {report.name for report in reports}
    found += [failed("nodes", f"{name} did not answer", f"exclude {name}") for name in silent]
    if not question.full:
        return found, []
    found.append(node_check.all_reduce(reports))
    asked = {node.name for node in chosen}
    others = {
        node.name: f"not asked: {node.state}"
        + (f" ({node.reason})" if node.reason not in ("", "none") else "")
        for node in site.own_nodes
        if node.name not in asked
    }
    others |= dict.fromkeys(silent, "no answer")
    # What every node said alike is told by the table.
    found = [finding for finding in found if finding.state != "ok" or finding.check == "all-reduce"]
    found = node_check.joined(found, [report.name for report in reports])
    summary = ok(
        "nodes", f"{len(reports)} of {len(site.own_nodes)} nodes of {site.partition} asked"
    )
    return [summary, *found], node_check.rows(reports, others)


def _of_node(report: NodeReport, question: node_check.Question) -> list[Finding]:
    found = node_check.findings(report, question)
    if not report.yes("finished"):
        text = f"{report.name} began to answer and did not finish in time"
        found = [finding for finding in found if finding.state == "ok"]
        found.append(failed("nodes", text, f"leave the node out: resources.exclude={report.name}"))
    return found


# This machine -------------------------------------------------------------------------------


def torch_build() -> tuple[str | None, str | None]:
    """Return the environment's torch version and its CUDA version, read without importing it."""
    packages = environment.site_packages()
    file = packages / "torch" / "version.py" if packages else None
    if file is None or not file.is_file():
        return None, None
    text = file.read_text(encoding="utf-8")
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda[^=\n]*= '([^']+)'", text, re.MULTILINE)
    return (version.group(1) if version else None), (cuda.group(1) if cuda else None)


def _environment() -> list[Finding]:
    """Look at the environment's files; what importing them does, a node tells."""
    venv, packages = paths.venv_root(), environment.site_packages()
    check, remedy = "environment", "bash setup.sh"
    if packages is None or not environment.python().exists():
        return [failed(check, f"there is no environment at {venv}", remedy)]
    found = []
    version = tuple(map(int, packages.parent.name.removeprefix("python").split(".")))
    if not _PYTHONS[0] <= version <= _PYTHONS[1]:
        text = f"{venv} has Python {packages.parent.name.removeprefix('python')}"
        found.append(failed(check, text, "bash setup.sh with COOKBOOK_PYTHON=python3.11"))
    if not (venv / ".cookbook-setup").is_file():
        text = f"setup.sh has not finished {venv}, or did not make it"
        found.append(warning(check, text, remedy))
    installed = {
        _normal(name): version.partition("+")[0] for name, version in environment.packages().items()
    }
    pinned = _pinned(paths.REPO_ROOT / "constraints.txt")
    # Another build of torch than the pinned one is what setup.sh --torch is for.
    other = sorted(
        f"{name} {installed[name]} (pinned {pin})"
        for name, pin in pinned.items()
        if name in installed and name != "torch" and installed[name] != pin
    )
    if other:
        text = f"{venv} has other versions than constraints.txt: {', '.join(other[:5])}"
        text += f" and {len(other) - 5} more" if len(other) > 5 else ""
        found.append(warning(check, text, remedy))
    missing = [name for name in ("torch", "torchtune", "tensorboard") if name not in installed]
    if missing:
        found.append(failed(check, f"{venv} lacks {', '.join(missing)}", remedy))
    if found:
        return found
    torch, cuda = torch_build()
    text = f"{venv}: Python {packages.parent.name.removeprefix('python')}, torch {torch} for "
    text += f"{f'CUDA {cuda}' if cuda else 'CPUs'}, TensorBoard {installed['tensorboard']}; "
    return [ok(check, text + "packages as pinned")]


def _pinned(file: Path) -> dict[str, str]:
    """Return the pins of constraints.txt."""
    pins = re.findall(r"^([A-Za-z0-9._-]+)==([^ ;#\n]+)", file.read_text(encoding="utf-8"), re.M)
    return {_normal(name): version for name, version in pins}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _room(cluster: Cluster) -> list[Finding]:
    """Free room and quota where runs and models go; whether it is shared, a node tells."""
    root, check = cluster.root, "shared folder"
    remedy = "set COOKBOOK_ROOT, or shared_root in the site's file, to a folder of yours"
    place = root
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        return [failed(check, f"you may not write to {place}", remedy)]
    free_gib = shutil.disk_usage(place).free / 2**30
    kind = filesystem(place)
    text = f"{root} lies on {kind} with {free_gib:.0f} GiB free"
    found = [quota for quota in [_quota(place, kind)] if quota]
    if free_gib < 1:
        return [failed(check, text, "make room, or set COOKBOOK_ROOT to another folder"), *found]
    if free_gib < _ROOMY_GIB:
        note = f"enough for small models; an 8B run takes about {_ROOMY_GIB} GiB"
        return [warning(check, text, note), *found]
    if kind in _LOCAL_FILESYSTEMS:
        text += "; that is a filesystem of one machine, so see what the nodes say"
    return [ok(check, text), *found]


def filesystem(place: Path) -> str:
    """Return the kind of filesystem that a folder lies on, such as nfs4, lustre or ext4."""
    best, kind = "", "an unknown filesystem"
    real = place.resolve()
    for line in Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
        _, where, name, *_ = line.split(" ")
        mount = re.sub(r"\\(\d{3})", lambda match: chr(int(match.group(1), 8)), where)
        if real.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, name
    return kind


def _quota(place: Path, kind: str) -> Finding | None:
    """Say how full your quota is, where the filesystem tells and there is one."""
    user = os.environ.get("USER") or str(os.getuid())
    lustre = kind == "lustre"
    argv = ["lfs", "quota", "-q", "-u", user, str(place)] if lustre else ["quota", "-w", "-p"]
    if shutil.which(argv[0]) is None or (not lustre and kind in ("overlay", "tmpfs")):
        return None
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=3)
    fullest = None
    for words in (line.split() for line in done.stdout.splitlines()):
        # Path or device, then KiB used (with a * where over), soft and hard limit.
        numbers = [word.rstrip("*") for word in words[1:4]]
        if len(numbers) == 3 and all(number.isdigit() for number in numbers):
            used, soft, hard = map(int, numbers)
            if soft or hard:
                share = used / (soft or hard)
                fullest = max(fullest or (0.0, "", 0, 0), (share, words[0], used, soft or hard))
    if fullest is None:
        return None
    share, where, used, limit = fullest
    text = f"{used / 2**20:.0f} of {limit / 2**20:.0f} GiB of your quota on {where} are used"
    if share > 0.9:
        return warning("quota", text, "make room, or ask for more, before a long run")
    return ok("quota", text)


def _hub_token() -> list[Finding]:
    return [hub.token_finding()]


def as_rows(findings: list[Finding]) -> list[dict[str, str]]:
    """Return findings for a program to read."""
    return [
        {"check": each.check, "state": each.state, "text": each.text, "remedy": each.remedy}
        for each in findings
    ]


def every_node(nodes: int | None, wait_s: float | None) -> Options:
    """Return the options of a node check; imports on a cold filesystem take a minute."""
    return replace(Options(), every_node=True, nodes=nodes, wait_s=wait_s or 60, limit_s=300)
