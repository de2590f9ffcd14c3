"""What was measured, as rates and ratios, and as a Markdown table."""

from statistics import median
from typing import Any

from benchmarks.peers.engine import Job
from benchmarks.workloads import Prepared

# How far losses of the same steps may differ (nats), the first, which all compute on the same
# weights, and all; and the gradient norms, relatively. Step 1 changes no weights.
TOLERANCES = {
    "fp32": {"first": 1e-4, "loss": 1e-3, "norm": 1e-2},
    "bf16": {"first": 0.02, "loss": 0.05, "norm": 0.1},
}
CONVENTION = (
    "Model FLOPs are the matrix products that the gradient needs, whatever an engine does beside: "
    "2n a token and weight forward, 2n for the input's gradient where one is needed, 2n for the "
    "weight's where it is trained (6n full, about 4n LoRA); attention counts the keys that a query "
    "may see, the output layer the trained positions; padding, recomputation, embedding, norms and "
    "optimizer count nothing. MFU is over the data sheet's dense bf16 peak, `of matmul` over the "
    "matrix product measured in this run. Tokens are real ones, without padding. Times run from "
    "one step's loss to the next one's, data loading included; `allocated` and `reserved` are "
    "the peaks of the measured steps."
)
HEADINGS = (
    "engine",
    "ran with",
    "tok/s/GPU",
    "ours is",
    "TFLOP/s/GPU",
    "MFU",
    "of matmul",
    "allocated GiB",
    "reserved GiB",
    "step s",
    "loss",
    "grad norm",
    "same curve",
)


def measured(answer: dict[str, Any], job: Job, made: Prepared, machine: dict) -> dict[str, Any]:
    """The rates of an engine's measured steps, per GPU."""
    steps = answer["steps"][job.warmup_steps :]
    seconds = sum(step["seconds"] for step in steps)
    tokens = sum(made.tokens[step["step"] - 1] for step in steps)
    tflops = sum(made.step_flops(step["step"]) for step in steps) / seconds / job.ranks / 1e12
    peak = machine["peak_bf16_tflops"] if job.dtype == "bf16" else None
    return {
        "tokens_per_second_per_gpu": tokens / seconds / job.ranks,
        "tflops_per_second_per_gpu": tflops,
        "mfu": None if peak is None else tflops / peak,
        "share_of_matmul": tflops / machine["matmul_tflops"][job.dtype],
        "step_s": median(step["seconds"] for step in steps),
    }


def compare(rows: list[dict[str, Any]], job: Job) -> None:
    """Add to each measured row its ratio to the first row of ours, and whether it did the same."""
    ours = next((row for row in rows if row["status"] == "ok" and row["peer"] == "ours"), None)
    for row in rows:
        if row["status"] != "ok" or ours is None:
            continue
        rates = ours["tokens_per_second_per_gpu"], row["tokens_per_second_per_gpu"]
        row["ours_is_times_as_fast"] = rates[0] / rates[1]
        row["differs"] = differences(row["steps"], ours["steps"], job)


def tolerances(job: Job) -> dict[str, float]:
    """How far an engine may be from ours and still count as having done the same."""
    # Two ways to quantise do not give quite the same base.
    return TOLERANCES["bf16" if job.method == "qlora" else job.dtype]


def differences(steps: list[dict], wanted: list[dict], job: Job) -> list[str]:
    """Where two engines' curves differ by more than TOLERANCES; none where they are the same."""
    limits = tolerances(job)
    pairs = list(zip(steps, wanted, strict=True))
    gaps = [abs(own["loss"] - other["loss"]) for own, other in pairs]
    found = []
    if not gaps[0] <= limits["first"]:
        found.append(f"first loss by {gaps[0]:.4g}")
    if not max(gaps) <= limits["loss"]:
        found.append(f"loss by {max(gaps):.4g}")
    norms = [(own["grad_norm"], other["grad_norm"]) for own, other in pairs]
    if all(None not in pair for pair in norms):
        worst = max(abs(own - other) / max(other, 1e-12) for own, other in norms)
        if not worst <= limits["norm"]:
            found.append(f"grad norm by {100 * worst:.3g} %")
    return found


