"""Measures one speed optimization ("lever") at a time: python -m benchmarks.levers [part ...]

Each part (attention, block, loss, lora, fp8, nf4, optimizer, checkpoint, loading) runs in its own
process. It times several implementations of the same computation in turns and checks every result
and gradient against a reference in higher precision. levers.json and levers.md are updated after
each part; the tables are printed at the end. On a GPU the shapes are those of Llama 3.1 8B; on a
CPU all widths are divided by 8.

A variant that cannot run on this machine is skipped with a reason. The exit status is 1 if a result
is outside its tolerance or a variant fails.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks.parts.measure import SIZES, Setting, run_case

ROOT = Path(__file__).resolve().parents[1]
# Most important first, because the time may run out: module and weight in sharing the time.
PARTS = {
    "attention": ("attention", 3),
    "block": ("block", 7),
    "loss": ("loss_heads", 2),
    "lora": ("lora_linear", 2),
    "fp8": ("fp8_linear", 2),
    "nf4": ("nf4_linear", 1),
    "optimizer": ("optimizer_steps", 2),
    "checkpoint": ("checkpoints", 1),
    "loading": ("loading", 1),
}
PACKAGES = (
    "torch",
    "triton",
    "torchtune",
    "torchao",
    "transformers",
    "peft",
    "liger_kernel",
    "bitsandbytes",
)
# A part is killed this long after its time is over; a compilation in progress may finish.
GRACE_S = 60.0
# One case gets this share of the part's remaining time.
CASE_SHARE = 0.5
# Start-up time of a part's process.
START_S = 8.0


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit status."""
    options = _parse(arguments)
    device = torch.device(options.device)
    if options.in_process:
        return _run_in_process(options, device)
    options.out.mkdir(parents=True, exist_ok=True)
    results = {
        "what": "one lever at a time",
        "command": ["python", "-m", "benchmarks.levers", *arguments],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(device),
        "versions": versions(),
        "commit": _commit(),
        "device": device.type,
        "size": options.size,
        "dtype": options.dtype,
        "parts": {},
    }
    deadline = time.monotonic() + options.budget_s
    names = options.names or list(PARTS)
    for index, name in enumerate(names):
        print(f"{name} ...", file=sys.stderr, flush=True)
        weights = [PARTS[later][1] for later in names[index:]]
        left = deadline - time.monotonic()
        results["parts"][name] = _run_in_subprocess(name, options, left * weights[0] / sum(weights))
        _write(options.out, results)
    print(markdown(results))
    return 1 if faults(results) else 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.levers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="part", help=f"of {', '.join(PARTS)} (all)")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="bfloat16 on a GPU, else float32"
    )
    parser.add_argument("--size", choices=tuple(SIZES), help="shapes: 8b on a GPU, else small")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds for all parts (540)")
    parser.add_argument(
        "--no-compile", action="store_true", help="skip variants that use torch.compile"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/levers"), help="folder for the results"
    )
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}; known: {', '.join(PARTS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; use --device cpu")
    gpu = options.device == "cuda"
    options.dtype = options.dtype or ("bfloat16" if gpu else "float32")
    options.size = options.size or ("8b" if gpu else "small")
    return options


def _run_in_subprocess(name: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Run a part in its own process, so that a crash does not end the other parts."""
    began = time.monotonic()
    if seconds < START_S:
        return {"skipped": "no time left", "cases": []}
    with tempfile.TemporaryDirectory(prefix="levers-") as folder:
        command = [sys.executable, "-m", "benchmarks.levers", name, "--in-process", "--out", folder]
        command += ["--device", options.device, "--dtype", options.dtype, "--size", options.size]
        command += ["--budget-s", str(seconds - START_S)]
        command += ["--no-compile"] if options.no_compile else []
        failure = None
        try:
            status = subprocess.run(
                command,
                cwd=ROOT,
                timeout=seconds + GRACE_S,
                env=os.environ | {"TQDM_DISABLE": "1"},
            ).returncode
            failure = f"exit status {status}" if status else None
        except subprocess.TimeoutExpired:
            failure = f"killed after {seconds + GRACE_S:.0f} s"
        path = Path(folder) / "cases.json"
        cases = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return {
        "seconds": round(time.monotonic() - began, 1),
        "cases": cases,
        **({} if failure is None else {"failed": failure}),
    }


def _run_in_process(options: argparse.Namespace, device: torch.device) -> int:
    """Run one part in this process; writes cases.json again after each case."""
    # The references are fp32 matrix products, which must not use TF32.
    torch.set_float32_matmul_precision("highest")
    setting = Setting(
        device,
        getattr(torch, options.dtype),
        SIZES[options.size],
        compiled=not options.no_compile,
        deadline=time.monotonic() + options.budget_s,
    )
    records: list[dict[str, Any]] = []
    for record in run_part(options.names[0], setting):
        records.append(record)
        path = options.out / "cases.json"
        path.with_suffix(".tmp").write_text(json.dumps(records), encoding="utf-8")
        os.replace(path.with_suffix(".tmp"), path)
    return 0


def module_of(name: str) -> ModuleType:
    """The module of a part."""
    return importlib.import_module(f"benchmarks.parts.{PARTS[name][0]}")


def run_part(name: str, setting: Setting) -> Iterator[dict[str, Any]]:
    """Run the cases of a part; yields the record of each."""
    for case in module_of(name).cases(setting):
        # The other cases need time too.
        limit = time.monotonic() + CASE_SHARE * (setting.deadline - time.monotonic())
        yield run_case(case, replace(setting, deadline=limit))
        # Frees its tensors before the next case allocates.
        del case


def hardware(device: torch.device) -> dict[str, Any]:
    """CPU, GPU and memory of this machine."""
    machine: dict[str, Any] = {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        machine |= {
            "gpu": gpu.name,
            "gpu_memory_gib": round(gpu.total_memory / 2**30, 1),
            "capability": f"{gpu.major}.{gpu.minor}",
            "cuda": torch.version.cuda,
        }
    return machine


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages in PACKAGES."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
        )
    except OSError:
        return None
    return done.stdout.strip() or None


def faults(results: dict[str, Any]) -> list[str]:
    """Every failure, and every result outside its tolerance."""
    found = []
    for name, part in results["parts"].items():
        if "failed" in part:
            found.append(f"{name}: {part['failed']}")
        for case in part["cases"]:
            for variant in case["variants"]:
                where = f"{name}, {case['case']}, {variant['name']}"
                if "failed" in variant:
                    found.append(f"{where}: {variant['failed']}")
                elif not variant.get("equal", True):
                    found.append(f"{where}: wrong result, error {_worst(variant)}")
    return found


def _write(folder: Path, results: dict[str, Any]) -> None:
    texts = {"levers.json": json.dumps(results, indent=1), "levers.md": markdown(results)}
    for name, text in texts.items():
        (folder / f".{name}").write_text(text + "\n", encoding="utf-8")
        os.replace(folder / f".{name}", folder / name)


def markdown(results: dict[str, Any]) -> str:
    """The results as a Markdown page, one table per case."""
    versions = [f"{key} {value}" for key, value in results["versions"].items()]
    lines = [
        "# Speed optimizations, one at a time",
        "",
        f"{results['date']}, commit {results['commit']}; "
        f"{', '.join(f'{key} {value}' for key, value in results['hardware'].items())}; "
        f"{', '.join(versions)}.",
        "",
        f"Device {results['device']}, {results['dtype']}, size {results['size']}. "
        "`total ms` is the median time of forward and backward pass together, `quartiles ms` its "
        "quartiles over all rounds, `time ratio` the median over the rounds of the time relative "
        "to the first variant. The forward pass saves what the backward pass needs. `peak MiB` "
        "is the peak memory beyond what was allocated before the call. `error / tolerance` is the "
        "largest relative error of any row of a result or gradient, its limit, and the tensor's "
        "name.",
    ]
    for name, part in results["parts"].items():
        lines += ["", f"## {name}"]
        lines += ["", f"Skipped: {part['skipped']}."] if "skipped" in part else []
        lines += ["", f"Failed: {part['failed']}."] if "failed" in part else []
        for case in part["cases"]:
            lines += ["", f"### {name}: {case['case']}", "", f"{case['what']}.", ""]
            lines += _table(case)
    if found := faults(results):
        lines += ["", "## Faults", "", *(f"- {fault}" for fault in found)]
    return "\n".join(lines)


def _table(case: dict[str, Any]) -> list[str]:
    unit = case["rate_unit"] or "rate"
    headings = ["variant", "forward ms", "backward ms", "total ms", "quartiles ms", "time ratio"]
    headings += [unit, "peak MiB", "error / tolerance", "notes"]
    rows = [f"| {' | '.join(headings)} |", "|---" + "|---:" * 8 + "|---|"]
    for variant in case["variants"]:
        reason = variant.get("skipped") or variant.get("failed")
        if reason is not None:
            status = "skipped" if "skipped" in variant else "FAILED"
            cells = [variant["name"], *[""] * 8, f"{status}: {reason}"]
        else:
            cells = _cells(variant)
        rows.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return rows


def _cells(variant: dict[str, Any]) -> list[str]:
    total, forward = variant["seconds"], variant["forward_s"]
    first = f"first call {variant['first_s']:.1f} s"
    notes = [f"{key} {value}" for key, value in variant["figures"].items()]
    notes += [first] if variant["first_s"] > 10 * total["median"] + 1 else []
    return [
        variant["name"],
        _ms(forward["median"]) if forward else "",
        _ms(max(0.0, total["median"] - forward["median"])) if forward else "",
        _ms(total["median"]),
        f"{_ms(total['low'])} to {_ms(total['high'])}",
        f"{variant['ratio']:.2f}",
        f"{variant['rate']:.3g}" if "rate" in variant else "",
        f"{variant['peak_bytes'] / 2**20:.1f}",
        _worst(variant),
        "; ".join(notes + ([] if variant["equal"] else ["WRONG RESULT"])),
    ]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def _worst(variant: dict[str, Any]) -> str:
    """The result closest to its tolerance, or farthest beyond it."""
    errors, bounds = variant["errors"], variant["tolerances"]
    if not errors:
        return "nothing compared"
    name = max(errors, key=lambda name: errors[name] - bounds[name])
    return f"{errors[name]:.1g} / {bounds[name]:g} ({name})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
