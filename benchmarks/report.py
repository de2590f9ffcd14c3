"""The measurements as rates and ratios, and as a Markdown table."""

from statistics import median
from typing import Any

from benchmarks.peers.engine import Job
from benchmarks.workloads import Prepared

# Largest allowed differences between two engines: of the first loss (computed from identical
# weights; step 1 changes no weights) and of all losses, in nats; of gradient norms, relative.
TOLERANCES = {
    "fp32": {"first": 1e-4, "loss": 1e-3, "norm": 1e-2},
    "bf16": {"first": 0.02, "loss": 0.05, "norm": 0.1},
}
CONVENTION = (
    "Model FLOPs count the matrix products that the gradient needs, whatever else an engine "
    "computes. Per token and weight: 2 FLOPs forward, 2 for the gradient of the input if it is "
    "needed, 2 for the gradient of the weight if it is trained (6 for full fine-tuning, about 4 "
    "for LoRA). Attention counts only the query-key pairs that the mask allows, the output layer "
    "only the trained tokens. Padding, recomputation, embedding, norms and optimizer are not "
    "counted. MFU is relative to the data sheet's dense bf16 peak, `of matmul` to the matrix "
    "product measured in this run. Tokens are real tokens, without padding. The time of a step "
    "runs from its previous step's loss to its own, data loading included. `allocated` and "
    "`reserved` are the peaks of torch's CUDA allocator in the measured steps."
)
HEADINGS = (
    "engine",
    "settings",
    "tok/s/GPU",
    "speedup of ours",
    "TFLOP/s/GPU",
    "MFU",
    "of matmul",
    "allocated GiB",
    "reserved GiB",
    "step s",
    "loss",
    "grad norm",
    "same loss curve",
)


def measured(answer: dict[str, Any], job: Job, workload: Prepared, machine: dict) -> dict[str, Any]:
    """Rates per GPU of an engine's measured steps, without the warm-up steps."""
    steps = answer["steps"][job.warmup_steps :]
    seconds = sum(step["seconds"] for step in steps)
    tokens = sum(workload.tokens[step["step"] - 1] for step in steps)
    tflops = sum(workload.step_flops(step["step"]) for step in steps) / seconds / job.ranks / 1e12
    peak = machine["peak_bf16_tflops"] if job.dtype == "bf16" else None
    return {
        "tokens_per_second_per_gpu": tokens / seconds / job.ranks,
        "tflops_per_second_per_gpu": tflops,
        "mfu": None if peak is None else tflops / peak,
        "share_of_matmul": tflops / machine["matmul_tflops"][job.dtype],
        "step_s": median(step["seconds"] for step in steps),
    }


def compare(rows: list[dict[str, Any]], job: Job) -> None:
    """Add to each measured row the speedup of our first row and the differences from it."""
    ours = next((row for row in rows if row["status"] == "ok" and row["peer"] == "ours"), None)
    for row in rows:
        if row["status"] != "ok" or ours is None:
            continue
        rates = ours["tokens_per_second_per_gpu"], row["tokens_per_second_per_gpu"]
        row["speedup_of_ours"] = rates[0] / rates[1]
        row["differences"] = differences(row["steps"], ours["steps"], job)


def tolerances(job: Job) -> dict[str, float]:
    """How far an engine's curve may be from ours and still count as the same."""
    # Engines quantise differently, so that their NF4 base weights differ slightly.
    return TOLERANCES["bf16" if job.method == "qlora" else job.dtype]


def differences(steps: list[dict], expected: list[dict], job: Job) -> list[str]:
    """Where an engine's curve differs from the expected one by more than the tolerances."""
    limits = tolerances(job)
    pairs = list(zip(steps, expected, strict=True))
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
    """A row as one line of progress output."""
    if row["status"] != "ok":
        return f"{row['engine']}: {row['status']}: {row['reason']}"
    return (
        f"{row['engine']}: {row['tokens_per_second_per_gpu']:,.0f} tok/s/GPU, "
        f"{row['tflops_per_second_per_gpu']:.4g} TFLOP/s, loss {row['steps'][0]['loss']:.4f} to "
        f"{row['steps'][-1]['loss']:.4f}"
    )


