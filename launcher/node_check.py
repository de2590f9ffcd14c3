"""What a short job finds out about the nodes: shared files, clocks, Python, GPUs, network, disk."""

from __future__ import annotations

import contextlib
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher import paths, slurm
from launcher.cluster import Cluster
from launcher.errors import PreflightFault

SCRIPT = paths.REPO_ROOT / "slurm" / "node_check.sh"

# munged refuses what is older than five minutes; ages and time limits go wrong much earlier.
_SKEW_WARNING_S, _SKEW_FAULT_S = 2.0, 60.0
# What compiled kernels, downloads' temporary files and the like take.
_LOCAL_DISK_GIB = 10
# The oldest driver that runs a CUDA release, by NVIDIA's table of minor version compatibility.
_DRIVER_OF_CUDA = {11: 450, 12: 525, 13: 580}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; state is ok, warning, failed or skipped."""

    check: str
    state: str
    text: str
    remedy: str = ""

    @property
    def line(self) -> str:
        return f"{self.text}: {self.remedy}" if self.remedy else self.text


def ok(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def warning(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, "warning", text, remedy)


def failed(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, "failed", text, remedy)


def skipped(check: str, text: str, remedy: str = "") -> Finding:
    return Finding(check, "skipped", text, remedy)


@dataclass
class NodeReport:
    """What one node told; a key may stand several times."""

    name: str
    told: dict[str, list[str]] = field(default_factory=dict)
    skew_s: float = 0.0
    seen_here: bool = False

    def one(self, key: str, default: str = "") -> str:
        return self.told.get(key, [default])[0]

    def yes(self, key: str) -> bool:
        return self.one(key) == "yes"

    @property
    def interfaces(self) -> list[str]:
        """Names of the interfaces that are not down."""
        pairs = (each.partition(" ") for each in self.told.get("interface", []))
        return [name for name, _, state in pairs if state != "down"]

    @property
    def disk_gib(self) -> float | None:
        kib = self.one("disk").rpartition(" ")[2]
        return int(kib) / 2**20 if kib.isdigit() else None

    @property
    def gpus(self) -> list[list[str]]:
        """index, name, memory in MiB, driver and uncorrected ECC errors of each GPU."""
        rows = [[cell.strip() for cell in row.split(",")] for row in self.told.get("gpu", [])]
        return [row for row in rows if len(row) == 5]


@dataclass(frozen=True)
class Question:
    """What is to be found out where: on `nodes` nodes that the options name."""

    cluster: Cluster
    options: Sequence[str]
    nodes: int
    full: bool
    cuda: str | None
    gpus_per_node: int
    wait_s: float
    limit_s: float


def ask(question: Question) -> tuple[slurm.Step, list[NodeReport]]:
    """Run the node check as one job and return what Slurm and the nodes told.

    A folder in the shared root proves that it is shared; it is removed again.
    """
    token = f"cookbook-doctor-{secrets.token_hex(4)}"
    folder = question.cluster.root / f".{token}"
    made = [each for each in folder.parents if not each.exists()]
    try:
        folder.mkdir(mode=0o700, parents=True)
        (folder / "from_login").write_text(token)
        # slurm/node.sh takes a folder with this file for a run's.
        (folder / "recipe.yaml").touch()
    except OSError as error:
        raise PreflightFault(f"cannot write {folder}: {error.strerror}") from error
    options = [f"--job-name={token}", f"--nodes={question.nodes}", *question.options]
    try:
        step = slurm.run_on_nodes(
            options, _script(question, folder), question.wait_s, question.limit_s
        )
        reports = _reports(step)
        _look_for_answers(folder, reports)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):  # not empty: somebody has begun to use it
                parent.rmdir()
    return step, reports


def _script(question: Question, folder: Path) -> str:
    use_gpus = bool(question.cuda and question.gpus_per_node)
    values = {
        "SHARED": folder,
        "VENV": paths.venv_root(),
        "COOKBOOK": paths.REPO_ROOT,
        "FULL": "yes" if question.full else "no",
        "NODES": question.nodes,
        "RANKS_PER_NODE": question.gpus_per_node if use_gpus else 1,
        "ACCELERATOR": "cuda" if use_gpus else "cpu",
    }
    # As in a job script: the site's own variables and lines come before everything else.
    lines = [f"export {k}={shlex.quote(v)}" for k, v in question.cluster.environment.items()]
    interface = question.cluster.network_interface
    if interface:
        lines += [
            f"export {key}={shlex.quote(interface)}"
            for key in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
        ]
    lines += question.cluster.job_setup
    lines += [f"{key}={shlex.quote(str(value))}" for key, value in values.items()]
    return "\n".join([*lines, SCRIPT.read_text(encoding="utf-8")])


def _reports(step: slurm.Step) -> list[NodeReport]:
    """Sort lines such as '1: @ key value' by the task that wrote them."""
    reports: dict[str, NodeReport] = {}
    for stamp, line in step.lines:
        found = re.match(r" *(\d+): @ (\S+) ?(.*)\Z", line)
        if not found:
            continue
        task, key, value = found.groups()
        if key == "node":
            reports[task] = NodeReport(value)
        elif task in reports:
            reports[task].told.setdefault(key, []).append(value)
            if key == "time" and value.isdigit():
                reports[task].skew_s = int(value) / 1000 - stamp
    return sorted(reports.values(), key=lambda report: _natural(report.name))


def _natural(name: str) -> list[tuple[int, str]]:
    """Order n2 before n10."""
    return [(int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


def _look_for_answers(folder: Path, reports: list[NodeReport]) -> None:
    """See whether the nodes' files show here, giving a network filesystem some seconds."""
    deadline = time.monotonic() + 5
    while True:
        for report in reports:
            report.seen_here = (folder / f"from_{report.name}").is_file()
        late = [each for each in reports if each.yes("shared_write") and not each.seen_here]
        if not late or time.monotonic() > deadline:
            return
        time.sleep(0.2)


