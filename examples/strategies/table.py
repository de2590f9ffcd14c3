"""Prints the methods in one table: python table.py ROOT (run.sh calls it after the evaluations)"""

import json
import sys
from pathlib import Path

KIB = 2**10
HEADS = (
    "METHOD",
    "ACCURACY",
    "95 % INTERVAL",
    "PREDICTED MiB",
    "RSS GiB",
    "TRAINING s",
    "RUN s",
    "STORED KiB",
)


def main() -> None:
    """Print a row for each model that the cells start from, and for each cell."""
    root = Path(sys.argv[1])
    data = root / "datasets" / "strategies"
    results = json.loads((data / "results.json").read_text())
    rows = [HEADS]
    for label, name in (("base", "base"), ("SFT before DPO", "sft"), ("teacher", "teacher")):
        rows.append((label, *_accuracy(data / f"{name}.eval.json"), *("-" * 5)))
    for row in sorted(results, key=lambda row: row["run"]):
        run = root / "runs" / row["run"]
        figures = [json.loads(line) for line in (run / "metrics.jsonl").open()]
        rows.append(
            (
                row["cell"],
                *_accuracy(data / f"{row['run']}.eval.json"),
                f"{row['peak_predicted_gib'] * KIB:.0f}",
                f"{max(each['memory_rss_gb'] for each in figures):.2f}",
                f"{figures[-1]['time'] - figures[0]['time']:.1f}",
                f"{row['used_s']:.0f}",
                f"{_stored(run / 'export') / KIB:,.0f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        print("  ".join(line).rstrip())


def _accuracy(path: Path) -> tuple[str, str]:
    found = json.loads(path.read_text())["tasks"]["intents"]["metrics"]["classification"]["all"]
    figure = found["candidate"]
    return f"{figure['value']:.3f}", f"{figure['low']:.3f} to {figure['high']:.3f}"


def _stored(export: Path) -> int:
    """Bytes of the weights to keep beside the base: the adapter's, or all without an adapter."""
    folder = export / "adapter" if (export / "adapter").is_dir() else export
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


main()
