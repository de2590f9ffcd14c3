"""What a rank imports until its first step, beside `import torch`: python -m benchmarks.startup

A LoRA run of a Llama under FSDP on one rank, its tokens cached, with the model of each source.
Files are code files that were opened, CPU time is that of importing the same modules again in a
fresh process. Medians of several runs, the kinds alternating; the first run of each fills Python's
caches and does not count.
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
SOURCES = ("transformers", "torchtune")
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


def write_run(folder: Path, model: Path, source: str) -> Path:
    """train.yaml of a LoRA run of the demo model in `folder`, whose tokens a first run caches.

    Args:
        source: of the model's code: transformers names nothing of torchtune's.
    """
    adapter: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8}
    dataset = {"source": "json", "data_files": str(DATASET), "split": "train", "packed": True}
    config = {
        "output_dir": str(folder),
        "device": "cpu",
        "dtype": "fp32",
        # FSDP on one rank.
        "master_weights": "fp32",
        "model": adapter,
        "tokenizer": {
            "_component_": "trainer.data.tokenizers.hugging_face_tokenizer",
            "path": str(model),
            "max_seq_len": 128,
        },
        "checkpointer": {"checkpoint_dir": str(model)},
        "dataset": {"_component_": "trainer.data.conversations.conversation_dataset", **dataset},
        "batch_size": 2,
        "max_steps": 3,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
    }
    if source == "torchtune":
        config["model"] = adapter | {
            **yaml.safe_load(DEMO.read_text())["model"],
            "_component_": "torchtune.models.llama3.lora_llama3",
            "lora_attn_modules": ["q_proj", "v_proj"],
        }
        config["dataset"] = dataset | {
            "_component_": "torchtune.datasets.instruct_dataset",
            "column_map": {"input": "question", "output": "answer"},
        }
        config["lr_scheduler"] = {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 1,
        }
    else:
        config["dataset"]["data_files"] = str(_conversations(folder))
    path = folder / "train.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config))
    return path


def _conversations(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "conversations.jsonl"
    rows = [json.loads(line) for line in DATASET.read_text().splitlines()]
    turns = (
        [{"role": "user", "content": x["question"]}, {"role": "assistant", "content": x["answer"]}]
        for x in rows
    )
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
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


def measure(paths: dict[str, Path], runs: int) -> dict[str, dict[str, Any]]:
    """{kind: {"files", "seconds", "modules"}} of `import torch` and of a rank with each config."""
    for path in paths.values():
        imported(RANK, str(path))
    found = {"import torch": imported(TORCH)}
    found |= {kind: imported(RANK, str(path)) for kind, path in paths.items()}
    seconds: dict[str, list[float]] = {kind: [] for kind in found}
    for _ in range(runs):
        for kind, each in found.items():
            first = ["torch"] if kind == "import torch" else ["trainer.start"]
            seconds[kind].append(import_seconds([*first, *each["modules"]]))
    medians = {kind: statistics.median(each) for kind, each in seconds.items()}
    return {kind: each | {"seconds": medians[kind]} for kind, each in found.items()}


def main() -> int:
    """Print the figures, and the ratios to those of `import torch`."""
    from trainer import demo

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        demo.make(folder / "model", DATASET)
        paths = {kind: write_run(folder / kind, folder / "model", kind) for kind in SOURCES}
        found = measure(paths, RUNS)
    torch = found["import torch"]
    for kind, each in found.items():
        ratios = [each[key] / torch[key] for key in ("files", "seconds")]
        figures = f"{each['files']:5} files ({ratios[0]:.2f})  {each['seconds']:5.2f} s CPU"
        print(f"{kind:14} {figures} ({ratios[1]:.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
