"""What nodes report of their GPUs: number, driver, errors, and the all-reduce over all nodes."""

from __future__ import annotations

from launcher.checks.finding import Finding, failed, ok, skipped, warning
from launcher.checks.nodes.ask import NodeReport

# The oldest driver that runs a CUDA release, by NVIDIA's table of minor version compatibility.
_DRIVER_OF_CUDA = {11: 450, 12: 525, 13: 580}
_SETUP = "bash setup.sh --torch VERSION --torch-index URL"


def gpus(report: NodeReport, cuda: str | None, expected: int) -> Finding:
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


def faulty_gpus(report: NodeReport) -> list[Finding]:
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


def all_reduce(reports: list[NodeReport]) -> Finding:
    """Return the result of the all-reduce over all nodes."""
    done = [result for each in reports for result in each.values.get("all_reduce", ())]
    if done:
        ranks, mib, seconds, bandwidth = done[0].split()
        words = (
            f"{ranks} ranks on {len(reports)} nodes: {mib} MiB in {float(seconds) * 1000:.1f} ms"
        )
        return ok("all-reduce", f"{words}, {bandwidth} GB/s bus bandwidth")
    faults = [
        f"{each.name}: {fault}"
        for each in reports
        for fault in each.values.get("all_reduce_fault", ())
    ]
    words = " | ".join(faults) or "the nodes did not finish it"
    remedy = "fix what the nodes report; if they do not reach each other, try network_interface"
    return failed("all-reduce", words, f"{remedy} in the site file")
