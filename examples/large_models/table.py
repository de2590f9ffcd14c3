"""Prints each cell's prediction beside its measurement: python table.py ROOT (run.sh calls it)

RSS holds the interpreter and its libraries too: about 0.5 GiB before a model is loaded.
"""

import json
import sys
from pathlib import Path

HEADS = ("CELL", "STATE", "PREDICTED GiB", "RSS GiB", "STEP s")
root = Path(sys.argv[1])
results = json.loads((root / "results.json").read_text(encoding="utf-8"))
rows = [HEADS]
for row in sorted(results, key=lambda row: row["run"]):
    file = root / "runs" / row["run"] / "metrics.jsonl"
    steps = [json.loads(line) for line in file.open(encoding="utf-8")] if file.is_file() else []
    rss = f"{max(each['memory_rss_gb'] for each in steps):.2f}" if steps else "-"
    predicted = row["peak_predicted_gib"]
    times = [each["step_time_s"] for each in steps]
    step = f"{sum(times) / len(times):.2f}" if times else "-"
    rows.append(
        (row["cell"], row["state"], "-" if predicted is None else f"{predicted:.2f}", rss, step)
    )
widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
for row in rows:
    print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
