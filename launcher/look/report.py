"""Runs as one self-contained HTML file: curves, outcome, attempts, what made them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2

from launcher import paths
from launcher.errors import RunFault
from launcher.look import curves, results
from launcher.look.text import plain
from launcher.plugins import hooks
from launcher.run.directory import Run
from runspec import files

TEMPLATE = "report.html.j2"
_HOOK = "report_section"
# Metric -> title of its chart; the first ones are looked at first.
_CHARTS = {
    "loss": "Loss",
    "val_loss": "Validation loss",
    "tokens_per_second_per_gpu": "Tokens per second per GPU",
    "mfu": "MFU",
    "peak_memory_reserved_gb": "Peak memory per GPU (GiB)",
    "step_time_s": "Step time (s)",
    "grad_norm": "Gradient norm",
    "lr": "Learning rate",
}
# The first step after a start compiles: the slowest 5 % of the steps set no scale of these.
_COMPILED = frozenset({"step_time_s", "tokens_per_second_per_gpu", "mfu"})
# A chart's size in its own units, and its margins: left, right, top, bottom.
_WIDTH, _HEIGHT = 720, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 36, 16, 28


@dataclass(frozen=True)
class Section:
    """What a plug-in adds about one run: its hook "report_section" returns it from a Run."""

    title: str
    # Under the title and the run's name; without lines no run is named.
    lines: Sequence[str] = ()
    # A sentence under the title.
    about: str = ""
    # Metric -> title of its chart, beside those of every run.
    charts: Mapping[str, str] = field(default_factory=dict)


def write(runs: Sequence[Run], target: Path, price: float | None = None) -> None:
    """Write a report of runs, the whole file or nothing.

    Raises:
        RunFault: the file cannot be written.
    """
    rows, keys = results.compare(runs, price)
    known = {run.name: run for run in runs}
    ordered = [known[row["run"]] for row in rows]
    sections = [[(run.name, section_of(run)) for run in ordered] for section_of in hooks(_HOOK)]
    charts = dict(_CHARTS)
    for parts in sections:
        for _, section in parts:
            charts |= section.charts
    text = _template().render(
        title=_title(ordered),
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        table=results.cells(rows, keys),
        charts=[*_charts(charts, ordered)],
        names=[_legend(run) for run in ordered],
        attempts=[(run.name, _attempts(run)) for run in ordered],
        sections=[
            shown for parts in sections if (shown := [each for each in parts if each[1].lines])
        ],
        provenance=[(run.name, _provenance(run)) for run in ordered],
    )
    try:
        files.write_text(target, text)
    except OSError as error:
        message = f"cannot write {target}: {error.strerror}"
        raise RunFault(f"{message}: choose another file with --output") from error


def _title(runs: Sequence[Run]) -> str:
    sweeps = {run.sweep for run in runs}
    if len(runs) > 1 and len(sweeps) == 1 and (sweep := sweeps.pop()):
        return f"{sweep}, {len(runs)} runs"
    more = f" and {len(runs) - 2} more" if len(runs) > 2 else ""
    return " and ".join(run.name for run in runs[:2]) + more


def _legend(run: Run) -> str:
    cell = run.submission.get("cell")
    return f"{cell} ({run.name})" if cell else run.name


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(paths.TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Messages, names and settings are other people's text.
        autoescape=True,
        finalize=lambda value: plain(value) if isinstance(value, str) else value,
    )
    return environment.get_template(TEMPLATE)


def _charts(charts: Mapping[str, str], runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """Yield the charts of the metrics that a run has."""
    read = [curves.read(run, list(charts)) for run in runs]
    last = max((line[-1][0] for each in read for line in each.values()), default=0) or 1.0
    for name, title in charts.items():
        lines = [(run.name, each.get(name, [])) for run, each in zip(runs, read, strict=True)]
        if any(points for _, points in lines):
            yield _chart(
                title, _span(name, [value for _, line in lines for _, value in line]), lines, last
            )


def _span(name: str, values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest value of a chart's axis."""
    shown, slowest = sorted(values), max(1, len(values) // 20)
    if name in _COMPILED and len(values) > 1:
        shown = shown[:-slowest] if name == "step_time_s" else shown[slowest:]
    low, high = shown[0], shown[-1]
    if low == high:
        return low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    return low, high


def _chart(
    title: str,
    span: tuple[float, float],
    lines: Sequence[tuple[str, Sequence[curves.Point]]],
    last: float,
) -> dict[str, Any]:
    """Return a chart's lines and axes in its own units."""
    low, high = span

    def x(step: float) -> str:
        return f"{_LEFT + (_WIDTH - _LEFT - _RIGHT) * step / last:.1f}"

    def y(value: float) -> str:
        # What compiles leaves the drawing: it ends at the edge.
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return f"{_TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - share):.1f}"

    return {
        "title": title,
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": _LEFT,
        "right": _WIDTH - _RIGHT,
        "bottom": _HEIGHT - _BOTTOM,
        "lines": [
            (number, name, " ".join(f"{x(step)},{y(value)}" for step, value in points))
            for number, (name, points) in enumerate(lines)
        ],
        "x_ticks": [
            (x(step), f"{step:,.0f}") for step in curves.ticks(0, last, 7) if step == round(step)
        ],
        "y_ticks": [(y(value), f"{value:,.4g}") for value in curves.ticks(low, high)],
    }


def _attempts(run: Run) -> list[list[str]]:
    rows = []
    for each in run.attempts:
        nodes = each.get("nodes")
        where = ", ".join(map(str, nodes)) if isinstance(nodes, list) else ""
        values = [each.get(key) for key in ("attempt", "job_id", "cause", "message")]
        number, job, cause, message = ("" if word is None else str(word) for word in values)
        rows.append([number, job, where, cause, message])
    return rows


def _data(recorded: Any) -> Iterator[str]:
    """Yield a line for each data file of a run: its path, size and hash."""
    for each in recorded if isinstance(recorded, list) else []:
        if isinstance(each, dict):
            size, sha256 = each.get("bytes"), each.get("sha256")
            parts = [str(each.get("file"))]
            parts += [f"{size:,} bytes"] if isinstance(size, int) else []
            parts += [f"sha256 {str(sha256)[:12]}"] if sha256 else []
            yield ", ".join(parts)


def _provenance(run: Run) -> list[tuple[str, str]]:
    record = run.provenance
    kit, model = record.get("kit"), record.get("model")
    kit = kit if isinstance(kit, dict) else {}
    changed = ", with uncommitted changes" if kit.get("diff") else ""
    last = (run.all_jobs or [{}])[-1].get("code") or kit.get("sha256")
    used = f"; the last job used the copy {str(last)[:12]}" if last else ""
    command = record.get("command")
    given = record.get("packages")
    listed = [str(each) for each in given] if isinstance(given, list) else []
    main = [each for each in listed if each.startswith(("torch==", "torchtune==", "torchao=="))]
    rows = [
        ("command", " ".join(map(str, command)) if isinstance(command, list) else ""),
        ("code", f"commit {kit.get('commit') or 'unknown'}{changed}{used}"),
        ("configuration", str(record.get("config_sha256") or "")),
        ("model", str(model.get("folder") or "") if isinstance(model, dict) else ""),
        *(("data", text) for text in _data(record.get("data"))),
        ("packages", f"{', '.join(main)}, {len(listed)} in all" if listed else ""),
        ("Slurm", str(record.get("slurm") or "")),
    ]
    return [row for row in rows if row[1]]
