"""How busy the GPUs of a run are, as slurm/gpu_use.py sampled it on each node."""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from launcher.observe.text import plain
from launcher.runs.directory import Run
from runspec import files

# Number of nodes that are shown one by one.
_SHOWN = 4


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
    known = [(fmean(values), each) for each in records if (values := _busy(each))]
    chosen = [each for _, each in known]
    if len(known) > _SHOWN:
        known.sort(key=lambda pair: pair[0])
        chosen = [each for _, each in known[:_SHOWN]]
    for each in chosen:
        used = [float(gpu["memory_gib"]) for gpu in _gpus(each) if _is_number(gpu, "memory_gib")]
        memory = f", {max(used):.1f} GiB" if used else ""
        shares = " ".join(f"{value:.0f}" for value in _busy(each))
        yield plain(f"GPU use on {each.get('node')}: {shares} %{memory}")
    if len(known) > _SHOWN:
        mean = fmean(share for share, _ in known)
        yield f"these are the least busy of {len(known)} nodes; the mean of all is {mean:.0f} %"


def curve(run: Run) -> list[tuple[float, float]]:
    """Return the mean utilisation of all GPUs of a node over time: seconds since 1970, percent."""
    points = []
    for logs in sorted(run.logs.glob("[0-9]*")):
        for path in _files(logs):
            for line in _lines(path):
                when, values = line.get("time"), _busy(line)
                if isinstance(when, int | float) and values:
                    points.append((float(when), fmean(values)))
    return sorted(points)


def mean(run: Run) -> float | None:
    """Return the mean utilisation over the whole run, 0 to 1; None if nothing was sampled."""
    points = curve(run)
    return round(fmean(busy for _, busy in points) / 100, 4) if points else None


def _files(logs: Path) -> list[Path]:
    return sorted(logs.glob(files.GPU_USE.format("*")))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for text in file:
                try:
                    value = files.parse_json(text)
                except ValueError:
                    continue
                if isinstance(value, dict):
                    yield value
    except OSError:
        return


def _gpus(record: dict[str, Any]) -> list[dict[str, Any]]:
    given = record.get("gpus")
    return [gpu for gpu in given if isinstance(gpu, dict)] if isinstance(given, list) else []


def _busy(record: dict[str, Any]) -> list[float]:
    return [float(gpu["busy_percent"]) for gpu in _gpus(record) if _is_number(gpu, "busy_percent")]


def _is_number(gpu: dict[str, Any], key: str) -> bool:
    return isinstance(gpu.get(key), int | float)
