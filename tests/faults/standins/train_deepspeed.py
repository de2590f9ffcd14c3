"""A script with a DeepSpeed config: resumes from the newest checkpoint, stops at the stop file."""

import argparse
import json
import os
from pathlib import Path

import deepspeed
import torch

RUN = Path(os.environ["RUN_DIR"])
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=int(os.environ["LOCAL_RANK"]))
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--every", type=int, default=5)
deepspeed.add_config_arguments(parser)
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
deepspeed.init_distributed(dist_backend="gloo")
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
engine.load_checkpoint(str(RUN / "checkpoints"))
main = (
    engine.global_rank == 0 if hasattr(engine, "global_rank") else torch.distributed.get_rank() == 0
)


def progress(state):
    if main:
        text = json.dumps(
            {
                "state": state,
                "attempt": int(os.environ["COOKBOOK_ATTEMPT"]),
                "step": engine.global_steps,
                "total_steps": args.steps,
            }
        )
        (RUN / ".progress.tmp").write_text(text)
        os.replace(RUN / ".progress.tmp", RUN / "progress.json")


while engine.global_steps < args.steps:
    generator = torch.Generator().manual_seed(engine.global_steps)
    x = torch.randn(8, 32, generator=generator)
    loss = (engine(x) - x.sum(1, keepdim=True)).pow(2).mean()
    engine.backward(loss)
    engine.step()
    import time

    time.sleep(0.1)
    stop = torch.tensor(float(Path(os.environ["COOKBOOK_STOP_FILE"]).exists()))
    torch.distributed.all_reduce(stop)
    if main:
        with open(RUN / "metrics.jsonl", "a") as f:
            f.write(
                json.dumps({"step": engine.global_steps, "loss": loss.item(), "time": time.time()})
                + "\n"
            )
    if stop or engine.global_steps % args.every == 0:
        engine.save_checkpoint(str(RUN / "checkpoints"))
        progress("running")
    if stop and engine.global_steps < args.steps:
        progress("stopped")
        raise SystemExit
progress("finished")
