"""Evaluate a finished model, alone or against another: -m plugins.evaluate.main <run>/train.yaml

Each rank answers its own shards of the samples and saves each. A model that is larger than a GPU
takes all GPUs of a node, whose first rank answers for the others. A start after a kill goes on with
the shards that are missing. Rank 0 computes the table once all are there. What a sample gets does
not depend on the number of ranks.
"""

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from plugins.evaluate import shards
from plugins.evaluate.pairs import model_of
from plugins.evaluate.recipe_keys import EVAL, TASK
from plugins.evaluate.result import write as write_result
from runspec import files, progress
from runspec.processes import end_with_torchrun
from trainer import start
from trainer.inference import loading
from trainer.parallel.device import described, own

_POLL_S = 0.5


def load(path: Path) -> dict[str, Any]:
    """Return the settings of train.yaml with the defaults of the keys."""
    given = yaml.safe_load(path.read_text(encoding="utf-8"))
    config = load_defaults() | {key: value for key, value in given.items() if value is not None}
    defaults = {key: entry.default for key, entry in TASK.items()}
    config["tasks"] = {
        name: defaults | {key: value for key, value in task.items() if value is not None}
        for name, task in config["tasks"].items()
    }
    return config


def load_defaults() -> dict[str, Any]:
    """Return the defaults of the keys of `entry: eval`."""
    return {key: entry.default for key, entry in EVAL.items()}


def run(config: dict[str, Any], run_dir: Path, rank: int, world: int, attempt: int) -> bool:
    """Evaluate; return whether it is finished, False if the ranks were asked to stop."""
    plan = shards.Plan(config, run_dir)
    device = own(config["device"])
    number_bytes = loading.DTYPES[config["dtype"]].itemsize
    spread = any(
        loading.is_larger_than_a_gpu(plan.folder(side), number_bytes, device) for side in plan.sides
    )
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if spread else 1
    if rank % ranks:
        return True
    mine = [s for s in plan.missing() if s.number % (world // ranks) == rank // ranks]
    facts = {"attempt": attempt, "total_steps": plan.samples, "device": described(device)}
    tell = partial(_tell, facts, plan, run_dir)
    if rank == 0:
        tell("running")
    over = f", one model over {ranks} GPUs" if spread else ""
    print(f"rank {rank}: {len(mine)} of {len(plan.shards)} shards to do{over}", flush=True)
    for side in plan.sides:
        left = [shard for shard in mine if shard.side == side]
        if not left:
            continue
        answerer = model_of(plan.folder(side), config, device, spread)
        for shard in left:
            if (run_dir / files.STOP).exists():
                return _stopped(tell, rank)
            plan.compute(shard, answerer)
            if rank == 0:
                tell("running")
        del answerer
    while rank == 0 and plan.missing():
        if (run_dir / files.STOP).exists():
            return _stopped(tell, rank)
        tell("running")
        time.sleep(_POLL_S)
    if rank == 0:
        write_result(plan, config, run_dir)
        tell("finished")
        print(f"wrote {run_dir / files.EVALS}", flush=True)
    return True


def _tell(facts: dict[str, Any], plan: shards.Plan, run_dir: Path, state: str) -> None:
    progress.write(run_dir, {**facts, "state": state, "step": plan.done_samples()})


def _stopped(tell: Callable[[str], None], rank: int) -> bool:
    if rank == 0:
        tell("stopped")
    print("asked to stop: what is answered is saved", flush=True)
    return False


def main(arguments: list[str]) -> int:
    """Evaluate by the given train.yaml; exit status 0, 1, 2 for wrong usage."""
    if len(arguments) != 1:
        print("usage: python -m plugins.evaluate.main <run>/train.yaml", file=sys.stderr)
        return 2
    end_with_torchrun()
    path = Path(arguments[0]).absolute()
    run_dir = path.parent
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    attempt = start.attempt_number()
    try:
        run(load(path), run_dir, rank, world, attempt)
    except Exception as error:
        start.report(error, run_dir, rank, attempt)
        return 1
    return 0


if __name__ == "__main__":
    start.leave(main(sys.argv[1:]))
