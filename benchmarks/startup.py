"""What a rank imports until its first step, against `import torch`: python -m benchmarks.startup

A LoRA run of a Llama under FSDP on one rank, its tokens cached. Files are code files that were
opened, CPU time is that of importing the same modules again in a fresh process. Medians of several
runs, the two kinds alternating; the first run of each fills Python's caches and does not count.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "configs/recipes/demo.yaml"
DATASET = ROOT / "configs/datasets/slurm_qa.jsonl"
RUNS = 5
LIMIT = 1.25
# Counted by Python itself, so that nothing has to be traced.
COUNT = """
import json, os, sys
opened = set()
def note(event, arguments):
    if event == "open" and str(arguments[0]).endswith((".py", ".pyc")):
        opened.add(str(arguments[0]))
sys.addaudithook(note)
def report():
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    libraries = {str(file) for file in files if str(file).endswith(".so")}
    found = {"files": len(opened | libraries), "modules": list(sys.modules)}
    print(json.dumps(found), flush=True)
    os._exit(0)
"""
TORCH = COUNT + "import torch\nreport()"
# Until the optimizer has stepped after the first loss; it is tried on copies before that.
RANK = (
    COUNT
    + """
from torch.optim.optimizer import register_optimizer_step_post_hook
from trainer import start
from trainer.objectives.sft import SupervisedFineTuning
class FirstStep(SupervisedFineTuning):
    def loss(self, models, batch):
        register_optimizer_step_post_hook(lambda *_: report())
        return super().loss(models, batch)
sys.exit(start.main(sys.argv[1:], FirstStep))
"""
)
TIME = """
import importlib, json, os, sys
names = json.loads(sys.stdin.read())
before = os.times()
for name in names:
    try:
        importlib.import_module(name)
    except ImportError:
        pass  # made by another module, not imported
after = os.times()
print(after.user - before.user + after.system - before.system)
"""


def write_run(folder: Path, model: Path) -> Path:
    """train.yaml of a LoRA run of the demo model in `folder`, whose tokens a first run caches."""
    config = {
        "output_dir": str(folder),
        "device": "cpu",
        "dtype": "fp32",
        # FSDP on one rank.
        "master_weights": "fp32",
        "model": yaml.safe_load(DEMO.read_text())["model"]
        | {
            "_component_": "torchtune.models.llama3.lora_llama3",
            "lora_attn_modules": ["q_proj", "v_proj"],
            "lora_rank": 4,
            "lora_alpha": 8,
        },
        "tokenizer": {
            "_component_": "trainer.data.tokenizers.hugging_face_tokenizer",
            "path": str(model),
            "max_seq_len": 128,
        },
        "checkpointer": {"checkpoint_dir": str(model)},
        "dataset": {
            "_component_": "torchtune.datasets.instruct_dataset",
            "source": "json",
            "data_files": str(DATASET),
            "split": "train",
            "column_map": {"input": "question", "output": "answer"},
            "packed": True,
        },
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 1,
        },
        "batch_size": 2,
        "max_steps": 3,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def imported(code: str, *arguments: str) -> dict[str, Any]:
    """{"files": opened code files, "modules": names in the order of their import} of a process."""
    output = _run(code, *arguments)
    return json.loads(output.splitlines()[-1])


def import_seconds(modules: list[str]) -> float:
    """CPU time, user and system, of importing these modules in a fresh process."""
    return float(_run(TIME, stdin=json.dumps(modules)).splitlines()[-1])


def _run(code: str, *arguments: str, stdin: str | None = None) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        input=stdin,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout


def measure(path: Path, runs: int) -> dict[str, Any]:
    """{"files": ratio, "seconds": ratio, "modules": what a rank imports} over `runs` runs."""
    imported(RANK, str(path))
    rank, torch = imported(RANK, str(path)), imported(TORCH)
    seconds: dict[str, list[float]] = {"rank": [], "torch": []}
    # Only those that a rank imports beside torch's own, after it: torch is first in both.
    rest = [name for name in rank["modules"] if name not in set(torch["modules"])]
    for _ in range(runs):
        seconds["torch"].append(import_seconds(["torch"]))
        seconds["rank"].append(import_seconds(["trainer.start", *rest]))
    rank_s, torch_s = (statistics.median(seconds[kind]) for kind in ("rank", "torch"))
    return {
        "files": rank["files"] / torch["files"],
        "seconds": rank_s / torch_s,
        "modules": rank["modules"],
        "lines": [
            f"import torch        {torch['files']:5} files  {torch_s:5.2f} s CPU",
            f"to the first step   {rank['files']:5} files  {rank_s:5.2f} s CPU",
        ],
    }


def main() -> int:
    """Print the figures and the ratios; exit status 1 if one is above the limit."""
    from trainer import demo

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        demo.make(folder / "model", DATASET)
        found = measure(write_run(folder / "run", folder / "model"), RUNS)
    print("\n".join(found["lines"]))
    print(f"ratio               {found['files']:5.2f}        {found['seconds']:5.2f}")
    return int(max(found["files"], found["seconds"]) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