def summary(row: dict[str, Any]) -> str:
    """A row in one line, for whoever waits."""
    if row["status"] != "ok":
        return f"{row['engine']}: {row['status']}: {row['reason']}"
    return (
        f"{row['engine']}: {row['tokens_per_second_per_gpu']:,.0f} tok/s/GPU, "
        f"{row['tflops_per_second_per_gpu']:.4g} TFLOP/s, loss {row['steps'][0]['loss']:.4f} to "
        f"{row['steps'][-1]['loss']:.4f}"
    )


def markdown(report: dict[str, Any]) -> str:
    """The whole report as a page."""
    machine = report["machine"]
    lines = [
        "# Training speed by engine",
        "",
        f"{report['date']}, commit {report['commit'] or 'unknown'}, `{report['command']}`",
        "",
        f"- {_hardware(machine)}",
        "- " + ", ".join(f"{k} {v}" for k, v in machine["versions"].items() if v),
        "- Ceilings measured in this run: matrix product "
        + ", ".join(f"{v:.4g} TFLOP/s {k}" for k, v in machine["matmul_tflops"].items())
        + f"; copy {machine['copy_gbs']:.0f} GB/s (read + written).",
        "",
        CONVENTION,
    ]
    for part in report["workloads"]:
        lines += ["", f"## {part['workload']}", "", _setup(part), ""]
        lines += ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
        lines += [_row(row) for row in part["rows"]]
        lines += ["", *(f"- {row['engine']}: {n}" for row in part["rows"] for n in _notes(row))]
    return "\n".join(lines).rstrip() + "\n"


def _hardware(machine: dict[str, Any]) -> str:
    cpu = f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}"
    if machine["gpu"] is None:
        return f"CPU: {cpu}"
    return (
        f"{machine['gpus']} x {machine['gpu']} ({machine['gpu_memory_gib']} GiB), CUDA "
        f"{machine['cuda']}, driver {machine['driver']}; {cpu}"
    )


def _setup(part: dict[str, Any]) -> str:
    job = part["job"]
    limits = part["tolerances"]
    return (
        f"{job['method']}, {job['dtype']}, {job['ranks']} rank(s), {job['batch_size']} rows of "
        f"{job['sequence']} tokens a rank and step ({job['documents']} documents, "
        f"{100 * part['filled']:.1f} % filled), AdamW lr {job['lr']:g}; {job['steps']} steps "
        f"measured after {job['warmup_steps']}. Same curve: losses within {limits['loss']:g} of "
        f"ours (the first within {limits['first']:g}), gradient norms within "
        f"{100 * limits['norm']:g} %."
    )


def _row(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return f"| {row['engine']} | {row['status']} |" + " |" * (len(HEADINGS) - 2)
    first, last = row["steps"][0], row["steps"][-1]
    settings = ", ".join(f"{k} {_plain(v)}" for k, v in row["settings"].items())
    differs = row.get("differs")
    cells = [
        row["engine"],
        settings,
        f"{row['tokens_per_second_per_gpu']:,.0f}",
        _number(row.get("ours_is_times_as_fast"), "{:.2f} x"),
        f"{row['tflops_per_second_per_gpu']:.4g}",
        _number(row["mfu"], "{:.1%}"),
        f"{row['share_of_matmul']:.1%}",
        _number(row["peak_allocated_gib"], "{:.2f}"),
        _number(row["peak_reserved_gib"], "{:.2f}"),
        f"{row['step_s']:.4g}",
        f"{first['loss']:.4f} to {last['loss']:.4f}",
        _number(first["grad_norm"], "{:.4g}") + " to " + _number(last["grad_norm"], "{:.4g}"),
        "not compared" if differs is None else "no" if differs else "yes",
    ]
    return "| " + " | ".join(cells) + " |"


def _notes(row: dict[str, Any]) -> list[str]:
    if row["status"] == "ok":
        versions = (f"{name} {version}" for name, version in row["versions"].items() if version)
        notes = ["versions: " + ", ".join(versions)]
    else:
        notes = [f"{row['status']}: {row['reason']}"]
    if row.get("differs"):
        notes.append("differs from ours: " + ", ".join(row["differs"]))
    return notes + [f"before that, {text}" for text in row.get("before", [])]


def _plain(value: Any) -> str:
    return {True: "on", False: "off"}.get(value, str(value)) if value in (0, 1) else str(value)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
