"""How busy the GPUs of a run are, as slurm/gpu_use.py sampled it on each node."""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from launcher.look.text import is_number, plain
from launcher.run.directory import Run
from runspec import files

# Number of nodes that are shown one by one.
_SHOWN = 4
_BUSY = "busy_percent"


def newest(run: Run) -> list[dict[str, Any]]:
    """Return the last record of each node in the newest attempt, [] if there is none."""
    logs = run.latest_logs()
    if logs is None:
        return []
    try:
        rows = [files.last_json_line(path) for path in _files(logs)]
    except OSError:
        return []
    return [each for each in rows if isinstance(each, dict) and _gpus(each)]


def lines(run: Run) -> Iterator[str]:
    """Yield the newest utilisation, a line for each node; of many nodes the least busy ones."""
    records = newest(run)
    known = [(fmean(values), each) for each in records if (values := _values(each, _BUSY))]
    chosen = [each for _, each in known]
    if len(known) > _SHOWN:
        known.sort(key=lambda pair: pair[0])
        chosen = [each for _, each in known[:_SHOWN]]
    for each in chosen:
        used = _values(each, "memory_gib")
        memory = f", {max(used):.1f} GiB" if used else ""
        shares = " ".join(f"{value:.0f}" for value in _values(each, _BUSY))
        yield plain(f"GPU use on {each.get('node')}: {shares} %{memory}")
    if len(known) > _SHOWN:
        mean = fmean(share for share, _ in known)
        yield f"these are the least busy of {len(known)} nodes; the mean of all is {mean:.0f} %"


def curve(run: Run) -> list[tuple[float, float]]:
    """Return the mean utilisation of all GPUs of a node over time: seconds since 1970, percent."""
    points = []
    for logs in sorted(run.logs.glob("[0-9]*")):
        for path in _files(logs):
            for row in files.read_json_lines(path):
                known = row if isinstance(row, dict) else {}
                when, values = known.get("time"), _values(known, _BUSY)
                if is_number(when) and values:
                    points.append((float(when), fmean(values)))
    return sorted(points)


def mean(run: Run) -> float | None:
    """Return the mean utilisation over the whole run, 0 to 1; None if nothing was sampled."""
    points = curve(run)
    return round(fmean(busy for _, busy in points) / 100, 4) if points else None


def _files(logs: Path) -> list[Path]:
    return sorted(logs.glob(files.GPU_USE.format("*")))


def _gpus(record: dict[str, Any]) -> list[dict[str, Any]]:
    given = record.get("gpus")
    return [gpu for gpu in given if isinstance(gpu, dict)] if isinstance(given, list) else []


def _values(record: dict[str, Any], key: str) -> list[float]:
    return [value for gpu in _gpus(record) if is_number(value := gpu.get(key))]