def markdown(report: dict[str, Any]) -> str:
    """The whole report as a Markdown page."""
    machine = report["machine"]
    lines = [
        "# Training speed by engine",
        "",
        f"{report['date']}, commit {report['commit'] or 'unknown'}, `{report['command']}`",
        "",
        f"- {hardware(machine)}",
        "- " + ", ".join(f"{k} {v}" for k, v in machine["versions"].items() if v),
        "- Limits measured in this run: matrix product "
        + ", ".join(f"{v:.4g} TFLOP/s {k}" for k, v in machine["matmul_tflops"].items())
        + f"; copy {machine['copy_gbs']:.0f} GB/s (bytes read plus written).",
        "",
        CONVENTION,
    ]
    for part in report["workloads"]:
        lines += section(part["workload"], part)
    return "\n".join(lines).rstrip() + "\n"


def section(title: str, part: dict[str, Any]) -> list[str]:
    """The lines of one workload."""
    lines = ["", f"## {title}", "", _setup(part), ""]
    lines += ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += [_row(row) for row in part["rows"]]
    return [*lines, "", *(f"- {row['engine']}: {n}" for row in part["rows"] for n in _notes(row))]


def hardware(machine: dict[str, Any]) -> str:
    """GPU, driver and CPU as a line."""
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
        f"{job['sequence']} tokens per rank and step ({job['documents']} documents, "
        f"{100 * part['filled']:.1f} % real tokens), AdamW lr {job['lr']:g}; {job['steps']} steps "
        f"measured after {job['warmup_steps']}. Same loss curve: losses within "
        f"{limits['loss']:g} of ours (the first within {limits['first']:g}), gradient norms within "
        f"{100 * limits['norm']:g} %."
    )


def _row(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return f"| {row['engine']} | {row['status']} |" + " |" * (len(HEADINGS) - 2)
    first, last = row["steps"][0], row["steps"][-1]
    settings = ", ".join(f"{k} {_plain(v)}" for k, v in row["settings"].items())
    found = row.get("differences")
    cells = [
        row["engine"],
        settings,
        f"{row['tokens_per_second_per_gpu']:,.0f}",
        _number(row.get("speedup_of_ours"), "{:.2f} x"),
        f"{row['tflops_per_second_per_gpu']:.4g}",
        _number(row["mfu"], "{:.1%}"),
        f"{row['share_of_matmul']:.1%}",
        _number(row["peak_allocated_gib"], "{:.2f}"),
        _number(row["peak_reserved_gib"], "{:.2f}"),
        f"{row['step_s']:.4g}",
        f"{first['loss']:.4f} to {last['loss']:.4f}",
        _number(first["grad_norm"], "{:.4g}") + " to " + _number(last["grad_norm"], "{:.4g}"),
        "not compared" if found is None else "no" if found else "yes",
    ]
    return "| " + " | ".join(cells) + " |"


def _notes(row: dict[str, Any]) -> list[str]:
    if row["status"] == "ok":
        versions = (f"{name} {version}" for name, version in row["versions"].items() if version)
        notes = ["versions: " + ", ".join(versions)]
    else:
        notes = [f"{row['status']}: {row['reason']}"]
    if "peak_gib" in (found := row.get("estimate", {})):
        speed = f"{found['tokens_per_second_per_gpu']:,.0f} tok/s/GPU"
        notes.append(f"estimate for {found['gpu']}: {found['peak_gib']:.2f} GiB, {speed}")
    if row.get("differences"):
        notes.append("differs from ours: " + ", ".join(row["differences"]))
    return notes + [f"earlier attempt: {text}" for text in row.get("before", [])]


def _plain(value: Any) -> str:
    return {True: "on", False: "off"}.get(value, str(value)) if value in (0, 1) else str(value)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
