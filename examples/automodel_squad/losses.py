"""Prints the losses of the runs side by side: python losses.py FOLDER (run.sh calls it)"""

import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])
columns: dict[str, dict[int, float]] = {}
for name in ("one_gpu", "four_gpus", "two_nodes"):
    rows = map(json.loads, (folder / f"run-{name}" / "metrics.jsonl").open(encoding="utf-8"))
    columns[name] = {row["step"]: row["loss"] for row in rows if "loss" in row}
if (automodel := folder / "automodel.json").is_file():
    losses = json.loads(automodel.read_text(encoding="utf-8"))["losses"]
    columns["automodel"] = dict(enumerate(losses, start=1))
first = columns["one_gpu"]
print("STEP" + "".join(f"  {name:>10}" for name in columns))
for step in sorted(first):
    if step == 1 or step % 5 == 0:
        print(f"{step:>4}" + "".join(f"  {losses[step]:>10.6f}" for losses in columns.values()))
for name, losses in columns.items():
    largest = max(abs(losses[step] - loss) for step, loss in first.items())
    print(f"largest difference from one_gpu: {name} {largest:.2e}")
