"""What a node's report means: files, Python, GPUs and network."""

from launcher import paths
from launcher.check import Finding, failed, ok, skipped, warning
from launcher.check.doctor.ask import NodeReport, Question
from launcher.site import Site
from launcher.venv import TorchBuild

_SETUP = "bash setup.sh --torch BUILD (cu126, cu128, cu130: bash setup.sh --help)"


def node_findings(report: NodeReport, question: Question) -> list[Finding]:
    """Return one finding for each thing that the node was asked about."""
    findings = [
        *_setup(report, question.cluster),
        _files(report, question.cluster),
        _python(report),
        _gpus(report, question.torch, question.gpus_per_node),
        _network(report, question.cluster.network_interface),
    ]
    if report.yes("finished"):
        return findings
    message = f"{report.name} began to answer and did not finish in time"
    late = failed("nodes", message, f"exclude it: resources.exclude={report.name}")
    return [*(finding for finding in findings if finding.state == "ok"), late]


def _setup(report: NodeReport, cluster: Site) -> list[Finding]:
    if not cluster.job_setup:
        return []
    count = len(cluster.job_setup)
    if "setup_fault" not in report.values:
        message = f"{count} line{'s' * (count > 1)} of the site file succeeded on {report.name}"
        return [ok("job_setup", message)]
    status, _, line = report.one("setup_fault").partition(" ")
    message = f"{line} failed on {report.name} with exit status {status}"
    return [failed("job_setup", message, "fix that line: it would end every run")]


def _files(report: NodeReport, cluster: Site) -> Finding:
    root, name, subject = cluster.root, report.name, "shared files"
    if not report.yes("shared_read"):
        message = f"{name} does not see what was written to {root}"
    elif not report.yes("shared_write"):
        message = f"{name} cannot write to {root}"
    elif not report.seen_here:
        message = f"this machine does not see what {name} wrote to {root}"
    elif not report.yes("checkout"):
        message = f"{name} does not see the checkout {paths.REPO_ROOT}"
        return failed(subject, message, "keep it on a filesystem that all nodes mount")
    else:
        return ok(subject, f"{root} is the same here and on {name}, in both directions")
    remedy = "set COOKBOOK_ROOT, or shared_root in the site file, to a folder that all nodes mount"
    return failed(subject, message, remedy)


def _python(report: NodeReport) -> Finding:
    venv, name, subject = paths.venv_root(), report.name, "virtual environment"
    if report.one("python", "missing") == "missing":
        message = f"{name} does not see {venv}/bin/python, or the Python that it was made with"
        remedy = "keep COOKBOOK_VENV and that Python on a filesystem that all nodes mount"
        return failed(subject, message, remedy)
    kind, _, what = report.one("packages").partition(" ")
    if kind == "fault":
        message = f"Python on {name} says {what!r}"
        return failed(subject, message, "run on a node of that kind: bash setup.sh")
    if kind == "missing":
        return failed(subject, f"{venv} on {name} lacks {what}", "bash setup.sh")
    message = f"Python {report.one('python')} of {venv} runs on {name}; {report.one('packages')}"
    return ok(subject, message)


def _gpus(report: NodeReport, torch: TorchBuild, expected: int) -> Finding:
    """Check what nvidia-smi shows against the job's request and torch's build."""
    tool, name, gpus = report.one("gpu_tool"), report.name, report.gpus
    exclude = f"exclude the node: resources.exclude={name}"
    if not expected:
        return skipped("GPUs", f"Slurm lists no GPU on {name}")
    if tool == "none":
        message = f"{name} has no nvidia-smi, though Slurm lists GPUs there"
        return warning("GPUs", message, "ask for a driver, unless the GPUs are stand-ins for tests")
    if not gpus:
        message = f"nvidia-smi on {name} shows no GPU ({tool.removeprefix('fault ')})"
        return failed("GPUs", message, exclude)
    kind, mib, driver = gpus[0]
    memory = f"{int(mib) / 1024:.0f} GiB" if mib.isdigit() else "memory unknown"
    shown = f"{name} shows {len(gpus)} x {kind}, {memory}, driver {driver}"
    if len(gpus) < expected:
        return failed("GPUs", f"{shown}, and the job asked for {expected}", exclude)
    if torch.cuda is None:
        return failed("GPUs", f"{shown}; the installed torch is built for {torch.platform}", _SETUP)
    newest, oldest = driver.partition(".")[0], torch.oldest_driver
    if newest.isdigit() and int(newest) < oldest:
        message = (
            f"{shown}; torch is built for {torch.platform}, which needs driver {oldest} or newer"
        )
        return failed("GPUs", message, _SETUP)
    return ok("GPUs", f"{shown}; torch is built for {torch.platform}")


def _network(report: NodeReport, wanted: str | None) -> Finding:
    name, up = report.name, report.interfaces
    shown = f"{name} has {', '.join(up) or 'no interface except lo'}"
    devices = report.values.get("infiniband", [])
    down = [each for each in devices if " ACTIVE" not in each]
    if wanted and not any(_selects(wanted, each) for each in up):
        message = f"network_interface {wanted} is not up on {name}, which has {', '.join(up)}"
        return failed("network", message, "fix it in the site file, or leave it out")
    if down:
        message = f"an InfiniBand port of {name} is not active: {', '.join(down)}"
        return warning("network", message, "ask the administrators; NCCL will use what is left")
    infiniband = f"InfiniBand: {', '.join(devices)}" if devices else "no InfiniBand devices"
    return ok("network", f"{shown}; {infiniband}")


def _selects(wanted: str, interface: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME takes it: prefixes; with ^ all but these, with = whole names."""
    names = wanted.lstrip("^=").split(",")
    exact = "=" in wanted[:2]
    hit = any(interface == each or (not exact and interface.startswith(each)) for each in names)
    return hit != wanted.startswith("^")
