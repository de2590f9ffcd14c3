"""NeMo Automodel 0.7's protocol: python -m nemo_automodel.cli.app CONFIG

Steps count from 0. A checkpoint holds .incomplete until it is whole; training.jsonl is appended.
SIGTERM saves after the step and ends with status 0.
"""

import json
import re
import signal
import sys
import time
from pathlib import Path

import yaml
from protocol import RANK, any_of, end, figures, steps, stops_on

config = yaml.safe_load(Path(sys.argv[1]).read_text())
folder = Path(config["checkpoint"]["checkpoint_dir"])
folder.mkdir(parents=True, exist_ok=True)
schedule = config["step_scheduler"]
whole = [
    int(match[1])
    for path in folder.iterdir()
    if (match := re.fullmatch(r"epoch_\d+_step_(\d+)", path.name))
    and not (path / ".incomplete").exists()
]
asked = stops_on(signal.SIGTERM)
for step in steps(max(whole, default=-1) + 1, schedule["max_steps"] - 1):
    stopping = any_of(asked)
    if RANK == 0:
        row = {"step": step, "epoch": 0, **figures(step + 1), "tps_per_gpu": 1000.0}
        with (folder / "training.jsonl").open("a") as file:
            file.write(json.dumps({**row, "timestamp": time.ctime()}) + "\n")
        if (step + 1) % schedule["ckpt_every_steps"] == 0 or stopping:
            checkpoint = folder / f"epoch_0_step_{step}"
            checkpoint.mkdir(exist_ok=True)
            (checkpoint / ".incomplete").touch()
            (checkpoint / "model.safetensors").touch()
            time.sleep(0.05)
            (checkpoint / ".incomplete").unlink()
    if stopping:
        break
end()