# What it means ------------------------------------------------------------------------------


def findings(report: NodeReport, question: Question) -> list[Finding]:
    """Return what a node's report says about it, a finding for each thing that was looked at."""
    return [
        _files(report, question.cluster),
        _clock(report),
        _python(report),
        _compiler(report),
        _gpus(report, question.cuda, question.gpus_per_node),
        *_faulty_gpus(report),
        _network(report, question.cluster.network_interface),
        _disk(report),
    ]


def _files(report: NodeReport, cluster: Cluster) -> Finding:
    root, name = cluster.root, report.name
    remedy = (
        "set COOKBOOK_ROOT, or shared_root in the site's file, to a folder that all nodes mount"
    )
    if not report.yes("shared_read"):
        return failed("shared files", f"{name} does not see what was written to {root}", remedy)
    if not report.yes("shared_write"):
        return failed("shared files", f"{name} cannot write to {root}", remedy)
    if not report.seen_here:
        return failed("shared files", f"what {name} wrote to {root} does not show here", remedy)
    if not report.yes("checkout"):
        text = f"{name} does not see the checkout {paths.REPO_ROOT}"
        return failed("shared files", text, "keep it on a filesystem that all nodes mount")
    return ok("shared files", f"{root} is the same here and on {name}, both ways")


def _clock(report: NodeReport) -> Finding:
    skew, name = report.skew_s, report.name
    text = f"{name} is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this machine"
    remedy = "ask the site's administrators to see to NTP on both"
    if abs(skew) >= _SKEW_FAULT_S:
        return failed("clock", text, remedy)
    if abs(skew) >= _SKEW_WARNING_S:
        return warning("clock", text, remedy)
    return ok("clock", f"{name} and this machine agree within {_SKEW_WARNING_S:.0f} s")


def _python(report: NodeReport) -> Finding:
    venv, name, packages = paths.venv_root(), report.name, report.one("packages")
    if report.one("python", "missing") == "missing":
        return failed(
            "environment",
            f"{name} does not see {venv}/bin/python, or the Python that it was made with",
            "keep COOKBOOK_VENV and that Python on a filesystem that all nodes mount",
        )
    if packages.startswith("fault "):
        text = f"Python on {name} says {packages.removeprefix('fault ')!r}"
        return failed("environment", text, "run on that node's kind: bash setup.sh")
    if packages.startswith("missing "):
        text = f"{venv} on {name} lacks {packages.removeprefix('missing ')}"
        return failed("environment", text, "bash setup.sh")
    took = int(report.one("import_ms", "0")) / 1000
    text = f"Python {report.one('python')} of {venv} runs on {name}; {packages} ({took:.1f} s)"
    return ok("environment", text)


