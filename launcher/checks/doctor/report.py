"""What nodes' reports mean: files, clock, Python, GPUs, network, disk, and the all-reduce."""

from launcher import paths
from launcher.checks import Finding, failed, ok, skipped, warning
from launcher.checks.doctor.ask import NodeReport, Question
from launcher.site import Site

# munged refuses what is older than five minutes; ages and time limits go wrong much earlier.
_SKEW_WARNING_S, _SKEW_FAULT_S = 2.0, 60.0
# What compiled kernels, downloads' temporary files and the like take.
_LOCAL_DISK_GIB = 10
# The oldest driver that runs a CUDA release, by NVIDIA's table of minor version compatibility.
_DRIVER_OF_CUDA = {11: 450, 12: 525, 13: 580}
_SETUP = "bash setup.sh --torch VERSION --torch-index URL"


def node_findings(report: NodeReport, question: Question) -> list[Finding]:
    """Return one finding for each thing that the node was asked about."""
    found = [
        *_setup(report, question.cluster),
        _files(report, question.cluster),
        _clock(report),
        _python(report),
        _compiler(report),
        _gpus(report, question.cuda, question.gpus_per_node),
        *_faulty_gpus(report),
        _network(report, question.cluster.network_interface),
        _disk(report),
    ]
    if report.yes("finished"):
        return found
    words = f"{report.name} began to answer and did not finish in time"
    late = failed("nodes", words, f"exclude it: resources.exclude={report.name}")
    return [*(finding for finding in found if finding.state == "ok"), late]


def _setup(report: NodeReport, cluster: Site) -> list[Finding]:
    if not cluster.job_setup:
        return []
    count = len(cluster.job_setup)
    if "setup_fault" not in report.values:
        words = f"{count} line{'s' * (count > 1)} of the site file succeeded on {report.name}"
        return [ok("job_setup", words)]
    status, _, line = report.one("setup_fault").partition(" ")
    words = f"{line} failed on {report.name} with exit status {status}"
    return [failed("job_setup", words, "fix that line: it would end every run")]


def _files(report: NodeReport, cluster: Site) -> Finding:
    root, name, subject = cluster.root, report.name, "shared files"
    if not report.yes("shared_read"):
        words = f"{name} does not see what was written to {root}"
    elif not report.yes("shared_write"):
        words = f"{name} cannot write to {root}"
    elif not report.seen_here:
        words = f"this machine does not see what {name} wrote to {root}"
    elif not report.yes("checkout"):
        words = f"{name} does not see the checkout {paths.REPO_ROOT}"
        return failed(subject, words, "keep it on a filesystem that all nodes mount")
    else:
        return ok(subject, f"{root} is the same here and on {name}, in both directions")
    remedy = "set COOKBOOK_ROOT, or shared_root in the site file, to a folder that all nodes mount"
    return failed(subject, words, remedy)


def _clock(report: NodeReport) -> Finding:
    skew, name = report.skew_s, report.name
    if abs(skew) < _SKEW_WARNING_S:
        return ok("clock", f"{name} and this machine agree within {_SKEW_WARNING_S:.0f} s")
    words = f"{name} is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this machine"
    find = failed if abs(skew) >= _SKEW_FAULT_S else warning
    return find("clock", words, "ask the site's administrators to check NTP on both")


def _python(report: NodeReport) -> Finding:
    venv, name, subject = paths.venv_root(), report.name, "virtual environment"
    if report.one("python", "missing") == "missing":
        words = f"{name} does not see {venv}/bin/python, or the Python that it was made with"
        remedy = "keep COOKBOOK_VENV and that Python on a filesystem that all nodes mount"
        return failed(subject, words, remedy)
    kind, _, what = report.one("packages").partition(" ")
    if kind == "fault":
        words = f"Python on {name} says {what!r}"
        return failed(subject, words, "run on a node of that kind: bash setup.sh")
    if kind == "missing":
        return failed(subject, f"{venv} on {name} lacks {what}", "bash setup.sh")
    words = f"Python {report.one('python')} of {venv} runs on {name}; {report.one('packages')}"
    return ok(subject, f"{words} ({report.import_s:.1f} s)")


def _compiler(report: NodeReport) -> Finding:
    kind, _, what = report.one("compiler", "none").partition(" ")
    name = report.name
    if kind == "found":
        return ok("compiler", f"{name} has {what}, for recipes with compile: true")
    words = f"{name} lacks {what if kind == 'headers' else 'a C compiler'}: recipes with compile: "
    remedy = "ask for gcc and python3-dev on the nodes, or load a module in the site's job_setup"
    return warning("compiler", f"{words}true run there uncompiled, and slower", remedy)


