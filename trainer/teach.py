"""A teacher's log-probabilities, kept: torchrun ... -m trainer.teach <run>/train.yaml

It reads the recipe of a distillation, and writes beside the tokens of its datasets.
"""

import sys
import time
from dataclasses import replace

import torch

from runspec import files
from runspec.keys.distill import TeachConfig
from runspec.progress import Heartbeat
from trainer import start
from trainer.errors import ConfigError
from trainer.methods.base import Objective
from trainer.methods.kept_teacher import Kept, kept, sets
from trainer.methods.teach import TeacherPass, Teaching
from trainer.models.builder import Builder
from trainer.parallel import fitness
from trainer.parallel import world as distributed
from trainer.parallel.device import described
from trainer.parallel.world import StopRequest
from trainer.progress import Progress

SAID_EVERY_S = 15.0


def run(config: TeachConfig, attempt: int, objective: type[Objective]) -> None:
    """Do the parts that are not there yet; a stop keeps those that are written."""
    config = replace(config, teacher_log_probs="online")
    world = distributed.start(config.device, vars(config))
    stop = StopRequest(world, config.output_dir)
    if line := fitness.check(world):
        world.say(line)

    def check() -> Kept:
        if faults := objective.faults(config):
            raise ConfigError(*faults)
        return kept(config)

    kept_set = world.from_main(check)
    method = objective(config, world)
    data = method.build_data()
    passes = [
        TeacherPass(key, block, samples, config, world, kept_set)
        for key, (block, samples) in sets(config, data).items()
    ]
    progress = Progress(sum(len(each.parts) for each in passes), attempt, described(world.device))
    logs = config.output_dir / files.LOGS / str(attempt)
    heartbeat = Heartbeat(logs if world.is_main else None)

    def tell(state: str, step: int) -> None:
        progress.state, progress.step = state, step
        if world.is_main:
            progress.write(config.output_dir)

    module, said, steps, before = None, 0.0, 0, 0
    if any(each.left for each in passes):
        module = method.build_models(Builder(config, world, data)).policy.module.eval()
    tell("running", progress.total_steps - sum(len(each.left) for each in passes))
    with torch.no_grad():
        for each in passes:
            for done in each.run(module):
                steps += 1
                heartbeat.step(steps)
                if time.monotonic() - said > SAID_EVERY_S:
                    said = time.monotonic()
                    world.say(f"teacher: {done.parts:,} of {done.of:,} parts")
                    tell("running", before + done.parts)
                if world.sum([stop.seen_here()])[0]:
                    world.say("asked to stop: the parts that are written are kept")
                    tell("stopped", before + done.parts)
                    stop.clear()
                    return
            before += len(each.parts)
            for line in world.from_main(each.described):
                world.say(line)
    heartbeat.enter("finished")
    tell("finished", progress.total_steps)


def main(arguments: list[str]) -> int:
    """Run the teacher by the given train.yaml; exit status 0, 1, or 2 for wrong usage."""
    return start.main(arguments, Teaching, run)


if __name__ == "__main__":
    start.leave(main(sys.argv[1:]))
