"""torchtitan 0.3's protocol: python -m torchtitan.train --module M --config C --a.b=v ...

Figures are lines of the log. A checkpoint is whole once it holds .metadata. A signal ends it.
"""

import re
import sys
from pathlib import Path

from protocol import RANK, end, loss, steps

given = dict(argument[2:].split("=", 1) for argument in sys.argv[1:] if "=" in argument)
folder = Path(given["dump_folder"]) / given["checkpoint.folder"]
whole = [
    int(match[1])
    for path in folder.glob("step-*/.metadata")
    if (match := re.fullmatch(r"step-(\d+)", path.parent.name))
]
for step in steps(max(whole, default=0) + 1, int(given["training.steps"])):
    if RANK == 0:
        line = f"loss: \x1b[32m{loss(step):8.5f}  \x1b[38;5;208mgrad_norm:  1.0000"
        print(f"[titan] \x1b[31mstep: {step:2}  {line}  \x1b[36mtps: 1,234  \x1b[0m", flush=True)
        if step % int(given["checkpoint.interval"]) == 0:
            (folder / f"step-{step}").mkdir(parents=True, exist_ok=True)
            (folder / f"step-{step}" / ".metadata").touch()
end()