def _compiler(report: NodeReport) -> Finding:
    kind, _, what = report.one("compiler", "none").partition(" ")
    name = report.name
    if kind == "found":
        return ok("compiler", f"{name} can compile ({what}), as recipes with compile: true do")
    lacks = what if kind == "headers" else "a C compiler"
    return warning(
        "compiler",
        f"{name} lacks {lacks}: recipes with compile: true go on uncompiled there, and slower",
        "ask for gcc and python3-dev on the nodes, or load a module by the site's job_setup",
    )


def _gpus(report: NodeReport, cuda: str | None, expected: int) -> Finding:
    tool, name, gpus = report.one("gpu_tool"), report.name, report.gpus
    if not expected:
        return skipped("GPUs", f"Slurm knows of no GPU on {name}")
    if tool == "none":
        text = f"{name} has no nvidia-smi, though Slurm gives out GPUs there"
        return warning("GPUs", text, "no remedy where they are stand-ins; else ask for a driver")
    if not gpus:
        text = f"nvidia-smi on {name} shows no GPU ({tool.removeprefix('fault ')})"
        return failed("GPUs", text, f"leave the node out: resources.exclude={name}")
    _, kind, mib, driver, _ = gpus[0]
    memory = f"{int(mib) / 1024:.0f} GiB" if mib.isdigit() else "memory unknown"
    shown = f"{name} shows {len(gpus)} x {kind}, {memory}, driver {driver}"
    if len(gpus) < expected:
        text = f"{shown}, and the job asked for {expected}"
        return failed("GPUs", text, f"leave the node out: resources.exclude={name}")
    if cuda is None:
        return failed(
            "GPUs",
            f"{shown}; this environment's torch is built for CPUs",
            "bash setup.sh --torch VERSION --torch-index URL (PyTorch's install page shows both)",
        )
    oldest = _DRIVER_OF_CUDA.get(int(cuda.partition(".")[0]), 0)
    newest = driver.partition(".")[0]
    if newest.isdigit() and int(newest) < oldest:
        return failed(
            "GPUs",
            f"{shown}; torch is built for CUDA {cuda}, which wants driver {oldest} or newer",
            "bash setup.sh --torch VERSION --torch-index URL with a build for an older CUDA",
        )
    return ok("GPUs", f"{shown}; torch is built for CUDA {cuda}")


def _faulty_gpus(report: NodeReport) -> list[Finding]:
    remedy = f"leave the node out (resources.exclude={report.name}) and tell the administrators"
    found = [
        failed("GPUs", f"GPU {gpu[0]} of {report.name} has {gpu[4]} uncorrected ECC errors", remedy)
        for gpu in report.gpus
        if gpu[4].isdigit() and int(gpu[4]) > 0
    ]
    if "xid" in report.told:
        text = f"the kernel of {report.name} logged {report.one('xid')!r}"
        found.append(warning("GPUs", text, remedy))
    return found


def _network(report: NodeReport, wanted: str | None) -> Finding:
    name, up = report.name, report.interfaces
    shown = f"{name} has {', '.join(up) or 'no interface but lo'}"
    devices = report.told.get("infiniband", [])
    down = [each for each in devices if " ACTIVE" not in each]
    shown += f"; InfiniBand: {', '.join(devices)}" if devices else "; no InfiniBand devices"
    if wanted and not any(_selects(wanted, each) for each in up):
        text = f"network_interface {wanted} is not up on {name}, which has {', '.join(up)}"
        return failed("network", text, "mend it in the site's file, or leave it out")
    if down:
        text = f"an InfiniBand port of {name} is not active: {', '.join(down)}"
        return warning("network", text, "ask the administrators; NCCL will use what is left")
    return ok("network", shown)


