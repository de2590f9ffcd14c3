"""The results of both calls as a Markdown page."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import report

CASES = ("case", "what", "dtype", "against", "first 3 steps", "all steps", "same bits", "within")
KERNELS = ("kernel", "calls", "ms", "share")
PARTS = ("part", "result", "what it said or compared")


def markdown(results: dict[str, Any]) -> str:
    """The page of what is known until now."""
    lines, parts = ["# One GPU", ""], results["parts"]
    for name, call in results["calls"].items():
        machine = call.get("machine")
        facts = [f"{k.replace('_', ' ')} {v}" for k, v in call.items() if v and v is not machine]
        facts += [report.hardware(machine)] if machine else []
        lines.append(f"- {name}: {', '.join(facts)}")
    cases = [_case(name, part) for name, part in parts.items() if "shows" in part]
    text = "Largest relative differences of a loss from that of the CPU, or of another case."
    lines += _table(f"Loss curves\n\n{text}", CASES, cases)
    others = [_other(*item) for item in parts.items() if "ok" in item[1] and "shows" not in item[1]]
    lines += _table("Resumed runs, exports, launcher", PARTS, others)
    for name, part in parts.items():
        if "rows" in part:
            lines += report.section(f"{name}: {part['workload']}", part)
        if "top" in (found := part.get("trace", {})):
            gaps = ", ".join(f"{ms:.3f} before {what}" for ms, what in found["longest_gaps_ms"])
            text = (
                f"{found['kernels']} kernels in {found['span_ms']:.2f} ms, busy "
                f"{found['busy']:.1%}, {found['host_waits']} waits of the host; longest gaps in "
                f"ms: {gaps or 'none'}"
            )
            rows = [
                (f"`{k['name']}`", str(k["calls"]), f"{k['ms']:.2f}", f"{k['share']:.1%}")
                for k in found["top"]
            ]
            lines += _table(f"Kernels of a step: {name}\n\n{text}", KERNELS, rows)
    if faults := [line for item in parts.items() for line in _faults(*item)]:
        lines += ["", "## Failed and dropped", "", *faults]
    return "\n".join(lines) + "\n"


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if rows:
        yield from ("", f"## {title}", "", "| " + " | ".join(heads) + " |")
        yield "|" + "---|" * len(heads)
        yield from ("| " + " | ".join(row) + " |" for row in rows)


def _case(name: str, part: dict[str, Any]) -> tuple[str, ...]:
    _, case, dtype = name.split()
    whole, first = part["differences"] or (None, None)
    gaps = ("-" if gap is None else f"{gap:.1e}" for gap in (first, whole))
    verdicts = (_yes(part["same_bits"]), "yes" if part["ok"] else "**no**")
    return (case, part["shows"], dtype, part["against"], *gaps, *verdicts)


def _other(name: str, part: dict[str, Any]) -> tuple[str, ...]:
    said = part.get("said", "")
    if "killed_after" in part:
        facts = (
            (key, part[f"same_bits_{key}"]) for key in ("uninterrupted", "resumed", "exported")
        )
        bits = ", ".join(f"{key} {_yes(value)}" for key, value in facts)
        said = f"killed after step {part['killed_after']}; same bits: {bits}"
    return (name, "ok" if part["ok"] else "**failed**", said.replace("|", "/"))


def _faults(name: str, part: dict[str, Any]) -> Iterator[str]:
    if "dropped" in part:
        yield f"- {name}: dropped: {part['dropped']}"
    if part.get("ok") is False and "status" not in part:
        yield f"- {name}: not as expected, see its table"
    for run in (part, *part.get("runs", [])):
        if run.get("status", 0) != 0:
            yield f"- {name}: exit status {run['status']}: {' / '.join(run['log'][-3:])}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