def _gpus(report: NodeReport, cuda: str | None, expected: int) -> Finding:
    """Check what nvidia-smi shows against the job's request and torch's CUDA version."""
    tool, name, found = report.one("gpu_tool"), report.name, report.gpus
    exclude = f"exclude the node: resources.exclude={name}"
    if not expected:
        return skipped("GPUs", f"Slurm lists no GPU on {name}")
    if tool == "none":
        words = f"{name} has no nvidia-smi, though Slurm lists GPUs there"
        return warning("GPUs", words, "ask for a driver, unless the GPUs are stand-ins for tests")
    if not found:
        words = f"nvidia-smi on {name} shows no GPU ({tool.removeprefix('fault ')})"
        return failed("GPUs", words, exclude)
    _, kind, mib, driver, _ = found[0]
    memory = f"{int(mib) / 1024:.0f} GiB" if mib.isdigit() else "memory unknown"
    shown = f"{name} shows {len(found)} x {kind}, {memory}, driver {driver}"
    if len(found) < expected:
        return failed("GPUs", f"{shown}, and the job asked for {expected}", exclude)
    if cuda is None:
        remedy = f"{_SETUP} (PyTorch's install page shows both)"
        return failed("GPUs", f"{shown}; the installed torch is built for CPUs", remedy)
    oldest = _DRIVER_OF_CUDA.get(int(cuda.partition(".")[0]), 0)
    newest = driver.partition(".")[0]
    if newest.isdigit() and int(newest) < oldest:
        words = f"{shown}; torch is built for CUDA {cuda}, which needs driver {oldest} or newer"
        return failed("GPUs", words, f"{_SETUP} with a build for an older CUDA")
    return ok("GPUs", f"{shown}; torch is built for CUDA {cuda}")


def _faulty_gpus(report: NodeReport) -> list[Finding]:
    """Return the errors that GPUs and the kernel's log report."""
    remedy = f"exclude the node (resources.exclude={report.name}) and tell the administrators"
    found = [
        failed("GPUs", f"GPU {gpu[0]} of {report.name} has {gpu[4]} uncorrected ECC errors", remedy)
        for gpu in report.gpus
        if gpu[4].isdigit() and int(gpu[4]) > 0
    ]
    if "xid" in report.values:
        words = f"the kernel of {report.name} logged {report.one('xid')!r}"
        found.append(warning("GPUs", words, remedy))
    return found


def _network(report: NodeReport, wanted: str | None) -> Finding:
    name, up = report.name, report.interfaces
    shown = f"{name} has {', '.join(up) or 'no interface except lo'}"
    devices = report.values.get("infiniband", [])
    down = [each for each in devices if " ACTIVE" not in each]
    if wanted and not any(_selects(wanted, each) for each in up):
        words = f"network_interface {wanted} is not up on {name}, which has {', '.join(up)}"
        return failed("network", words, "fix it in the site file, or leave it out")
    if down:
        words = f"an InfiniBand port of {name} is not active: {', '.join(down)}"
        return warning("network", words, "ask the administrators; NCCL will use what is left")
    infiniband = f"InfiniBand: {', '.join(devices)}" if devices else "no InfiniBand devices"
    return ok("network", f"{shown}; {infiniband}")


def _selects(wanted: str, interface: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME takes it: prefixes; with ^ all but these, with = whole names."""
    names = wanted.lstrip("^=").split(",")
    exact = "=" in wanted[:2]
    hit = any(interface == each or (not exact and interface.startswith(each)) for each in names)
    return hit != wanted.startswith("^")


def _disk(report: NodeReport) -> Finding:
    folder, free = report.one("disk").rpartition(" ")[0], report.disk_gib
    remedy = "set TMPDIR in the site's environment: block"
    if free is None:
        return warning("local disk", f"df on {report.name} does not know {folder}", remedy)
    words = f"{folder} on {report.name} has {free:.0f} GiB free for caches"
    if free < _LOCAL_DISK_GIB:
        return warning("local disk", words, remedy)
    return ok("local disk", words)


def all_reduce(reports: list[NodeReport]) -> Finding:
    """Return the result of the all-reduce over all nodes."""
    if done := [result for each in reports for result in each.values.get("all_reduce", ())]:
        ranks, mib, seconds, bandwidth = done[0].split()
        words = f"{ranks} ranks on {len(reports)} nodes: {mib} MiB in {float(seconds) * 1000:.1f}"
        return ok("all-reduce", f"{words} ms, {bandwidth} GB/s bus bandwidth")
    kind = "all_reduce_fault"
    faults = [f"{each.name}: {fault}" for each in reports for fault in each.values.get(kind, ())]
    words = " | ".join(faults) or "the nodes did not finish it"
    remedy = "fix what the nodes report; if they do not reach each other, try network_interface"
    return failed("all-reduce", words, f"{remedy} in the site file")