def _selects(wanted: str, interface: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME takes it: prefixes; with ^ all but these, with = whole names."""
    names = wanted.lstrip("^=").split(",")
    exact = "=" in wanted[:2]
    hit = any(interface == each or (not exact and interface.startswith(each)) for each in names)
    return hit != wanted.startswith("^")


def _disk(report: NodeReport) -> Finding:
    folder, free = report.one("disk").rpartition(" ")[0], report.disk_gib
    if free is None:
        text = f"{report.name} cannot tell how full {folder} is"
        return warning("local disk", text, "set TMPDIR in the site's environment: block")
    text = f"{folder} on {report.name} has {free:.0f} GiB free for caches"
    if free < _LOCAL_DISK_GIB:
        return warning("local disk", text, "set TMPDIR in the site's environment: block")
    return ok("local disk", text)


def all_reduce(reports: list[NodeReport]) -> Finding:
    """Return what the all-reduce over all nodes came to."""
    done = next((each.one("all_reduce") for each in reports if "all_reduce" in each.told), None)
    if done:
        ranks, mib, seconds, bandwidth = done.split()
        return ok(
            "all-reduce",
            f"{ranks} ranks on {len(reports)} nodes: {mib} MiB in {float(seconds) * 1000:.1f} ms, "
            f"{bandwidth} GB/s bus bandwidth",
        )
    faults = [
        f"{each.name}: {each.one('all_reduce_fault')}"
        for each in reports
        if "all_reduce_fault" in each.told
    ]
    return failed(
        "all-reduce",
        " | ".join(faults) or "the nodes did not finish it",
        "mend what the nodes say; where they do not reach each other, try network_interface in "
        "the site's file",
    )


# Stands for the node's name in what several nodes say alike.
_NODE = "\0"


def joined(found: list[Finding], nodes: list[str]) -> list[Finding]:
    """Return findings that differ by the node's name alone as one, which names all the nodes."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for each in found:
        name = next((node for node in nodes if re.search(rf"\b{re.escape(node)}\b", each.text)), "")
        pattern = re.compile(rf"\b{re.escape(name)}\b") if name else re.compile(r"(?!)")
        key = (
            each.check,
            each.state,
            pattern.sub(_NODE, each.text),
            pattern.sub(_NODE, each.remedy),
        )
        alike.setdefault(key, []).append(name)
    return [
        Finding(
            check,
            state,
            text.replace(_NODE, ",".join(names)),
            remedy.replace(_NODE, ",".join(names)),
        )
        for (check, state, text, remedy), names in alike.items()
    ]


# A node as the table shows it, by column.
Row = dict[str, str]

_COLUMNS = ("node", "reached", "files", "skew", "python", "import", "gpus", "disk", "network")


def rows(reports: list[NodeReport], others: dict[str, str]) -> list[Row]:
    """Return a row for each node; others are those without a report, and why."""
    found = [_row(report) for report in reports]
    return found + [
        {"node": name, "reached": why}
        for name, why in sorted(others.items(), key=lambda item: _natural(item[0]))
    ]


def _row(report: NodeReport) -> Row:
    both_ways = report.yes("shared_read") and report.seen_here and report.yes("checkout")
    gpus, free, packages = report.gpus, report.disk_gib, report.one("packages", "fault")
    took = int(report.one("import_ms", "0")) / 1000
    values = (
        report.name,
        "yes" if report.yes("finished") else "in part",
        "shared" if both_ways else "NOT SHARED",
        f"{report.skew_s:+.1f} s",
        report.one("python", "-"),
        "failed" if packages.startswith(("fault", "missing")) else f"{took:.1f} s",
        f"{len(gpus)} x {gpus[0][1]}" if gpus else f"{report.one('gpus_given', '0')} by Slurm",
        "-" if free is None else f"{free:.0f} GiB",
        ",".join(report.interfaces) or "-",
    )
    return dict(zip(_COLUMNS, values, strict=True))


def table(nodes: list[Row]) -> list[str]:
    """Return rows as lines under a head."""
    whole = [row for row in nodes if len(row) == len(_COLUMNS)]
    widths = [max([len(name), *(len(row[name]) for row in whole)]) for name in _COLUMNS]
    head = [name.upper() for name in _COLUMNS]
    lines = [head, *([row.get(name, "") for name in _COLUMNS] for row in nodes)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
